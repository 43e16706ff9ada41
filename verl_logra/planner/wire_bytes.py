"""Bytes that one weight sync sends to one replica of the rollout."""

from __future__ import annotations

from verl_logra.planner.models import Model

_FRAME_HEAD = 24 + 24  # sync.wire: header of a frame and of FACTORS


def _padded(size: int) -> int:
    return -(-size // 8) * 8


def factors_frame_bytes(updates: int, rows: int, rank: int) -> int:
    """A FACTORS frame of ``sync.wire``: fp32 coefficients [updates, rows] and int8 codes [updates, rows, rank]."""
    return _padded(_FRAME_HEAD + _padded(4 * updates * rows) + updates * rows * rank)


def low_rank_bytes(model: Model, rank: int, *, updates: int = 1, rest_moves: bool = False, dtype_bytes: int = 2) -> int:
    """Factors of all targets, and the rest in full where AdamW trains it. BEGIN and END, some kB, are left out."""
    factors = sum(factors_frame_bytes(updates, p.shape[0], rank) for p in model.targets)
    rest = sum(p.numel for p in model.parameters if not p.target)
    return factors + (dtype_bytes * rest if rest_moves else 0)


def full_bytes(model: Model, dtype_bytes: int = 2) -> int:
    """All parameters in the rollout's dtype, as verl sends them."""
    return dtype_bytes * model.num_parameters


def first_bytes(model: Model, dtype_bytes: int = 2) -> int:
    """The full sync that begins low-rank syncing: targets in fp32, so that receivers can keep their low halves."""
    targets = sum(p.numel for p in model.targets)
    return 4 * targets + dtype_bytes * (model.num_parameters - targets)


def sparse_delta_bytes(model: Model, density: float, dtype_bytes: int = 2) -> int:
    """verl's sparse delta: an int32 index and a value for every element that changed in the rollout's dtype."""
    return round(density * model.num_parameters) * (4 + dtype_bytes)
