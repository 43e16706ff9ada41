"""Targets inside real vLLM linear layers, tensor-parallel sizes 1, 2 and 4, against vLLM's own weight loaders."""

from typing import ClassVar

import pytest
import torch
from torch import nn

vllm = pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.model_executor.layers import linear  # noqa: E402
from vllm.model_executor.models.utils import WeightsMapper  # noqa: E402

from verl_logra.integrations.vllm_layout import Layout  # noqa: E402

HIDDEN, HEADS, KV_HEADS, HEAD = 16, 4, 2, 8
SHAPES = {
    "attn.q_proj": (HEADS * HEAD, HIDDEN),
    "attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
    "attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
    "attn.o_proj": (HIDDEN, HEADS * HEAD),
    "mlp.gate_proj": (40, HIDDEN),
    "mlp.up_proj": (40, HIDDEN),
    "mlp.down_proj": (HIDDEN, 40),
    "mlp.column": (24, HIDDEN),
    "mlp.replicated": (8, HIDDEN),
}
SHARD_IDS = {"q_proj": "q", "k_proj": "k", "v_proj": "v", "gate_proj": 0, "up_proj": 1}
FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up", "up_proj": "gate_up"}


class Block(nn.Module):
    packed_modules_mapping: ClassVar = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up": ["gate_proj", "up_proj"]}
    hf_to_vllm_mapper = WeightsMapper(
        orig_to_new_prefix={"checkpoint.": "body."}, orig_to_new_stacked={".q_proj": (".qkv_proj", "q")}
    )

    def __init__(self, dtype):
        super().__init__()
        options = dict(bias=False, params_dtype=dtype)
        self.body = nn.Module()
        self.body.attn, self.body.mlp = nn.Module(), nn.Module()
        attn, mlp = self.body.attn, self.body.mlp
        attn.qkv_proj = linear.QKVParallelLinear(HIDDEN, HEAD, HEADS, KV_HEADS, **options)
        attn.o_proj = linear.RowParallelLinear(HEADS * HEAD, HIDDEN, **options)
        mlp.gate_up = linear.MergedColumnParallelLinear(HIDDEN, [40, 40], **options)
        mlp.down_proj = linear.RowParallelLinear(40, HIDDEN, **options)
        mlp.column = linear.ColumnParallelLinear(HIDDEN, 24, **options)
        mlp.replicated = linear.ReplicatedLinear(HIDDEN, 8, **options)


def worker(monkeypatch, rank, size, dtype=torch.bfloat16):
    """One tensor-parallel worker's layers, without the other processes."""
    monkeypatch.setattr(linear, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(linear, "get_tensor_model_parallel_world_size", lambda: size)
    import vllm.model_executor.parameter as parameter

    monkeypatch.setattr(parameter, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(parameter, "get_tensor_model_parallel_world_size", lambda: size)
    with set_current_vllm_config(VllmConfig()):
        return Block(dtype)


def load(block, name, tensor):
    group, leaf = name.split(".")
    layer = getattr(getattr(block.body, group), FUSED.get(leaf, leaf))
    arguments = (SHARD_IDS[leaf],) if leaf in SHARD_IDS else ()
    layer.weight.weight_loader(layer.weight, tensor, *arguments)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_slices_are_where_vllm_loads_them(monkeypatch, size):
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    counts = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for rank in range(size):
        block = worker(monkeypatch, rank, size)
        for parameter in block.parameters():
            parameter.data.fill_(torch.nan)
        for name, weight in weights.items():
            load(block, name, weight)
        layout = Layout(block)
        for name, weight in weights.items():
            part = layout.locate(f"checkpoint.{name}", *weight.shape)
            rows, columns = slice(part.rows.start, part.rows.stop), slice(part.columns.start, part.columns.stop)
            assert torch.equal(part.block(), weight[rows, columns]), name
            counts[name][rows, columns] += part.counted
            part.block().fill_(torch.inf)  # a view into the real parameter
        for parameter in block.parameters():
            assert parameter.isinf().all()  # nothing is left out
    assert all((count == 1).all() for count in counts.values())  # the checksum sees every element once


def test_what_has_no_place_is_refused_by_name(monkeypatch):
    layout = Layout(worker(monkeypatch, 0, 1))
    with pytest.raises(NotImplementedError, match="no module for the target checkpoint.attn.other"):
        layout.locate("checkpoint.attn.other", 4, 4)
    with pytest.raises(NotImplementedError, match="q_proj \\[64, 16\\] does not fit"):
        worker_of_two = Layout(worker(monkeypatch, 0, 2))
        worker_of_two._modules["body.attn.qkv_proj"].num_heads = 64
        worker_of_two.locate("checkpoint.attn.q_proj", 64, 16)


def test_quantised_layers_are_refused_by_name(monkeypatch):
    block = worker(monkeypatch, 0, 1)

    class Fp8LinearMethod:
        pass

    block.body.attn.o_proj.quant_method = Fp8LinearMethod()
    with pytest.raises(NotImplementedError, match="o_proj quantised \\(Fp8LinearMethod\\)"):
        Layout(block).locate("checkpoint.attn.o_proj", HIDDEN, HEADS * HEAD)
