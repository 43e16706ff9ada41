"""RowAdam: one second moment per output row, no first moment (arXiv 2610.06647, algorithm 1).

    v <- beta2 v + (1 - beta2) mean_j S_ij^2
    D  = S / (sqrt(v / (1 - beta2^t)) + eps)

The mean over the sketch's columns estimates ``||G_i||^2 / rank`` whatever projection made the sketch, so ``v`` outlives
a refresh of the projection. No function here knows about ranks of a process group: with row-sharded tensors they work
on the local rows, and the caller adds up what is summed over rows.
"""

import torch
from jaxtyping import Float
from torch import Tensor


def updated_second_moment(
    second_moment: Float[Tensor, " out"], sketch: Float[Tensor, "out rank"], beta2: float
) -> Float[Tensor, " out"]:
    """The next ``v``; the old one is left alone, so that a refused step can forget it."""
    mean_square = torch.linalg.vector_norm(sketch, dim=1, dtype=torch.float32).square_().div_(sketch.shape[1])
    return mean_square.mul_(1 - beta2).add_(second_moment, alpha=beta2)


def row_rms(second_moment: Float[Tensor, " out"], beta2: float, num_updates: int) -> Float[Tensor, " out"]:
    """Bias-corrected root mean square of each row's sketch after ``num_updates`` >= 1 updates."""
    return (second_moment / (1 - beta2**num_updates)).sqrt_()


def direction_(
    sketch: Float[Tensor, "out rank"], rms: Float[Tensor, " out"], eps: float | Float[Tensor, ""]
) -> Float[Tensor, "out rank"]:
    """Divides the sketch's rows by ``rms + eps``, in place."""
    return sketch.div_((rms + eps).unsqueeze(1))


def squared_norm(rows: Float[Tensor, "out columns"]) -> Float[Tensor, ""]:
    """``||rows||_F^2`` in float64, summed row by row, so that sharding by rows changes only the last float64 bits."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float32).double().square_().sum()


def projected_squared_norm(
    update: Float[Tensor, "out rank"], projection: Float[Tensor, "rank in"]
) -> Float[Tensor, ""]:
    """``||U A||_F^2 = tr(U (A A^T) U^T)`` in float64, without the dense product.

    Float64 because the Gram form cancels: rounding in float32 would depend on how the rows are sharded.
    """
    gram = (projection @ projection.T).double()
    update = update.double()
    return ((update @ gram) * update).sum()


def relative_eps(rms_sums: Float[Tensor, " layers"], num_rows: Float[Tensor, " layers"], eps: float) -> Tensor:
    """``eps`` times each layer's mean row RMS; positive for a layer without gradient, so that 0 / eps is 0."""
    return (eps * rms_sums / num_rows).float().clamp_(min=torch.finfo(torch.float32).tiny)


def ratio_factors(
    sketch_sq: Float[Tensor, " layers"],
    direction_sq: Float[Tensor, " layers"],
    update_sq: Float[Tensor, " layers"],
    weight_sq: Float[Tensor, " layers"],
    update_ratio: float,
) -> Float[Tensor, " layers"]:
    """Factor of each layer's direction for ``scale="ratio"``, from squared norms of ``S``, ``D``, ``D A`` and ``W``.

    Each direction gets its layer's sketch norm back, which makes any normalisation of the row scales before it
    redundant; then one factor for all layers gives ``||delta W|| / ||W|| = update_ratio``. No gradient, no step.
    """
    restored = (sketch_sq / direction_sq).nan_to_num_(0.0).sqrt_()
    update_norm = (restored.square() * update_sq).sum().sqrt_()
    return restored * (update_ratio * weight_sq.sum().sqrt() / update_norm).nan_to_num_(0.0, 0.0)
