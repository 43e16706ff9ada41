"""An fp32 weight as a bf16 weight and its low half, so that small updates are not lost in bf16.

``hi = bf16(W)`` is what the model computes with; ``lo = bits(W) - (bits(hi) << 16)`` fits int16 except at an exact tie,
where rounding to even may go up or down; there the weight's low half 0x8000 is nudged up by one bit on every side that
splits, which keeps the round trip exact. 2 extra bytes per parameter, and together they are the fp32 weight.
"""

import torch
from jaxtyping import BFloat16, Float32, Int16
from torch import Tensor


def nudge_ties_(weight: Float32[Tensor, "*shape"]) -> None:
    """Moves weights whose low half is exactly 0x8000 up by one bit, away from zero, in place.

    Afterwards ``bf16(W)`` and a low half of 16 bits are all of ``W``; a trainer that keeps fp32 weights nudges after
    every update, so that it equals a receiver that keeps halves.
    """
    bits = weight.view(torch.int32)
    bits.add_(bits.bitwise_and(0xFFFF).eq_(0x8000))  # in place: on a CPU ten times faster than a bool result


def split_weight(
    weight: Float32[Tensor, "*shape"],
) -> tuple[BFloat16[Tensor, "*shape"], Int16[Tensor, "*shape"]]:
    """``W -> (hi, lo)``. ``join_weight`` returns ``W`` bit for bit, except that a low half of 0x8000 becomes 0x8001."""
    bits = weight.view(torch.int32)
    bits = bits.bitwise_and(0xFFFF).eq_(0x8000).add_(bits)
    # The signed low 16 bits: from 0x8001 on they are negative, and there bf16 has rounded up.
    return bits.view(torch.float32).bfloat16(), bits.to(torch.int16)


def join_weight(high: BFloat16[Tensor, "*shape"], low: Int16[Tensor, "*shape"]) -> Float32[Tensor, "*shape"]:
    """``(hi, lo) -> W``."""
    bits = high.view(torch.int16).int().bitwise_left_shift(16) + low.int()
    return bits.view(torch.float32)
