"""Shapes against transformers' own models and against the published parameter counts."""

import json
from pathlib import Path

import pytest

from verl_logra.planner.models import load, shipped

PUBLISHED = {  # parameters, as the model cards' safetensors say
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-Math-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-Math-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-2-9b": 9_241_705_984,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_count_is_the_published_one(name: str) -> None:
    assert load(name).num_parameters == PUBLISHED[name]


ENTRIES = json.loads(Path(__file__).parents[2].joinpath("verl_logra/planner/models.json").read_text())
OTHERS = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 2},
    {"model_type": "mistral", "head_dim": 16},
    {"model_type": "qwen3", "attention_bias": True, "tie_word_embeddings": True},
    {"model_type": "gemma2"},
]


def few_layers(config: dict) -> dict:
    """Layers are all alike; four of them are built quickly."""
    return {**config, "num_hidden_layers": min(4, config["num_hidden_layers"])}


@pytest.mark.parametrize("config", [few_layers(e["config"]) for e in ENTRIES], ids=[e["names"][0] for e in ENTRIES])
def test_parameters_and_targets_are_those_of_the_real_model(config: dict, tmp_path: Path) -> None:
    check_against_transformers(config, tmp_path)


@pytest.mark.parametrize("config", OTHERS, ids=lambda c: c["model_type"])
def test_keys_of_other_configurations_are_followed(config: dict, tmp_path: Path) -> None:
    small = {"vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    check_against_transformers({**small, "intermediate_size": 96, **config}, tmp_path)


def check_against_transformers(config: dict, tmp_path: Path) -> None:
    """``config`` goes through transformers' own file, where defaults are written out as users' files have them."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from verl_logra import LoGRAConfig, install

    full = transformers.AutoConfig.for_model(**config)
    full.save_pretrained(tmp_path)
    with torch.device("meta"):
        real = transformers.AutoModelForCausalLM.from_config(full, dtype=torch.float32)
    for path in (tmp_path, tmp_path / "config.json"):
        planned = load(str(path))
        assert {p.name: p.shape for p in planned.parameters} == {n: tuple(p.shape) for n, p in real.named_parameters()}
    targets = install(real, LoGRAConfig(rank=8, non_target="adamw"))
    assert [p.name for p in planned.targets] == [f"{name}.weight" for name in targets]


def test_short_names_and_closest_names() -> None:
    assert load("qwen2.5-7b") == shipped()["Qwen/Qwen2.5-7B"]
    with pytest.raises(ValueError, match=r"did you mean .*Qwen/Qwen2.5-7B"):
        load("Qwen/Qwen2.5-7")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "is not a model's configuration"),
        ('{"model_type": "t5"}', "model_type='t5' is not supported; the planner knows qwen2"),
        ('{"model_type": "llama", "vocab_size": 8}', "has no valid hidden_size, num_hidden_layers"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load(str(tmp_path))
