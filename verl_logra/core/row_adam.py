"""RowAdam: one second moment per output row, no first moment (arXiv 2610.06647, algorithm 1).

    v <- beta2 v + (1 - beta2) mean_j S_ij^2
    D  = S / (sqrt(v / (1 - beta2^t)) + eps)

The mean over the sketch's columns estimates ``||G_i||^2 / rank`` whatever projection made the sketch, so ``v`` outlives
a refresh of the projection. No function here knows about ranks of a process group: with row-sharded tensors they work
on the local rows, and the caller adds up what is summed over rows.
"""

import torch
from jaxtyping import Float, Float32, Float64, Int8
from torch import Tensor

from verl_logra.core.factor import integer_product


def row_norms(rows: Float[Tensor, "out columns"], order: float = 2) -> Float32[Tensor, " out"]:
    """Norm of each row, Euclidean or of another order; no bit of it depends on which other rows are there."""
    return torch.linalg.vector_norm(rows, ord=order, dim=1, dtype=torch.float32)


def updated_second_moment(
    second_moment: Float32[Tensor, " out"], mean_square: Float32[Tensor, " out"], beta2: float
) -> Float32[Tensor, " out"]:
    """The next ``v``; the old one is left alone, so that a refused step can forget it."""
    return torch.add(mean_square * (1 - beta2), second_moment, alpha=beta2)


def row_rms(second_moment: Float32[Tensor, " out"], beta2: float, num_updates: int) -> Float32[Tensor, " out"]:
    """Bias-corrected root mean square of each row's sketch after ``num_updates`` >= 1 updates."""
    return (second_moment / (1 - beta2**num_updates)).sqrt_()


def projected_row_squared_norms(
    rows: Float[Tensor, "out rank"], signs: Float32[Tensor, "rank in"]
) -> Float64[Tensor, " out"]:
    """``||u_i signs||^2 = u_i (signs signs^T) u_i^T`` of each row, without the dense product.

    Float64 because the Gram form cancels: rounding in float32 would depend on how the rows are sharded.
    """
    gram = (signs @ signs.T).double()
    rows = rows.double()
    return (rows @ gram).mul_(rows).sum(dim=1)


def projected_code_squared_norms(
    codes: Float[Tensor, "out rank"], signs: Int8[Tensor, "rank in"] | Float32[Tensor, "rank in"]
) -> Float64[Tensor, " out"]:
    """As ``projected_row_squared_norms`` for int8 codes and +-1 signs, with half of the work.

    Codes and Gram entries are integers, and no partial sum exceeds 127 times a Gram column's absolute sum, about
    ``127 (in + 0.8 rank sqrt(in))``. Below ``2^24`` (rank 256 with 29568 features is at half of it) float32 is exact in
    any order, so under any sharding. The diagonal stays out of the product because TF32 would round it.
    """
    gram = integer_product(signs, signs.T).fill_diagonal_(0.0)
    codes = codes.float()
    return (codes @ gram).add_(codes, alpha=signs.shape[1]).mul_(codes).sum(dim=1, dtype=torch.float64)


def layer_sums(rows: Float64[Tensor, "all_rows columns"], num_rows: list[int]) -> Float64[Tensor, "layers columns"]:
    """Sums over each layer's rows, which stand one layer after the other; a layer may have no row here."""
    return torch.stack([layer.sum(dim=0) for layer in rows.split(num_rows)])


def spread_over_rows(layers: Float[Tensor, " layers"], num_rows: list[int]) -> Float[Tensor, " all_rows"]:
    """Each layer's value at all of its rows."""
    return torch.cat([value.expand(n) for value, n in zip(layers.unbind(), num_rows, strict=True)])


def relative_eps(mean_rms: Float64[Tensor, " layers"], eps: float) -> Float32[Tensor, " layers"]:
    """``eps`` times each layer's mean row RMS; positive for a layer without gradient, so that 0 / eps is 0."""
    return (eps * mean_rms).float().clamp_(min=torch.finfo(torch.float32).tiny)


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
