"""GaLore (arXiv 2403.03507): Adam's moments in the leading singular subspace of the gradient, from galore-torch."""

from __future__ import annotations

from collections.abc import Iterable

import galore_torch
from torch import nn

from recipes.baselines.with_adamw import WithAdamW


class GaLoreAdamW(WithAdamW, galore_torch.GaLoreAdamW):
    """``update_proj_gap`` steps between two SVDs; ``scale`` multiplies the low-rank update (the authors' defaults).

    On several ranks each SVD gathers the whole gradient. SVDs amplify rounding, there as in one process: gradients that
    differ by 6e-8 lead to weights that differ by 3 to 4% of what they moved after two refreshes, by 1.5e-6 after none.
    """

    shards = True

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        proj_type: str = "std",
        eps: float = 1e-8,
    ) -> None:
        def init(groups: list) -> None:
            galore_torch.GaLoreAdamW.__init__(
                self, groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, no_deprecation_warning=True
            )

        settings = {"update_proj_gap": update_proj_gap, "scale": scale, "proj_type": proj_type}
        self._init_split(parameters, init, rank=rank, lr=lr, weight_decay=weight_decay, betas=betas, settings=settings)
