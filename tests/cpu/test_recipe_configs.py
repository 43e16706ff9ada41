"""Every shipped recipe's overrides compose with verl's own configuration and pass its checks."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
hydra = pytest.importorskip("hydra")

ROOT = Path(__file__).parents[2]
RECIPES = sorted(p.parent.name for p in ROOT.glob("recipes/*/run.sh") if "common/recipe.sh" in p.read_text())


def overrides_of(recipe: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("OPTIM", "SEED", "STEPS", "LR", "RANKS", "OUT")}
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


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("variables", [{"OPTIM": "adamw"}, {"OPTIM": "logra", "KL_BUDGET": "1e-3", "RANKS": "2"}])
def test_recipe_composes_and_verl_accepts_it(recipe: str, variables: dict[str, str]) -> None:
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    config = compose(recipe, **variables)
    validate_config(config=config, use_reference_policy=False, use_critic=False)
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    ranks = int(variables.get("RANKS", 1))
    assert config.trainer.n_gpus_per_node == config.ray_kwargs.ray_init.num_gpus == ranks
    assert actor.strategy == "fsdp2"
    if variables["OPTIM"] == "logra":
        from verl_logra import LoGRAConfig
        from verl_logra.integrations.settings import wants_logra

        assert wants_logra(actor.optim)
        settings = LoGRAConfig.from_dict(actor.optim.override_optimizer_config)
        assert settings.kl is not None and settings.kl.budget == 1e-3
    else:
        assert (actor.optim.optimizer_impl, actor.optim.optimizer) == ("torch.optim", "AdamW")


@pytest.mark.parametrize("recipe", RECIPES)
def test_both_optimizers_get_the_same_problem(recipe: str) -> None:
    """All but the optimizer's own settings (and the run's name) is equal, so that a comparison means something."""

    def problem(optim: str) -> set[str]:
        lines = set(overrides_of(recipe, OPTIM=optim, OUT="x").stdout.splitlines())
        return {line for line in lines if ".optim." not in line}

    assert problem("adamw") == problem("logra")


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
@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OPTIM": "adam"}, "OPTIM=adam is neither logra nor adamw"),
        ({"OPTIM": "adamw", "KL_BUDGET": "1e-3"}, "needs OPTIM=logra"),
    ],
)
def test_wrong_variables_are_refused_by_name(recipe: str, variables: dict[str, str], message: str) -> None:
    refused = overrides_of(recipe, **variables)
    assert refused.returncode == 1 and message in refused.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_help_names_every_variable_of_the_recipe(recipe: str) -> None:
    script = (ROOT / "recipes" / recipe / "run.sh").read_text()
    shown = subprocess.run(
        ["bash", str(ROOT / "recipes" / recipe / "run.sh"), "--help"], capture_output=True, text=True, timeout=60
    )
    assert shown.returncode == 0
    for name in ("OPTIM", "STEPS", "SEED", "LR", "RANK", "UPDATE_RATIO", "KL_BUDGET", "RANKS", "OUT", "VENV"):
        assert f"  {name} " in shown.stdout, name
        assert name == "VENV" or f"{{{name}:=" in script, f"{name} has no default"
