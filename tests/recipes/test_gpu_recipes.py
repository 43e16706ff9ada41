"""Every GPU recipe, up to the point where a GPU is needed."""

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")

ROOT = Path(__file__).parents[2]
GPU = ROOT / "recipes" / "gpu"
RECIPES = sorted(path.stem for path in GPU.glob("run_*.sh"))
VARIABLES = set(re.findall(r"\$\{(\w+):?=", "".join(p.read_text() for p in GPU.glob("*.sh"))))


def script(recipe: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    command = ["bash", str(GPU / f"{recipe}.sh"), *arguments]
    return subprocess.run(command, env={**environment, **variables}, capture_output=True, text=True, timeout=60)


def overrides_of(recipe: str, *arguments: str, **variables: str) -> list[str]:
    printed = script(recipe, "--print-overrides", *arguments, **variables)
    assert printed.returncode == 0, printed.stderr
    return printed.stdout.splitlines()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Configuration and tokenizer of a model, no weights."""
    from transformers import Qwen2Config

    from recipes.quickstart.prepare import build_tokenizer

    folder = str(tmp_path_factory.mktemp("model"))
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=1, num_attention_heads=4)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    return folder


ADAMW = "adamw"


@pytest.fixture(scope="module")
def results(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of all recipes, and of the first with AdamW, in one process: importing verl takes most of the time."""
    folder = tmp_path_factory.mktemp("overrides")
    lists = {recipe: overrides_of(recipe) for recipe in RECIPES}
    lists[ADAMW] = overrides_of(RECIPES[0], OPTIM="adamw")
    for name, lines in lists.items():
        (folder / name).write_text("\n".join(lines))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("gpu_checks.py")), model_dir, *(str(folder / n) for n in lists)],
        env={**os.environ, "VERL_PLATFORM": "nvidia", "PYTHONPATH": str(ROOT), "VERL_LOGGING_LEVEL": "WARNING"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_valid_up_to_the_gpu(recipe: str, results: dict[str, Any]) -> None:
    result = results[recipe]
    actor, critic = result["actor"], result["critic"]
    assert actor["engine"].startswith("LoGRAEngine_FSDPEngineWithLMHead")
    assert (actor["rank"], actor["budget"], actor["non_target"], actor["dtype"]) == (256, 2e-4, "frozen", "fp32")
    assert actor["schedule_updates"] == result["updates"]  # the budget falls over the whole run, not over a part of it
    assert result["sync"] is True and result["checkpoint_engine"] == "logra" and result["known_engine"]
    assert (critic is not None) == recipe.endswith("_ppo")
    if critic is not None:
        assert critic["engine"].startswith("LoGRAEngine_FSDPEngineWithValueHead")
        assert (critic["non_target"], critic["budget"], critic["update_ratio"]) == ("adamw", None, 6e-4)
    assert (result["right"]["score"], result["wrong"]["score"]) == (1, 0)
    assert result["tools"] == ({"calculator": "30"} if recipe.endswith("_tool") else {})
    asynchronous = recipe.endswith("_async")
    assert result["trainer"] == ("PPOTrainerSeparateAsync" if asynchronous else "PPOTrainerSync")
    assert result["gpus"] + (result["rollout_gpus"] if asynchronous else 0) <= 8  # one node
    assert result["gpus"] % result["tensor_parallel"] == 0
    assert result["tokens_per_micro_batch"] >= result["tokens"]  # verl refuses a longer sequence at run time only
    if "qwen2.5_math" in recipe:
        assert result["tokens"] <= 4096  # Qwen2.5-Math's context
    dapo = recipe.endswith("_dapo")
    assert result["reward_manager"] == ("DAPORewardManager" if dapo else "NaiveRewardManager")
    assert result["filter_groups"] == ("acc" if dapo else None)


def test_adamw_is_the_same_recipe_with_full_syncs(results: dict[str, Any]) -> None:
    assert results[ADAMW]["actor"]["rank"] is None
    assert (results[ADAMW]["sync"], results[ADAMW]["checkpoint_engine"]) == (None, "naive")
    for recipe in RECIPES:
        logra, adamw = overrides_of(recipe, OUT="x"), overrides_of(recipe, OUT="x", OPTIM="adamw")
        assert all(".optim." in line or "checkpoint_engine" in line for line in set(logra) ^ set(adamw))
        if recipe.endswith("_async"):  # verl refuses its in-process sync there
            assert "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl" in adamw


@pytest.mark.parametrize("recipe", RECIPES)
def test_planner_says_that_it_fits(recipe: str, results: dict[str, Any]) -> None:
    """80 GB of device memory are 74.5 GiB; rollouts that share the device sleep while it trains."""
    planner = Path(sys.executable).with_name("verl-logra")
    if not planner.exists():
        pytest.skip("verl-logra plan is not installed")
    result = results[recipe]
    sequences = max(1, result["tokens_per_micro_batch"] // result["tokens"])
    asked = ["--model", result["model"], "--ranks", result["gpus"], "--rank", 256, "--seq-len", result["tokens"]]
    asked += ["--micro-batch", sequences, "--non-target", "frozen", "--device-memory", 74.5, "--json"]
    done = subprocess.run([planner, "plan", *map(str, asked)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["methods"]["logra"]["peak_gib"] < 74.5


@cache
def source_of(package: str) -> str:
    """All Python text of an installed package but the definitions of its configuration."""
    import importlib.util

    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    files = Path(spec.submodule_search_locations[0]).rglob("*.py")
    return "\n".join(f.read_text() for f in files if not re.search(r"/(workers|trainer)/config/", str(f)))


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_key_is_read_by_someone(recipe: str) -> None:
    """Hydra takes ``+key`` without asking who reads it, and some of verl's own keys are read by nothing."""
    for line in overrides_of(recipe):
        key = line.split("=")[0].lstrip("+")
        if key.startswith(("hydra.", "ray_kwargs.")):
            continue  # hydra's and Ray's own
        leaf = key.split(".")[-1]
        assert re.search(rf"\b{leaf}\b", source_of("verl")), f"nothing in verl reads {key}"
        for name in re.findall(r"(\w+): ", line.partition("=")[2]) if "overlong_buffer_cfg" in key else []:
            assert re.search(rf"overlong_buffer_cfg\.{name}\b", source_of("verl")), name


@pytest.mark.parametrize("recipe", RECIPES)
def test_users_override_wins_and_help_names_the_variables(recipe: str) -> None:
    assert overrides_of(recipe, "trainer.test_freq=7")[-1] == "trainer.test_freq=7"
    shown = script(recipe, "--help")
    assert shown.returncode == 0
    first = (GPU / f"{recipe}.sh").read_text().splitlines()[1]
    assert first.removeprefix("# ") in shown.stdout
    shared = set(re.findall(r"\$\{(\w+):?=", (GPU / "common.sh").read_text()))
    own = set(re.findall(r"\$\{(\w+):?=", (GPU / f"{recipe}.sh").read_text()))
    assert {name for name in shared | own if not re.search(rf"\b{name}\b", shown.stdout)} <= {
        "UPDATES_PER_STEP",
        "N_ROLLOUT_GPUS",
        "OVERLONG_BUFFER",
    }


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OPTIM": "adam"}, "OPTIM=adam is neither logra nor adamw"),
        ({"OPTIM": "adamw", "SYNC": "low_rank"}, "SYNC=low_rank needs OPTIM=logra"),
        ({"OPTIM": "adamw", "KL_BUDGET": "1e-3"}, "KL_BUDGET=1e-3 needs OPTIM=logra"),
        ({"SYNC": "half"}, "SYNC=half is neither low_rank nor full"),
    ],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_wrong_variables_are_refused_by_name(recipe: str, variables: dict[str, str], message: str) -> None:
    refused = script(recipe, "--print-overrides", **variables)
    assert refused.returncode == 1 and message in refused.stderr


def test_missing_data_is_named_before_anything_starts(tmp_path: Path) -> None:
    refused = script(RECIPES[0], DATA_DIR=str(tmp_path), PYTHON="/nowhere/python")
    assert refused.returncode == 1
    assert f"{tmp_path}/dapo_math/train.parquet does not exist: make it with recipes/data" in refused.stderr


def test_no_step_control_is_an_empty_budget() -> None:
    (line,) = [line for line in overrides_of(RECIPES[0], KL_BUDGET="") if "override_optimizer_config" in line]
    assert line.endswith("={rank: 256, update_ratio: 6e-5}")
