"""vLLM's own linear layers, packed for a CPU and loaded again."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

vllm_linear = pytest.importorskip("vllm.model_executor.layers.linear")

from verl_logra.cpu.vllm_worker import restore_packed_weights  # noqa: E402


@pytest.fixture(scope="module")
def vllm_alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's parallel state for a single process."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )

    rendezvous: Path = tmp_path_factory.mktemp("vllm") / "rendezvous"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel(1)
        yield
    cleanup_dist_env_and_memory()


LAYERS = {
    "replicated": lambda: vllm_linear.ReplicatedLinear(16, 24, bias=False, params_dtype=torch.float32),
    "merged": lambda: vllm_linear.MergedColumnParallelLinear(16, [8, 24], bias=False, params_dtype=torch.float32),
    "qkv": lambda: vllm_linear.QKVParallelLinear(16, 8, 4, 2, bias=False, params_dtype=torch.float32),
    "row": lambda: vllm_linear.RowParallelLinear(16, 8, bias=False, params_dtype=torch.float32),
}


def load(layer: torch.nn.Module, weight: torch.Tensor) -> None:
    """As verl does: vLLM's loader per shard, then packing."""
    if isinstance(layer, vllm_linear.QKVParallelLinear):
        shards: list[object] = ["q", "k", "v"]
        sizes = [32, 16, 16]
    elif isinstance(layer, vllm_linear.MergedColumnParallelLinear):
        shards, sizes = [0, 1], [8, 24]
    else:
        layer.weight.weight_loader(layer.weight, weight)
        shards, sizes = [], []
    for shard, rows in zip(shards, weight.split(sizes) if sizes else [], strict=True):
        layer.weight.weight_loader(layer.weight, rows, shard)
    layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())
def test_packed_layer_computes_with_the_weight_loaded_last(
    vllm_alone: None, make: Callable[[], torch.nn.Module]
) -> None:
    layer = make()
    x, shape = torch.randn(5, 16), layer.weight.shape
    for seed in range(3):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        assert restore_packed_weights(layer) == (0 if seed == 0 else 1), "packed after the first load, not before"
        load(layer, weight)
        torch.testing.assert_close(layer(x)[0], x @ weight.T, rtol=1e-4, atol=1e-4)


def test_weight_that_was_not_loaded_again_is_noticed(vllm_alone: None) -> None:
    layer = LAYERS["row"]()
    load(layer, torch.randn(8, 16))
    restore_packed_weights(layer)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer(torch.randn(2, 16))[0].isnan().all()
