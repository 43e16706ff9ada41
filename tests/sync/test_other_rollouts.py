"""A rollout engine without a receiver, named in verl's own registry."""

import asyncio
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

pytest.importorskip("verl")

from verl.workers.rollout import base as rollout_base

from tests.sync.test_colocated import train, trained


class Adapter:
    """What verl's sglang adapter is to a weight sync: it takes names and tensors."""

    def __init__(self, **logra):
        self.config = SimpleNamespace(
            checkpoint_engine=SimpleNamespace(backend="naive", engine_kwargs=logra, update_weights_bucket_megabytes=1)
        )
        self.received = {}

    async def update_weights(self, weights, global_steps=None, wire_format="named_tensors"):
        self.received = {name: tensor.clone() for name, tensor in weights}
        return global_steps


@pytest.fixture
def adapter_class(monkeypatch):
    """verl's registry with one engine more, as it is after ``import verl``."""
    from verl_logra.integrations.other_rollouts import take_over

    module = ModuleType("an_engine_of_somebody")
    module.Adapter = Adapter
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(rollout_base._ROLLOUT_REGISTRY, ("other", "async"), f"{module.__name__}.Adapter")
    take_over(rollout_base._ROLLOUT_REGISTRY)
    take_over(rollout_base._ROLLOUT_REGISTRY)  # a second time changes nothing
    return rollout_base.get_rollout_class("other")


def test_engines_of_verl_are_taken_over_on_import():
    for rollout in ("sglang", "trtllm"):
        assert rollout_base._ROLLOUT_REGISTRY[rollout, "async"].startswith("verl_logra.integrations.other_rollouts.")


def test_a_rollout_without_a_receiver_gets_full_syncs_and_one_log_line(adapter_class, caplog):
    model, optimizer, weight_sync = trained()
    adapter = adapter_class(logra={"enable": True})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            train(optimizer)
            assert asyncio.run(adapter.update_weights(weight_sync.session(optimizer.num_updates), global_steps=7)) == 7
            state = model.state_dict()
            assert adapter.received.keys() == state.keys()
            assert all(torch.equal(adapter.received[name], tensor) for name, tensor in state.items())
    assert [r.message for r in caplog.records if "rollout.name=other" in r.message] == [
        "full weight sync (refused: rollout.name=other has no receiver for low-rank updates; vllm has one)"
    ]
    assert weight_sync.metrics["sync/full"] == 1 and weight_sync.metrics["sync/ratio"] == 1


def test_without_the_low_rank_sync_nothing_is_said(adapter_class, caplog):
    _, optimizer, weight_sync = trained()
    adapter = adapter_class()
    with caplog.at_level(logging.WARNING):
        asyncio.run(adapter.update_weights(weight_sync.session(optimizer.num_updates)))
    assert adapter.received and not caplog.records and not weight_sync.metrics
