"""Applies messages to slices of the rollout's parameters, with the arithmetic of ``wire``.

A rollout worker holds of every target's weight ``[out, in]`` a block of rows or of columns, somewhere inside its own
parameters. In fp32 the block is the weight; in bf16 it is the upper half, and what is missing is kept in one of three
ways: the int16 low half on the device, the int16 low half in host memory, or the whole fp32 block in host memory.

A message is applied item by item, so between BEGIN and END the weights are neither the old nor the new ones:
``Receiver.state`` says so, and a worker must not generate. A message that fails leaves it so until a full one succeeds.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from verl_logra.core.factor import cached_rows, code_product, sign_dtype, subtract_product_
from verl_logra.core.projection import projection_key, sign_words, unpack_signs
from verl_logra.core.split_weight import join_weight, nudge_ties_, split_weight
from verl_logra.sync import wire
from verl_logra.sync.checksum import MASK, tensor_checksum, weight_checksum
from verl_logra.sync.plan import ReceiverState, empty_state
from verl_logra.sync.wire import Begin, End, Factors, WireError

LowHalf = Literal["device", "host", "fp32"]
_BLOCK_ELEMENTS = 1 << 22  # at most, of a weight, and of the dense products of all updates together: 16 MiB


@dataclass(frozen=True, kw_only=True)
class Slice:
    """This worker's part of one target's weight."""

    block: Callable[[], Float[Tensor, "rows columns"]]
    """A view into the real parameter, float32 or bfloat16. Asked for each time: the parameter may be replaced."""
    rows: range
    """Rows of the whole weight that the block holds."""
    columns: range
    counted: bool = True
    """False where another worker of the group holds the same block and counts it."""


def cut(whole: Tensor, part: Slice) -> Tensor:
    """The block's part of a whole tensor."""
    return whole[part.rows.start : part.rows.stop, part.columns.start : part.columns.stop]


@dataclass
class _Kept:
    """A slice with what the parameter's dtype cannot hold."""

    part: Slice
    rest: Tensor | None
    num_applied: int = 0
    whole_seen: bool = False


@dataclass
class _Message:
    begin: Begin
    frames: wire.FrameReader
    parameters: dict[str, int] = field(default_factory=dict)


class Receiver:
    """One rollout worker's side.

    Args:
        locate: (target name, out_features, in_features) -> where its block is; raises ``NotImplementedError`` with the
            reason if it cannot be updated exactly.
        sum_over_workers: adds up an int64 tensor over the workers that share the weights.
        low_half: where what a bf16 block cannot hold is kept; no question for fp32 blocks.
    """

    def __init__(
        self,
        locate: Callable[[str, int, int], Slice],
        sum_over_workers: Callable[[Int64[Tensor, " targets"]], Tensor] = lambda sums: sums,
        low_half: LowHalf = "host",
    ) -> None:
        self._locate = locate
        self._sum_over_workers = sum_over_workers
        self.low_half: LowHalf = low_half
        self.state: ReceiverState = empty_state()
        self._kept: dict[str, _Kept] = {}
        self._message: _Message | None = None

    def kept_bytes(self) -> int:
        """Bytes kept beside the parameters."""
        return sum(k.rest.numel() * k.rest.element_size() for k in self._kept.values() if k.rest is not None)

    def refuse(self, reason: str) -> None:
        """This worker takes no exact update; every sync is a full one that never comes here."""
        self.state = empty_state(refusal=reason)
        self._kept.clear()

    def start(self) -> None:
        """A new message is about to come, whatever became of the one before."""
        if self._message is not None:
            self.abandon("a weight sync did not finish")

    @torch.no_grad()
    def take(self, name: str, tensor: Tensor) -> bool:
        """Takes the next item of a message; True if it was for the receiver alone, False if the model must load it.

        Raises:
            WireError: see ``wire``; also updates that were missed, repeated or out of order, a checksum that differs.
            NotImplementedError: a target has no place in the parameters.
        """
        if wire.is_frame(name):
            self._take_frame(tensor)
            return True
        message = self._message
        if message is None:
            raise WireError(f"{name} came before the BEGIN frame")
        if message.begin.kind == "low_rank":
            message.parameters[name] = tensor_checksum(tensor)
            return False
        kept = self._kept.get(name.removesuffix(".weight"))
        if kept is not None and name.endswith(".weight"):
            self._take_whole(kept, tensor)
        return False

    def abandon(self, problem: str) -> None:
        """The message failed: nothing is known about the weights until a full one succeeds."""
        self._message = None
        self.state = empty_state(problem=problem)

    def _take_frame(self, tensor: Tensor) -> None:
        frames = wire.FrameReader() if self._message is None else self._message.frames
        content = frames.read(tensor)
        if isinstance(content, Begin):
            if self._message is not None:
                raise WireError("a BEGIN frame came inside a message")
            self._begin(content, frames)
        elif self._message is None:
            raise WireError("a message came without its BEGIN frame")
        elif isinstance(content, Factors):
            self._apply(content, self._message.begin)
        else:
            self._finish(content, self._message)

    def _begin(self, begin: Begin, frames: wire.FrameReader) -> None:
        layout = wire.layout(begin.targets, begin.seed, begin.rank, begin.projection)
        state = self.state
        if begin.kind == "low_rank":
            mine = (state["history"], state["update"], state["layout"])
            if mine != (begin.history, begin.base, layout) or state["problem"] or not state["history"]:
                raise WireError(
                    f"the message leads from update {begin.base} of history {begin.history} to {begin.last}, but this "
                    f"worker is at update {state['update']} of history {state['history'] or 'none'}: it was sent "
                    f"twice, or one before it was missed"
                )
            if [u.number for u in begin.updates] != list(range(begin.base + 1, begin.last + 1)):
                raise WireError(f"the message says updates {begin.base + 1} to {begin.last} and lists others")
            for kept in self._kept.values():
                kept.num_applied = 0
        self._message = _Message(begin, frames)
        self.state = empty_state(problem="a weight sync did not finish")
        if begin.kind == "full":
            self._bind(begin)
        self.state["layout"] = layout

    def _bind(self, begin: Begin) -> None:
        old, self._kept = self._kept, {}
        for name, rows, columns in begin.targets:
            part = self._locate(name, rows, columns)
            block = part.block()
            if block.dtype not in (torch.float32, torch.bfloat16):
                raise NotImplementedError(f"{name} is held in {block.dtype}; exact updates need float32 or bfloat16")
            rest = None
            if block.dtype == torch.bfloat16:
                device = block.device if self.low_half == "device" else torch.device("cpu")
                dtype = torch.float32 if self.low_half == "fp32" else torch.int16
                rest = old[name].rest if name in old else None
                if rest is None or rest.shape != block.shape or rest.dtype != dtype or rest.device != device:
                    pin = device.type == "cpu" and block.device.type == "cuda"
                    rest = torch.empty(block.shape, dtype=dtype, device=device, pin_memory=pin)
            self._kept[name] = _Kept(part, rest)

    def _take_whole(self, kept: _Kept, whole: Tensor) -> None:
        """Keeps what the model's own loader is about to round away."""
        kept.whole_seen = True
        if kept.rest is None:
            return
        mine = cut(whole, kept.part)
        if kept.rest.dtype == torch.float32:
            kept.rest.copy_(mine)
        else:
            kept.rest.copy_(split_weight(mine.float())[1])

    def _apply(self, factors: Factors, begin: Begin) -> None:
        if factors.target >= len(begin.targets):
            raise WireError(f"the message has factors of target {factors.target} of {len(begin.targets)}")
        name, out_features, in_features = begin.targets[factors.target]
        kept = self._kept[name]
        count = factors.codes.shape[0]
        if factors.codes.shape[1:] != (out_features, begin.rank) or begin.kind != "low_rank":
            raise WireError(f"the factors of {name} have shape {tuple(factors.codes.shape)}")
        if factors.first != kept.num_applied or factors.first + count > len(begin.updates):
            raise WireError(
                f"{name} has {kept.num_applied} of {len(begin.updates)} updates and was sent number "
                f"{factors.first + 1} to {factors.first + count}"
            )
        block = kept.part.block()
        rows, columns = kept.part.rows, kept.part.columns
        codes = factors.codes[:, rows.start : rows.stop].to(block.device)
        coefficients = factors.coefficients[:, rows.start : rows.stop].to(block.device)
        updates = begin.updates[factors.first : factors.first + count]
        signs: dict[int, Tensor] = {}
        for update in updates:
            if update.refresh not in signs:
                key = projection_key(begin.seed, update.refresh, name)
                words = sign_words(key, begin.rank, in_features, block.device)
                whole = unpack_signs(words, in_features, sign_dtype(block.device))
                signs[update.refresh] = whole[:, columns.start : columns.stop]
        # A product is fast when it has many rows; what follows is fast when it stays in a core's cache.
        height, width = block.shape
        many = max(1, _BLOCK_ELEMENTS // (count * max(1, width)))
        few = min(many, cached_rows(width, block.device))
        for first in range(0, height, many):
            last = min(first + many, height)
            products = [code_product(codes[i, first:last], signs[u.refresh]) for i, u in enumerate(updates)]
            for start in range(first, last, few):
                part = slice(start, min(start + few, last))
                weight = self._load(kept, block, part)
                for i, update in enumerate(updates):
                    product = products[i][part.start - first : part.stop - first]
                    subtract_product_(weight, product, coefficients[i, part], update.decay)
                    nudge_ties_(weight)
                self._store(kept, block, part, weight)
        kept.num_applied += count

    def _load(self, kept: _Kept, block: Tensor, part: slice) -> Float32[Tensor, "rows columns"]:
        if kept.rest is None:
            return block[part]
        rest = kept.rest[part].to(block.device)
        return rest if rest.dtype == torch.float32 else join_weight(block[part], rest)

    def _store(self, kept: _Kept, block: Tensor, part: slice, weight: Float32[Tensor, "rows columns"]) -> None:
        """``weight`` has no ties, so that its halves are its bits."""
        if kept.rest is None:
            return  # _load gave a view
        block[part] = weight
        if kept.rest.dtype == torch.int16:
            kept.rest[part] = weight.view(torch.int32).to(torch.int16)
        elif weight.data_ptr() != kept.rest[part].data_ptr():
            kept.rest[part] = weight

    def _finish(self, end: End, message: _Message) -> None:
        begin = message.begin
        if begin.kind == "full":
            late = [n for n, k in self._kept.items() if not k.whole_seen]
        else:
            late = [n for n, k in self._kept.items() if k.num_applied < len(begin.updates)]
        if late:
            raise WireError(f"the message ended before {len(late)} targets were complete: {', '.join(late[:4])}")
        if message.parameters != end.parameters:
            names = sorted({name for name, _ in message.parameters.items() ^ end.parameters.items()})
            raise WireError(f"parameters arrived changed or incomplete: {', '.join(names[:4])}")
        differ = [n for n, s in self.checksums().items() if s != end.targets[n]]
        if differ:
            raise WireError(
                f"the checksum of {len(differ)} targets differs from the trainer's: {', '.join(differ[:4])}"
            )
        self._message = None
        self.state = {**empty_state(layout=self.state["layout"]), "history": begin.history, "update": begin.last}

    @torch.no_grad()
    def checksums(self) -> dict[str, int]:
        """Checksum of every target's fp32 weight, over all workers."""
        if not self._kept:
            return {}
        device = next(iter(self._kept.values())).part.block().device
        sums = torch.zeros(len(self._kept), dtype=torch.int64, device=device)
        for i, kept in enumerate(self._kept.values()):
            if not kept.part.counted:
                continue
            block = kept.part.block()
            step = max(1, min(cached_rows(block.shape[1], device), _BLOCK_ELEMENTS // max(1, block.shape[1])))
            for start in range(0, block.shape[0], step):
                weight = self._load(kept, block, slice(start, start + step))
                sums[i] += weight_checksum(weight, kept.part.rows.start + start, kept.part.columns.start)
        sums = self._sum_over_workers(sums)
        return {name: int(s) & MASK for name, s in zip(self._kept, sums, strict=True)}
