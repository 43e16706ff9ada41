"""FSDP2 over gloo against a single process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.tiny_models import loss_of, tiny_model, tokens
from verl_logra import LoGRA, LoGRAConfig, install


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(model, world_size, **options):
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


SKETCH_CASES = {
    # name: (architecture, checkpointing, immediate gradient sync, parameter dtype, relative tolerance)
    "qwen2": ("qwen2", True, False, torch.float32, 1e-5),
    "qwen3 immediate sync": ("qwen3", True, True, torch.float32, 1e-5),
    "llama": ("llama", True, False, torch.float32, 1e-5),
    "gemma2 no checkpointing": ("gemma2", False, False, torch.float32, 1e-5),
    "qwen3 bf16": ("qwen3", True, False, torch.bfloat16, 5e-2),
}
STEP_CASES = {
    # name: (settings, tied embeddings, steps, all ranks see the same data)
    "lr": (dict(scale="lr", non_target="frozen"), False, 1, True),
    "ratio": (dict(scale="ratio", update_ratio=1e-2, non_target="frozen"), False, 1, True),
    "adamw": (dict(scale="ratio", update_ratio=1e-2, factor_dtype="float32"), False, 3, False),
    "adamw tied": (dict(scale="ratio", update_ratio=1e-2, factor_dtype="float32"), True, 3, False),
}


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def sketches(rank, architecture, checkpointing, immediate_sync, param_dtype):
    model = tiny_model(architecture, attn_implementation="sdpa")
    config = LoGRAConfig(rank=6, scale="lr")
    install(model, config)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    model = shard(model, world(), mp_policy=policy).train()
    optimizer = LoGRA(model, config, lr=1e-3)
    batch = tokens(batch=4)[rank :: world()]
    with torch.no_grad():  # a log-prob forward before the first training forward
        loss_of(model, batch)
    micro_batches = batch.chunk(2)
    for i, ids in enumerate(micro_batches):
        model.set_requires_gradient_sync(immediate_sync or i == len(micro_batches) - 1)
        (loss_of(model, ids) / len(micro_batches)).backward()
    assert all(t.module.weight.grad is None for t in optimizer.targets.values())
    return {n: (full(t.update.grad), t.projection()) for n, t in optimizer.targets.items()}


def steps(rank, settings, tie, num_steps, same_data):
    """Some optimizer steps; the weights, moments and metrics afterwards."""
    config = LoGRAConfig(rank=6, **settings)
    model = tiny_model("qwen2", tie_word_embeddings=tie)
    install(model, config)
    if world() > 1:
        model = shard(model, world())
    optimizer = LoGRA(model, config, lr=1e-2, weight_decay=0.1)
    for step in range(num_steps):
        ids = tokens(batch=4, seed=step)
        loss_of(model, ids if same_data else ids.chunk(world())[rank]).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: full(p).clone() for name, p in model.state_dict().items()}
    moments = [full(optimizer.state[t.update]["second_moment"]) for t in optimizer.targets.values()]
    return weights, moments, optimizer.last_step.metrics()


def everything(rank):
    return (
        {name: sketches(rank, *case[:-1]) for name, case in SKETCH_CASES.items()},
        {name: steps(rank, *case) for name, case in STEP_CASES.items()},
    )


def only_same_data_steps(rank):
    return {name: steps(rank, *case) for name, case in STEP_CASES.items() if case[-1]}


@pytest.fixture(scope="module")
def two_ranks():
    return run_ranks(2, everything)[0]


@pytest.mark.parametrize("case", SKETCH_CASES)
def test_sketch_equals_dense_oracle(case, two_ranks):
    architecture, *_, tolerance = SKETCH_CASES[case]
    dense = tiny_model(architecture).double()
    loss_of(dense, tokens(batch=4)).backward()
    sharded = two_ranks[0][case]
    assert len(sharded) == 14
    for name, (sketch, projection) in sharded.items():
        expected = dense.get_submodule(name).weight.grad @ projection.double().T
        assert (sketch - expected).norm() <= tolerance * expected.norm(), name


@pytest.mark.parametrize("case", ["lr", "ratio"])
def test_sharded_step_equals_single_process_bit_for_bit(case, two_ranks):
    """Both ranks see the same data, so that averaging two equal gradients rounds nothing."""
    weights, moments, _ = steps(0, *STEP_CASES[case])
    sharded_weights, sharded_moments, _ = two_ranks[1][case]
    assert all(torch.equal(weights[name], sharded_weights[name]) for name in weights)
    assert all(torch.equal(a, b) for a, b in zip(moments, sharded_moments, strict=True))


def test_uneven_and_empty_shards_step_as_a_single_process():
    """12 rows of k_proj on 5 ranks: shards of 3, 3, 3, 3 and 0 rows. A mean of five equal floats may round."""
    for case, (sharded_weights, _, _) in run_ranks(5, only_same_data_steps)[0].items():
        weights, _, _ = steps(0, *STEP_CASES[case])
        for name in weights:
            torch.testing.assert_close(sharded_weights[name], weights[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("case", ["adamw", "adamw tied"])
def test_sharded_training_equals_single_process(case, two_ranks):
    """Data split over the ranks, the rest under the nested AdamW, several steps."""
    weights, _, metrics = steps(0, *STEP_CASES[case])
    sharded_weights, _, sharded_metrics = two_ranks[1][case]
    for name in weights:
        torch.testing.assert_close(sharded_weights[name], weights[name], rtol=2e-3, atol=2e-4, msg=name)
    if STEP_CASES[case][1]:
        assert torch.equal(sharded_weights["lm_head.weight"], sharded_weights["model.embed_tokens.weight"])
    assert metrics.keys() == sharded_metrics.keys()
    assert all(metrics[key] == pytest.approx(sharded_metrics[key], rel=1e-3) for key in metrics)
