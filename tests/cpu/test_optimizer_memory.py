"""What the recipes report an optimizer to hold, against byte counts done by hand."""

import json
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from recipes.common import optimizer_memory
from recipes.common.optimizer_memory import added_parameters, num_bytes

LOGRA_RANK = 4


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Steps an optimizer twice under the hooks; returns what they wrote, in the order of first steps."""
    monkeypatch.setenv(optimizer_memory.RUN_FOLDER, str(tmp_path))
    for name in ("_steps", "_orders", "_gradient_bytes"):
        monkeypatch.setattr(optimizer_memory, name, {})
    hooks = [
        register_optimizer_step_pre_hook(optimizer_memory._before),
        register_optimizer_step_post_hook(optimizer_memory._after),
    ]

    def measure(model: torch.nn.Module, *optimizers: torch.optim.Optimizer) -> list[dict]:
        for _ in range(optimizer_memory.WATCHED_STEP):
            model(torch.randn(3, 8)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        files = sorted((tmp_path / "optimizer_memory").glob("*.json"))
        return [json.loads(file.read_text()) for file in files]

    yield measure
    for hook in hooks:
        hook.remove()


def test_adamw_holds_a_gradient_and_two_moments_per_parameter(measured) -> None:
    model = torch.nn.Linear(8, 16, bias=False)
    (found,) = measured(model, torch.optim.AdamW(model.parameters()))
    step_count = 4
    assert found == {
        "optimizer": "AdamW",
        "gradient_bytes": 8 * 16 * 4,
        "state_bytes": 2 * 8 * 16 * 4 + step_count,
        "added_parameter_bytes": 0,
    }


def test_logra_holds_a_sketch_a_factor_and_one_moment_per_row(measured) -> None:
    from verl_logra import LoGRA

    model = torch.nn.Sequential()
    model.add_module("up_proj", torch.nn.Linear(8, 16, bias=False))
    (found,) = measured(model, LoGRA(model, {"rank": LOGRA_RANK, "non_target": "frozen"}, lr=1e-3))
    assert found["gradient_bytes"] == found["added_parameter_bytes"] == 16 * LOGRA_RANK * 4
    assert found["state_bytes"] == 16 * 4


def test_nested_adamw_is_counted_within_logra_and_not_beside_it(measured) -> None:
    from verl_logra import LoGRA

    model = torch.nn.Sequential()
    model.add_module("up_proj", torch.nn.Linear(8, 16, bias=False))
    model.add_module("head", torch.nn.Linear(16, 2, bias=False))
    (found,) = measured(model, LoGRA(model, {"rank": LOGRA_RANK}, lr=1e-3))
    assert found["optimizer"] == "LoGRA"
    assert found["gradient_bytes"] == (16 * LOGRA_RANK + 16 * 2) * 4
    assert found["state_bytes"] == (16 + 2 * 16 * 2) * 4 + 4


def test_two_optimizers_of_one_process_are_told_apart_by_their_first_step(measured) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Linear(4, 2, bias=False))
    critic, actor = torch.optim.SGD(model[1].parameters()), torch.optim.AdamW(model[0].parameters())
    assert [found["optimizer"] for found in measured(model, critic, actor)] == ["SGD", "AdamW"]


def test_lora_adds_its_adapters_and_dense_training_adds_nothing() -> None:
    base, adapter = torch.nn.Linear(4, 4).requires_grad_(False), torch.nn.Linear(4, 2, bias=False)
    both = [*base.parameters(), *adapter.parameters()]
    assert num_bytes(added_parameters(torch.optim.AdamW(both))) == 4 * 2 * 4
    assert added_parameters(torch.optim.AdamW(adapter.parameters())) == []


def test_views_into_one_buffer_count_once_each_and_objects_are_looked_into() -> None:
    buffer = torch.zeros(10)

    class Projector:
        def __init__(self) -> None:
            self.matrix, self.rank = torch.zeros(6), 3

    projector = Projector()
    assert num_bytes([buffer[:4], buffer[4:], {"again": buffer[:4]}, [projector, projector]]) == (10 + 6) * 4


def test_quantised_state_counts_its_codes_and_scales() -> None:
    low_bit = pytest.importorskip("torchao.optim")
    weight = torch.nn.Parameter(torch.randn(64, 128))
    optimizer = low_bit.AdamW8bit([weight])
    for _ in range(2):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    numel = weight.numel()
    held = num_bytes(optimizer.state.values())
    assert 2 * numel < held < 2 * 1.2 * numel, "two moments of a byte each, and a scale per block"


def test_every_shard_of_a_sharded_model_counts() -> None:
    """Local views made on the way must not be taken for one another."""
    from torch.distributed.fsdp import fully_shard

    def held() -> dict[str, int]:
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8, bias=False) for _ in range(50)))
        fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 8)).sum().backward()
        optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        return {"gradients": num_bytes(gradients), "moments": num_bytes(optimizer.state.values())}

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        assert held() == {"gradients": 50 * 64 * 4, "moments": 50 * (2 * 64 * 4 + 4)}
    finally:
        torch.distributed.destroy_process_group()
