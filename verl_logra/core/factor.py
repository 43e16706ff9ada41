"""The update factor on its way to the weights: int8 rows with one fp32 scale, applied with exact arithmetic.

``U`` is rounded before anyone applies it: ``q = round(U / s)`` in int8, ``s`` one fp32 scale per row. With a sign
projection ``q @ signs`` is a sum of at most ``rank`` integers of at most 127: exact in fp32, TF32 included, in any
order and under any sharding as long as ``127 rank < 2^24``. Then ``delta = c * (q @ signs)`` and
``W = W * decay - delta`` are separate fp32 operations, each rounded once, so the trainer's shards, a rollout worker's
shards and a single process end with the same bits.
"""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int8, Int32
from torch import Tensor

_CPU_BLOCK_ELEMENTS = 1 << 18  # of the dense product at a time: 1 MiB in fp32, enough rows for a fast product
_CPU_CACHED_ELEMENTS = 1 << 16  # by core, of what elementwise operations follow each other on: fits its cache
_BLOCK_ELEMENTS = 1 << 24  # elsewhere: 64 MiB, few kernels


class AppliedUpdate(NamedTuple):
    """What one committed update did to the targets: enough to repeat it elsewhere, bit for bit."""

    number: int
    """Updates applied once this one is, from 1."""
    refresh: int
    """Refresh number of the projection that the factors belong to."""
    decay: float
    """What the weights were multiplied by first."""
    factors: list[tuple[Int8[Tensor, "rows rank"], Float32[Tensor, " rows"]]] | None
    """Codes and row coefficients of the local rows of every target, in order; None if the product is not exact."""


def block_rows(columns: int, device: torch.device) -> int:
    """Rows of a weight with ``columns`` columns to update at a time; the result does not depend on it."""
    elements = _CPU_BLOCK_ELEMENTS if device.type == "cpu" else _BLOCK_ELEMENTS
    return max(1, elements // max(1, columns))


def cached_rows(columns: int, device: torch.device) -> int:
    """Rows at a time where a handful of elementwise operations follow each other; the result does not depend on it."""
    elements = _CPU_CACHED_ELEMENTS * torch.get_num_threads() if device.type == "cpu" else _BLOCK_ELEMENTS
    return max(1, elements // max(1, columns))


def row_steps(largest: Float32[Tensor, " out"]) -> Float32[Tensor, " out"]:
    """Step of each row's int8 codes: 1/127 of the row's ``largest`` absolute entry, and positive."""
    return (largest / 127).clamp_(min=torch.finfo(torch.float32).tiny)


def row_codes(rows: Float[Tensor, "out rank"], steps: Float32[Tensor, " out"]) -> Float32[Tensor, "out rank"]:
    """Each row in its steps, rounded to integers up to 127."""
    return rows.div(steps.unsqueeze(1)).round_()


def int8_codes(update: Float[Tensor, "out rank"], scale: Float32[Tensor, " out"]) -> Int8[Tensor, "out rank"]:
    """The int8 codes of a rounded factor. Recovers them exactly from ``codes * scale`` stored in fp32 or bf16."""
    safe = torch.where(scale > 0, scale, 1.0).unsqueeze(1)
    return update.float().div(safe).round_().clamp_(-127, 127).to(torch.int8)


def row_coefficient(scale: Float32[Tensor, " out"], alpha: float, rank: int) -> Float32[Tensor, " out"]:
    """What each row of ``codes @ signs`` is multiplied by: ``alpha * scale / sqrt(rank)``, rounded to fp32 once more.

    This tensor, not its ingredients, goes over the wire.
    """
    return scale * (alpha / math.sqrt(rank))


def sign_dtype(device: torch.device) -> torch.dtype:
    """What signs are multiplied with codes in: int8 on a CPU, where that is up to ten times faster, else float32."""
    return torch.int8 if device.type == "cpu" else torch.float32


def code_product(
    codes: Int8[Tensor, "out rank"] | Float32[Tensor, "out rank"],
    signs: Int8[Tensor, "rank in"] | Float32[Tensor, "rank in"],
) -> Int32[Tensor, "out in"] | Float32[Tensor, "out in"]:
    """``codes @ signs``; the same integers whatever the dtypes."""
    if signs.dtype == torch.int8:
        return torch._int_mm(codes.to(torch.int8), signs)
    return codes.float() @ signs


def integer_product(
    codes: Int8[Tensor, "out rank"] | Float32[Tensor, "out rank"],
    signs: Int8[Tensor, "rank in"] | Float32[Tensor, "rank in"],
) -> Float32[Tensor, "out in"]:
    """``codes @ signs`` in float32."""
    return code_product(codes, signs).float()


def subtract_product_(
    weight: Float32[Tensor, "out in"],
    product: Int32[Tensor, "out in"] | Float32[Tensor, "out in"],
    coefficient: Float32[Tensor, " out"],
    decay: float = 1.0,
) -> None:
    """``W = decay * W - coefficient * product``, in place, each operation rounded once."""
    delta = product.float() * coefficient.unsqueeze(1)
    if decay != 1.0:
        weight.mul_(decay)
    weight.sub_(delta)


def apply_codes_(
    weight: Float32[Tensor, "out in"],
    codes: Int8[Tensor, "out rank"],
    coefficient: Float32[Tensor, " out"],
    signs: Int8[Tensor, "rank in"] | Float32[Tensor, "rank in"],
    decay: float = 1.0,
) -> None:
    """``W = decay * W - coefficient * (codes @ signs)``, in place, bit for bit the same on any device and sharding.

    The dense product exists for a block of rows at a time.
    """
    rows = block_rows(weight.shape[1], weight.device)
    few = cached_rows(weight.shape[1], weight.device)
    for block, q, c in zip(weight.split(rows), codes.split(rows), coefficient.split(rows), strict=True):
        product = code_product(q, signs)
        for part in zip(block.split(few), product.split(few), c.split(few), strict=True):
            subtract_product_(*part, decay)


def apply_factor_(
    weight: Float32[Tensor, "out in"],
    update: Float[Tensor, "out rank"],
    alpha: float,
    projection: Float32[Tensor, "rank in"],
    decay: float = 1.0,
) -> None:
    """``W = decay * W - alpha U A``, in place, for factors and projections whose product is not exact."""
    rows = block_rows(weight.shape[1], weight.device)
    for w, u in zip(weight.split(rows), update.split(rows), strict=True):
        delta = (u.float() @ projection).mul_(alpha)
        if decay != 1.0:
            w.mul_(decay)
        w.sub_(delta)
