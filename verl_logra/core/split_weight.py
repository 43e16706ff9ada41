"""An fp32 weight as a bf16 weight and its low half, so that small updates are not lost in bf16.

``hi = bf16(W)`` is what the model computes with; ``lo = bits(W) - (bits(hi) << 16)`` fits int16 except at an exact tie,
where rounding to even may go up or down; there the weight's low half 0x8000 is nudged up by one bit on every side that
splits, which keeps the round trip exact. 2 extra bytes per parameter, and together they are the fp32 weight.
"""

import torch
from jaxtyping import BFloat16, Float32, Int16
from torch import Tensor

_LEAST_HALVES = 0x80008001 - (1 << 32)
"""As two int16: the upper half of a word may be anything, the lower one anything but 0x8000."""


def nudge_ties_(weight: Float32[Tensor, "*shape"]) -> None:
    """Moves weights whose low half is exactly 0x8000 up by one bit, away from zero, in place.

    Afterwards ``bf16(W)`` and a low half of 16 bits are all of ``W``; a trainer that keeps fp32 weights nudges after
    every update, so that it equals a receiver that keeps halves.
    """
    # One minimum for the two halves of every word: on a CPU five times faster than finding the ties and adding.
    least = torch.full(weight.shape[-1:], _LEAST_HALVES, dtype=torch.int32, device=weight.device)
    weight.view(torch.int16).clamp_(min=least.view(torch.int16))


def split_weight(
    weight: Float32[Tensor, "*shape"],
) -> tuple[BFloat16[Tensor, "*shape"], Int16[Tensor, "*shape"]]:
    """``W -> (hi, lo)``. ``join_weight`` returns ``W`` bit for bit, except that a low half of 0x8000 becomes 0x8001."""
    nudged = weight.clone()
    nudge_ties_(nudged)
    # The signed low 16 bits: from 0x8001 on they are negative, and there bf16 has rounded up.
    return nudged.bfloat16(), nudged.view(torch.int32).to(torch.int16)


def join_weight(high: BFloat16[Tensor, "*shape"], low: Int16[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """``(hi, lo) -> W``."""
    weight = high.float()
    weight.view(torch.int32).add_(low.int())
    return weight
