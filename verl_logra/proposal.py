"""What one optimizer step proposed, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One proposed update, before anything has moved. Norms are over all targets and ranks; fp32 scalars on device."""

    sketch_norm: Tensor
    """``||S||_F``, an unbiased estimate of the targets' gradient norm (after clipping)."""
    update_norm: Tensor
    """``||U A||_F``, the norm of the unscaled update without weight decay."""
    weight_norm: Tensor
    """``||W||_F``."""
    decay: float
    """Relative weight decay ``lr * weight_decay`` of the unscaled update."""
    second_moments: list[Tensor]
    """The next ``v`` of each target, local rows."""
    row_scales: list[Tensor] | None
    """Scale of each row of an int8 factor, local rows; None with another factor dtype."""

    @property
    def update_ratio(self) -> Tensor:
        """``||U A|| / ||W||`` of the unscaled update."""
        return self.update_norm / self.weight_norm


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """What the last ``step`` did."""

    proposal: Proposal | None
    """None: the gradient was not finite and nothing was proposed."""
    alpha: float
    """Scale of the applied update; 0 for a refused one."""
    applied: bool

    def metrics(self) -> dict[str, float]:
        """Numbers for a log, on the host."""
        if self.proposal is None:
            return {"applied": 0.0, "alpha": 0.0}
        return {
            "applied": float(self.applied),
            "alpha": self.alpha,
            "sketch_norm": float(self.proposal.sketch_norm),
            "update_ratio": self.alpha * float(self.proposal.update_ratio),
        }
