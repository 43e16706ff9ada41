"""Which parameters a low-rank optimizer treats as low-rank, told by shape: an optimizer is given no names.

Low-rank: matrices of attention and MLP. The rest, left to AdamW as LoGRA leaves it: whatever is not a matrix, and the
token embedding with everything of its shape (an untied head, its gradient rows are mostly empty). The embedding is the
first matrix that a causal language model of transformers lists. Matrices that are not larger than the rank in both
directions are left to AdamW as well: there a "low-rank" state would be larger than the full one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from torch import nn

from verl_logra.integrations.log_lines import show_log_lines

logger = logging.getLogger(__name__)
show_log_lines("recipes.baselines")  # verl's workers would print no warning of ours


def split_by_shape(parameters: Iterable[nn.Parameter], rank: int) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable parameters as (low-rank matrices, rest), in the order given.

    Raises:
        TypeError: parameter groups were given, which this function is there to make.
        ValueError: no matrix is left for the low-rank optimizer.
    """
    everything = list(parameters)
    if any(isinstance(p, dict) for p in everything):
        raise TypeError("give the optimizer model.parameters(): it makes its own parameter groups, by shape")
    embedding = next((p.shape for p in everything if p.dim() == 2), None)
    low_rank, rest, small = [], [], []
    for p in everything:
        if not p.requires_grad:
            continue
        if p.dim() != 2 or p.shape == embedding:
            rest.append(p)
        elif min(p.shape) <= rank:
            small.append(p)
        else:
            low_rank.append(p)
    if not low_rank:
        raise ValueError(
            f"no matrix for a low-rank optimizer of rank {rank}: {len(small)} are too small for it and {len(rest)} are "
            f"no matrices or shaped like the token embedding ({embedding}); set a smaller rank"
        )
    if small:
        shapes = sorted({"x".join(map(str, p.shape)) for p in small})
        logger.warning("rank %d is too large for %d matrices, left to AdamW: %s", rank, len(small), ", ".join(shapes))
    kept = {id(p) for p in low_rank}
    return low_rank, [p for p in everything if p.requires_grad and id(p) not in kept]
