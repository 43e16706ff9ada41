"""The probe under FSDP2 over gloo against a single process."""

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.controller.test_probe import sequences
from tests.optimizer.test_sharded import shard, world
from tests.ranks import run_ranks
from tests.tiny_models import loss_of, tiny_model, tokens
from verl_logra import LoGRA, LoGRAConfig, install
from verl_logra.probe import Probe, ProbeSequence


def measured(rank, own, reshard_after_forward=True, param_dtype=None):
    """Prediction, verified and realised KL of one step; all ranks see the same gradient, ``own`` the probe of each."""
    config = LoGRAConfig(rank=6, scale="lr", kl={})
    model = tiny_model()
    install(model, config)
    if world() > 1:
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        model = shard(model, world(), reshard_after_forward=reshard_after_forward, mp_policy=policy)
    optimizer = LoGRA(model, config, lr=3e-3)
    loss_of(model, tokens()).backward()
    optimizer.propose()
    results = []
    for method in ("jvp", "finite_difference"):
        probe = Probe(model, own[rank], method=method)
        results.append(probe.predict())
    probe.remember()
    with optimizer.trial(0.5):
        results.append(probe.kl_since_remembered())
    optimizer.commit(0.5)
    results.append(probe.kl_since_remembered())
    return [r.value for r in results], results[0].num_tokens


def cases():
    first, second = sequences()
    short = ProbeSequence(tokens(1, 6, seed=8)[0], torch.arange(6) >= 5)
    return {
        "a sequence each": [[first], [second]],
        "different lengths and numbers": [[first, short], [second]],
        "a rank without any": [[first, second], []],
    }


def everything(rank):
    results = {name: measured(rank, own) for name, own in cases().items()}
    results["kept gathered"] = measured(rank, cases()["a sequence each"], reshard_after_forward=False)
    results["bf16"] = measured(rank, cases()["a sequence each"], param_dtype=torch.bfloat16)
    return results


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, everything)


@pytest.mark.parametrize("case", [*cases(), "kept gathered"])
def test_sharded_measurements_equal_single_process(case, two_ranks):
    own = cases().get(case, cases()["a sequence each"])
    values, num_tokens = measured(0, [own[0] + own[1]])
    for rank in two_ranks:
        assert rank[case][1] == num_tokens
        assert rank[case][0][0] == pytest.approx(values[0], rel=1e-6)
        assert rank[case][0][1:] == pytest.approx(values[1:], rel=2e-3)


def test_bfloat16_parameters_measure_as_float32_ones(two_ranks):
    """Prediction and verification; what is realised also rounds the gathered weights, which no probe can foresee."""
    values, _ = measured(0, [sequences()])
    assert two_ranks[0]["bf16"][0][:3] == pytest.approx(values[:3], rel=0.05)
