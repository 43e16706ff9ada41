"""Builds the items of a message on the trainer: codes and coefficients gathered by rows, never a dense weight.

Every rank of the shard group must walk the items: gathering is collective. All ranks get the same items.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from jaxtyping import Float, Int16, UInt8
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_logra.core.factor import AppliedUpdate
from verl_logra.core.split_weight import join_weight, nudge_ties_
from verl_logra.sharding import local
from verl_logra.sync.checksum import MASK, tensor_checksum, weight_checksum
from verl_logra.sync.wire import Begin, Factors, FrameWriter, factors_frame_bytes

Item = tuple[str, Tensor]
_BLOCK_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class TrainedWeight:
    """A target's weight on the trainer, sharded by rows or whole."""

    name: str
    """Qualified name of the module, as in ``wire.Begin.targets``."""
    weight: Float[Tensor, "out in"]
    low_half: Int16[Tensor, "out in"] | None
    """Of a weight stored in bf16."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.weight.shape[0], self.weight.shape[1]

    def local(self) -> tuple[Tensor, Tensor | None]:
        return local(self.weight.detach()), None if self.low_half is None else local(self.low_half)


def shard_group(weight: Tensor) -> dist.ProcessGroup | None:
    """The group over which rows are sharded; None if they are not."""
    if not isinstance(weight, DTensor) or weight.device_mesh.size(weight.device_mesh.ndim - 1) == 1:
        return None
    return weight.device_mesh.get_group(weight.device_mesh.ndim - 1)


def rows_of_ranks(rows: int, num_ranks: int) -> list[int]:
    """Rows of each rank under FSDP2, which cuts as ``torch.chunk`` does; the last ranks may have none."""
    chunk = -(-rows // num_ranks)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(num_ranks)]


@torch.no_grad()
def nudge_all_(weights: Sequence[TrainedWeight]) -> None:
    """Brings fp32 weights to values that bf16 and a low half can hold, see ``core.split_weight``.

    The optimizer keeps them so; weights that came from elsewhere (a checkpoint in fp32) may not be.
    """
    for trained in weights:
        weight, low = trained.local()
        if low is None:
            nudge_ties_(weight)


@torch.no_grad()
def weight_checksums(weights: Sequence[TrainedWeight], device: torch.device) -> dict[str, int]:
    """Checksum of every target's fp32 weight; each rank sums over its own rows."""
    group = shard_group(weights[0].weight)
    sums = torch.zeros(len(weights), dtype=torch.int64, device=device)
    for i, trained in enumerate(weights):
        weight, low = trained.local()
        row = 0
        if group is not None:
            row = sum(rows_of_ranks(trained.shape[0], group.size())[: group.rank()])
        step = max(1, _BLOCK_ELEMENTS // trained.shape[1])
        for start in range(0, weight.shape[0], step):
            block = weight[start : start + step].to(device)
            if low is not None:
                block = join_weight(block, low[start : start + step].to(device))
            sums[i] += weight_checksum(block, row + start)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return {trained.name: int(s) & MASK for trained, s in zip(weights, sums, strict=True)}


class MessageSender:
    """One message. ``num_bytes`` counts what was handed out so far."""

    def __init__(self, begin: Begin, weights: Sequence[TrainedWeight], device: torch.device, frame_bytes: int) -> None:
        """``frame_bytes``: what a frame and what a gather should not exceed; one update of one target always fits."""
        self.begin = begin
        self.weights = weights
        self.device = device
        self.frame_bytes = frame_bytes
        self.num_bytes = 0
        self._frames = FrameWriter(device)

    @torch.no_grad()
    def low_rank(self, updates: Sequence[AppliedUpdate], parameters: Iterable[Item]) -> Iterator[Item]:
        """The items of a low-rank message.

        Args:
            updates: local rows of the updates ``begin.base + 1`` to ``begin.last``.
            parameters: the parameters besides the targets that changed, whole.
        """
        yield self._counted(self._frames.begin(self.begin))
        if updates:
            for factors in self._gathered_factors(updates):
                yield self._counted(self._frames.factors(factors))
        sums = {}
        for name, tensor in parameters:
            sums[name] = tensor_checksum(tensor)
            yield self._counted((name, tensor))
        yield self._end(sums)

    @torch.no_grad()
    def full(self, parameters: Iterable[Item]) -> Iterator[Item]:
        """The items of a full message; ``parameters`` are all of the model's, whole."""
        low_halves = {f"{w.name}.weight": w.low_half for w in self.weights if w.low_half is not None}
        nudge_all_(self.weights)
        yield self._counted(self._frames.begin(self.begin))
        for name, tensor in parameters:
            if name in low_halves:
                tensor = join_weight(tensor, _whole_int16(low_halves[name], self.device))
            yield self._counted((name, tensor))
        yield self._end({})

    def _end(self, parameters: dict[str, int]) -> Item:
        sums = weight_checksums(self.weights, self.device)
        return self._counted(self._frames.end(targets=sums, parameters=parameters))

    def _counted(self, item: Item) -> Item:
        self.num_bytes += item[1].numel() * item[1].element_size()
        return item

    def _gathered_factors(self, updates: Sequence[AppliedUpdate]) -> Iterator[Factors]:
        """FACTORS of all targets, several gathered at once, each with as many updates as fit a frame."""
        rank, group = self.begin.rank, shard_group(self.weights[0].weight)
        pending: list[tuple[int, int, int]] = []
        pending_bytes = 0
        for index, trained in enumerate(self.weights):
            one = factors_frame_bytes(1, trained.shape[0], rank)
            step = max(1, self.frame_bytes // one)
            for first in range(0, len(updates), step):
                count = min(step, len(updates) - first)
                if pending and pending_bytes + count * one > self.frame_bytes:
                    yield from self._gather(pending, updates, group)
                    pending, pending_bytes = [], 0
                pending.append((index, first, count))
                pending_bytes += count * one
        yield from self._gather(pending, updates, group)

    def _gather(
        self, pending: list[tuple[int, int, int]], updates: Sequence[AppliedUpdate], group: dist.ProcessGroup | None
    ) -> Iterator[Factors]:
        num_ranks = 1 if group is None else group.size()
        rank = self.begin.rank
        blobs = [_blob(updates[first : first + count], index) for index, first, count in pending]
        local = torch.cat(blobs).to(self.device)
        all_rows = [rows_of_ranks(self.weights[index].shape[0], num_ranks) for index, _, _ in pending]
        # Bytes of one row in the gather: a coefficient and the codes, for every update.
        row_bytes = [count * (4 + rank) for _, _, count in pending]
        sizes = [sum(b * rows[r] for b, rows in zip(row_bytes, all_rows, strict=True)) for r in range(num_ranks)]
        if group is None:
            gathered = [local]
        else:
            assert local.numel() == sizes[group.rank()], "the rows of this rank are not those of torch.chunk"
            padded = torch.zeros(max(sizes), dtype=torch.uint8, device=self.device)
            padded[: local.numel()] = local
            flat = torch.empty(num_ranks * max(sizes), dtype=torch.uint8, device=self.device)
            dist.all_gather_into_tensor(flat, padded, group=group)
            gathered = list(flat.split(max(sizes)))
        offsets = [0] * num_ranks
        for (index, first, count), rows in zip(pending, all_rows, strict=True):
            coefficients, codes = [], []
            for r, num_rows in enumerate(rows):
                start = offsets[r]
                middle, offsets[r] = start + 4 * count * num_rows, start + count * num_rows * (4 + rank)
                coefficients.append(gathered[r][start:middle].view(count, num_rows, 4))
                codes.append(gathered[r][middle : offsets[r]].view(count, num_rows, rank))
            yield Factors(
                target=index,
                first=first,
                coefficients=torch.cat(coefficients, dim=1).view(torch.float32).squeeze(2),
                codes=torch.cat(codes, dim=1).view(torch.int8),
            )


def _blob(updates: Sequence[AppliedUpdate], index: int) -> UInt8[Tensor, " bytes"]:
    """One target's local rows in the gather: coefficients [count, rows], then codes [count, rows, rank]."""
    factors = [update.factors[index] for update in updates if update.factors is not None]
    parts = [c.contiguous().view(torch.uint8).view(-1) for _, c in factors]
    parts += [q.contiguous().view(torch.uint8).view(-1) for q, _ in factors]
    return torch.cat(parts)


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """Gathers a sharded tensor on ``device``; collective."""
    moved: Tensor | DTensor = tensor.detach().to(device)
    return moved.full_tensor() if isinstance(moved, DTensor) else moved


def _whole_int16(tensor: Tensor, device: torch.device) -> Int16[Tensor, "out in"]:
    """As ``whole``; neither gloo nor NCCL carries int16, but both carry the same bits as bfloat16."""
    bits = tensor.detach()
    if not isinstance(bits, DTensor):
        return bits.to(device)
    local = bits.to_local().view(torch.bfloat16)
    same = DTensor.from_local(local, bits.device_mesh, bits.placements, shape=bits.shape, stride=bits.stride())
    return whole(same, device).view(torch.int16)
