"""verl's real FSDP engine as the sender, and its server's choices."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")

from tests.integrations.engines import build_engine, one_rank, save_model
from tests.sync.rollout import Rollout, send
from tests.sync.test_exact import assert_equal


def step(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            grad = torch.randn(parameter.shape, generator=generator)
            parameter.grad = torch.distributed.tensor.distribute_tensor(
                grad, parameter.device_mesh, parameter.placements
            )
    engine.optimizer.step()


class Whole:
    """An engine's module and optimizer, gathered, as ``assert_equal`` wants them."""

    def __init__(self, engine):
        self.engine = engine

    def state_dict(self):
        return {name: p.full_tensor() for name, p in self.engine.module.state_dict().items()}

    def target_weights(self):
        return [(n, w.detach().full_tensor(), low) for n, w, low in self.engine.optimizer.target_weights()]


@pytest.mark.parametrize("non_target", ["adamw", "frozen"])
def test_the_engines_sessions_keep_a_rollout_equal_and_a_loaded_checkpoint_makes_the_next_full(tmp_path, non_target):
    model_path = save_model(tmp_path / "model", "qwen2")
    with one_rank(tmp_path):
        engine = build_engine(model_path, {"rank": 4, "update_ratio": 1e-2, "non_target": non_target})
        whole = Whole(engine)
        rollout = Rollout(whole, torch.bfloat16)
        reasons = []
        for seed in range(4):
            if seed == 2:
                engine.save_checkpoint(str(tmp_path / "checkpoint"), global_step=1)
            if seed == 3:
                engine.load_checkpoint(str(tmp_path / "checkpoint"))
            session, peft_config = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
            assert peft_config is None
            _, plans = send(session.sync, rollout, engine.optimizer)
            reasons.append(plans[0].reason)
            assert_equal(whole, whole, rollout)
            step(engine, seed)
        assert reasons == ["first sync", "none", "none", "resumed run"]
        weights = dict(engine.get_per_tensor_param()[0])
        assert weights.keys() == whole.state_dict().keys()
        assert all(torch.equal(weights[n], p) for n, p in whole.state_dict().items())


def test_the_server_keeps_weights_through_a_sleep_and_brings_the_receiver(monkeypatch):
    pytest.importorskip("vllm")
    from verl_logra.integrations.rollout import WORKER_EXTENSION, LoGRAHttpServer

    server = object.__new__(LoGRAHttpServer)
    server.config = SimpleNamespace(mtp=None, checkpoint_engine=None)
    monkeypatch.setattr(LoGRAHttpServer, "lora_as_adapter", False)
    assert super(LoGRAHttpServer, server)._resolve_sleep_level() == 2  # verl's own would discard them
    assert server._resolve_sleep_level() == 1
    for configured in ({}, {"worker_extension_cls": "verl_logra.cpu.vllm_worker.CPUWorkerExtension"}):
        server._preprocess_engine_kwargs(configured)
        assert configured["worker_extension_cls"] == WORKER_EXTENSION
    with pytest.raises(ValueError, match=r"worker_extension_cls=mine\.Extension has no receiver"):
        server._preprocess_engine_kwargs({"worker_extension_cls": "mine.Extension"})
