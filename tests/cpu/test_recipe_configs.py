"""Every shipped recipe's overrides compose with verl's own configuration and pass its checks."""

import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")
hydra = pytest.importorskip("hydra")

ROOT = Path(__file__).parents[2]
RECIPES = sorted(p.parent.name for p in ROOT.glob("recipes/*/run.sh") if "common/recipe.sh" in p.read_text())


def overrides_of(recipe: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = ("OPTIM", "SEED", "STEPS", "LR", "RANKS", "OUT", "CRITIC_OPTIM", "KL_BUDGET", "SAVE_EVERY", "RESUME")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    return subprocess.run(
        ["bash", str(ROOT / "recipes" / recipe / "run.sh"), "--print-overrides", *arguments],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def compose(recipe: str, *arguments: str, **variables: str) -> Any:
    printed = overrides_of(recipe, *arguments, **variables)
    assert printed.returncode == 0, printed.stderr
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose("ppo_trainer", overrides=printed.stdout.splitlines())


SETTINGS = [{"OPTIM": "adamw"}, {"OPTIM": "logra", "KL_BUDGET": "1e-3", "RANKS": "2"}]
OTHER_METHODS = ("adam8bit", "lora", "galore", "flora", "apollo")
PACKAGES = {"adam8bit": "torchao", "galore": "galore_torch", "flora": "flora_opt", "apollo": "apollo_torch"}
"""Of the extra "baselines"."""


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("variables", SETTINGS)
def test_recipe_composes_and_verl_accepts_it(recipe: str, variables: dict[str, str]) -> None:
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = compose(recipe, **variables)
    # Not the critic's part: it would read a tokenizer from the model folder, which does not exist here.
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    ranks = int(variables.get("RANKS", 1))
    assert config.trainer.n_gpus_per_node == ranks
    assert config.ray_kwargs.ray_init.num_gpus == ranks + (recipe == "disaggregated")
    assert actor.strategy == "fsdp2"
    if variables["OPTIM"] == "logra":
        assert_logra(actor.optim, budget=1e-3)
    else:
        assert (actor.optim.optimizer_impl, actor.optim.optimizer) == ("torch.optim", "AdamW")


def assert_logra(optim: Any, *, budget: float | None) -> None:
    from verl_logra import LoGRAConfig
    from verl_logra.integrations.settings import wants_logra

    assert wants_logra(SimpleNamespace(**optim))
    settings = LoGRAConfig.from_dict(optim.override_optimizer_config)
    assert (settings.kl and settings.kl.budget) == budget


@pytest.mark.parametrize("method", OTHER_METHODS)
def test_every_method_gets_a_class_that_exists_and_its_rank(method: str) -> None:
    from recipes.quickstart.prepare import Settings

    if method in PACKAGES:
        pytest.importorskip(PACKAGES[method])
    config = compose("quickstart", OPTIM=method, RANK="8")
    optim, model = config.actor_rollout_ref.actor.optim, config.actor_rollout_ref.model
    assert hasattr(importlib.import_module(optim.optimizer_impl), optim.optimizer)
    assert model.lora_rank == (8 if method == "lora" else 0)
    ranked = (optim.override_optimizer_config or {}).get("rank")
    assert ranked == (8 if method in ("galore", "flora", "apollo") else None)
    assert ranked is None or ranked < Settings().hidden_size


def test_critic_has_an_optimizer_of_its_own_and_never_a_kl_budget() -> None:
    config = compose("ppo", OPTIM="adamw", CRITIC_OPTIM="logra")
    assert config.actor_rollout_ref.actor.optim.optimizer == "AdamW"
    assert_logra(config.critic.optim, budget=None)
    config = compose("ppo", OPTIM="logra", KL_BUDGET="1e-3")
    assert_logra(config.actor_rollout_ref.actor.optim, budget=1e-3)
    assert_logra(config.critic.optim, budget=None)
    refused = overrides_of("ppo", CRITIC_OPTIM="lora")
    assert refused.returncode == 1 and "value head" in refused.stderr


def test_dapo_has_its_four_parts_where_verl_reads_them() -> None:
    config = compose("dapo")
    actor, shaping = config.actor_rollout_ref.actor, config.reward.reward_kwargs
    assert actor.clip_ratio_high > actor.clip_ratio_low and actor.loss_agg_mode == "token-mean"
    assert config.algorithm.filter_groups.enable and config.trainer.use_v1, "only the current trainer filters groups"
    assert config.reward.reward_manager.name == "dapo" and shaping.overlong_buffer_cfg.enable
    assert shaping.max_resp_len == config.data.max_response_length > shaping.overlong_buffer_cfg.len > 0


def test_disaggregated_rollouts_get_low_rank_syncs() -> None:
    config = compose("disaggregated", RANKS="2", ROLLOUTS="3")
    assert config.trainer.v1.trainer_mode == "separate_async" and not config.actor_rollout_ref.hybrid_engine
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.n_gpus_per_node, config.ray_kwargs.ray_init.num_gpus) == (3, 5)
    assert rollout.checkpoint_engine.backend == "logra"


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_optimizers_get_the_same_problem(recipe: str) -> None:
    """All but the optimizer's own settings (and the run's name) is equal, so that a comparison means something."""

    def problem(optim: str) -> set[str]:
        lines = set(overrides_of(recipe, OPTIM=optim, CRITIC_OPTIM="adamw", OUT="x").stdout.splitlines())
        return {line for line in lines if not re.search(r"actor\.optim\.|\.model\.(lora|target_modules)", line)}

    assert problem("logra") and all(problem(method) == problem("logra") for method in ("adamw", "lora", "galore"))


@pytest.mark.parametrize("recipe", RECIPES)
def test_longest_batch_of_prompts_fits_at_once(recipe: str) -> None:
    """A split prompt ends vLLM's seeded sampling on a CPU."""
    config = compose(recipe)
    rollout = config.actor_rollout_ref.rollout
    assert not rollout.enable_chunked_prefill
    assert rollout.max_num_batched_tokens >= rollout.max_model_len
    assert rollout.max_model_len == config.data.max_prompt_length + config.data.max_response_length


@pytest.mark.parametrize("recipe", RECIPES)
def test_users_own_override_wins(recipe: str) -> None:
    config = compose(recipe, "actor_rollout_ref.rollout.n=3", "trainer.test_freq=7")
    assert (config.actor_rollout_ref.rollout.n, config.trainer.test_freq) == (3, 7)


@pytest.mark.parametrize("recipe", RECIPES)
def test_checkpoints_are_kept_and_resumed_on_demand_only(recipe: str) -> None:
    def trainer(**variables: str) -> tuple[int, str, bool]:
        trainer = compose(recipe, **variables).trainer
        return trainer.save_freq, trainer.resume_mode, trainer.val_before_train

    assert trainer() == (-1, "disable", True)
    assert trainer(SAVE_EVERY="5") == (5, "disable", True)
    assert trainer(SAVE_EVERY="5", RESUME="1") == (5, "auto", False), "the earlier part validated already"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RESUME": "1"}, "has no checkpoint"),
        ({"RESUME": "1", "STEPS": "4"}, "has 4 updates; set STEPS"),
        ({"RESUME": "yes"}, "RESUME=yes must be 1"),
        ({"SAVE_EVERY": "0"}, "SAVE_EVERY=0 must be a positive number"),
    ],
)
def test_what_cannot_be_resumed_is_refused_and_kept(variables: dict[str, str], message: str) -> None:
    run = ROOT / "outputs/test-never-run"
    (run / "checkpoints").mkdir(parents=True)
    try:
        if "STEPS" in variables:
            (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
        (run / "metrics.jsonl").touch()
        refused = subprocess.run(
            ["bash", str(ROOT / "recipes/quickstart/run.sh")],
            env={**os.environ, "VENV": sys.prefix, "OUT": run.name, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert refused.returncode == 1 and message in refused.stderr
        assert (run / "metrics.jsonl").exists()
    finally:
        shutil.rmtree(run)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OPTIM": "adam"}, "adam is none of logra adamw"),
        ({"OPTIM": "adamw", "KL_BUDGET": "1e-3"}, "needs OPTIM=logra"),
        ({"OPTIM": "flora", "RANKS": "2"}, "flora trains on one rank only"),
    ],
)
def test_wrong_variables_are_refused_by_name(recipe: str, variables: dict[str, str], message: str) -> None:
    refused = overrides_of(recipe, **variables)
    assert refused.returncode == 1 and message in refused.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_names_every_variable_of_the_recipe(recipe: str) -> None:
    script = (ROOT / "recipes" / recipe / "run.sh").read_text()
    if "quickstart/task.sh" in script:
        script += (ROOT / "recipes/quickstart/task.sh").read_text()
    shown = subprocess.run(
        ["bash", str(ROOT / "recipes" / recipe / "run.sh"), "--help"], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0
    for name in ("OPTIM", "STEPS", "SEED", "LR", "RANK", "UPDATE_RATIO", "KL_BUDGET", "RANKS", "OUT", "VENV"):
        assert f"  {name} " in shown.stdout, name
        assert name == "VENV" or f"{{{name}:=" in script, f"{name} has no default"
