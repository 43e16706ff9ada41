"""The worker extension's parts on real vLLM layers of a CPU, which packs weights and drops them."""

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("verl")

from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from tests.sync.test_vllm_layout import SHAPES, load, worker
from verl_logra.integrations.vllm_layout import Layout
from verl_logra.integrations.vllm_worker import LoGRAWorkerExtension, UnpackedWeights, _Sync, effective_tensors
from verl_logra.sync.receiver import Receiver

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="vLLM packs weights on a CPU only")


def packed_block(monkeypatch):
    """As vLLM leaves a model after loading."""
    block = worker(monkeypatch, 0, 1, torch.float32)
    for name, shape in SHAPES.items():
        load(block, name, torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    for layer in block.modules():
        if isinstance(layer, LinearBase):
            layer.quant_method.process_weights_after_loading(layer)
            assert layer.weight.numel() == 0
    return block


def test_updates_of_unpacked_weights_are_what_packed_layers_compute_with(monkeypatch):
    block = packed_block(monkeypatch)
    unpacked = UnpackedWeights(block)
    layout = Layout(block, unpacked.weight_of)
    unpacked.unpack()  # the first time there is nothing to give back, and everything is loaded
    weights = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in SHAPES.items()}
    for name, weight in weights.items():
        load(block, name, weight)
    unpacked.pack()
    for step in range(3):
        unpacked.unpack()
        for name, weight in weights.items():
            part = layout.locate(f"checkpoint.{name}", *weight.shape)
            assert torch.equal(part.block(), weight), name
            part.block().add_(0.25 + step)
            weight.add_(0.25 + step)
        unpacked.pack()
        effective = dict(effective_tensors(block))
        qkv = torch.cat([weights[f"attn.{n}_proj"] for n in "qkv"])
        gate_up = torch.cat([weights["mlp.gate_proj"], weights["mlp.up_proj"]])
        assert torch.equal(effective["body.attn.qkv_proj.weight (packed)"], qkv)
        assert torch.equal(effective["body.mlp.gate_up.weight (packed)"], gate_up)
        assert torch.equal(effective["body.mlp.down_proj.weight (packed)"], weights["mlp.down_proj"])
        x = torch.randn(2, 16)
        with torch.no_grad():
            torch.testing.assert_close(block.body.attn.qkv_proj(x)[0], x @ qkv.T)


def test_a_half_updated_model_cannot_generate():
    class Model(torch.nn.Module):
        def compute_logits(self, hidden):
            return hidden

    model = Model()
    extension = object.__new__(LoGRAWorkerExtension)
    sync = _Sync(Receiver(lambda *_: None), UnpackedWeights(model))
    for patched in (False, True):  # verl puts a compute_logits of its own on the model
        if patched:
            model.compute_logits = lambda hidden: hidden + 1
        extension._logra_stop_generation(sync, model)
        extension._logra_stop_generation(sync, model)  # the failed sync's full one
        with pytest.raises(RuntimeError, match="half updated and must not generate"):
            model.compute_logits(1)
        extension._logra_allow_generation(sync, model)
        assert model.compute_logits(1) == 1 + patched
