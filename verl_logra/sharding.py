"""Row-sharded tensors: what of an FSDP2 parameter lives on this rank, and sums over all of it."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory with ``tensor``; a tensor that is not sharded itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_like(rows: Tensor, parameter: Tensor, *trailing: int) -> Tensor:
    """This rank's ``rows`` as a tensor ``[out, *trailing]``, sharded as ``parameter [out, ...]`` is."""
    if not isinstance(parameter, DTensor):
        return rows
    shape = torch.Size((parameter.shape[0], *trailing))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(rows, parameter.device_mesh, parameter.placements, shape=shape, stride=stride)


def sum_over_shards_(sums: Tensor, parameter: Tensor) -> Tensor:
    """Adds up sums over local rows, in place, over the ranks that ``parameter``'s rows are spread over."""
    if isinstance(parameter, DTensor):
        dist.all_reduce(sums, group=parameter.device_mesh.get_group(parameter.device_mesh.ndim - 1))
    return sums


def check_row_sharded(name: str, weight: Tensor, update: Tensor) -> None:
    """Raises ValueError unless both are whole, or sharded alike along their rows."""
    if not isinstance(update, DTensor) and not isinstance(weight, DTensor):
        return
    placements = [t.placements if isinstance(t, DTensor) else None for t in (weight, update)]
    if placements[0] is None or placements[0] != placements[1] or not placements[0][-1].is_shard(0):
        raise ValueError(
            f"{name}: the weight is sharded as {placements[0]}, its update parameter as {placements[1]}; LoGRA needs "
            f"both sharded by rows: use fully_shard without a shard_placement_fn"
        )
