"""The sender over FSDP2 shards: the same message as a single process, uneven and empty shards included."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from tests.sync.rollout import Rollout, send, weight_sync_of
from tests.sync.test_exact import SIZES
from tests.tiny_models import tiny_model
from verl_logra import LoGRA, LoGRAConfig, install
from verl_logra.sync.sender import rows_of_ranks


def messages(rank, dtype, architecture, mesh_shape=None):
    """Items of three syncs with 0, 1 and 3 updates; sketches are a function of the global row alone."""
    model = tiny_model(architecture, dtype=dtype, **SIZES)
    config = LoGRAConfig(rank=4, scale="lr", non_target="adamw")
    install(model, config)
    if dist.is_initialized():
        shape = mesh_shape or (dist.get_world_size(),)
        names = ("replicate", "shard")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = LoGRA(model, config, lr=1e-2, weight_decay=0.1)
    weight_sync = weight_sync_of(model, optimizer)
    rollout = Rollout(tiny_model(architecture, **SIZES), torch.bfloat16)
    out = []
    for step, num_updates in enumerate([0, 1, 3]):
        for update in range(num_updates):
            generator = torch.Generator().manual_seed(10 * step + update)
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
                    if dist.is_initialized():
                        grad = dist.tensor.distribute_tensor(grad, parameter.device_mesh, parameter.placements)
                    parameter.grad = grad
            optimizer.step()
        session, plans = send(weight_sync, rollout, optimizer)
        out.append(
            (plans[0].kind, session.metrics["sync/bytes"], {n: rollout.whole(n).clone() for n in rollout.shapes})
        )
        for name, weight, _ in optimizer.target_weights():
            truth = weight.detach().full_tensor() if dist.is_initialized() else weight.detach()
            assert torch.equal(rollout.whole(f"{name}.weight"), truth.bfloat16()), name
    return out


@pytest.mark.parametrize(
    "world_size, mesh, dtype, architecture",
    [
        (2, None, torch.float32, "qwen2"),
        (3, None, torch.bfloat16, "llama"),  # uneven shards
        (4, (2, 2), torch.bfloat16, "qwen2"),
    ],
)
def test_receiver_behind_sharded_trainer_equals_single_process(world_size, mesh, dtype, architecture):
    single = messages(0, dtype, architecture)
    for ranks in run_ranks(world_size, messages, dtype, architecture, mesh):
        for (kind, num_bytes, weights), (kind_1, num_bytes_1, weights_1) in zip(ranks, single, strict=True):
            assert (kind, num_bytes) == (kind_1, num_bytes_1)
            for name, weight in weights.items():
                if name.endswith("proj.weight"):  # AdamW's own rounding may depend on the shard's size
                    assert torch.equal(weight, weights_1[name]), name


def test_rows_of_ranks_are_those_of_torch_chunk():
    for rows in range(12):
        for num_ranks in range(1, 8):
            chunks = [len(c) for c in torch.arange(rows).chunk(num_ranks)] if rows else [0]
            assert rows_of_ranks(rows, num_ranks) == chunks + [0] * (num_ranks - len(chunks))
