"""APOLLO (arXiv 2412.05270): AdamW's channel-wise scaling estimated in a random subspace, from apollo-torch."""

from __future__ import annotations

from collections.abc import Iterable

import apollo_torch
from torch import nn

from recipes.baselines.with_adamw import WithAdamW


class APOLLOAdamW(WithAdamW, apollo_torch.APOLLOAdamW):
    """``update_proj_gap`` steps between two projections; ``scale_type`` ``channel`` or ``tensor`` (APOLLO-Mini)."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        rank: int = 256,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: str = "channel",
        proj: str = "random",
        proj_type: str = "std",
        eps: float = 1e-8,
    ) -> None:
        def init(groups: list) -> None:
            apollo_torch.APOLLOAdamW.__init__(self, groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)

        settings = {"update_proj_gap": update_proj_gap, "scale": scale, "scale_type": scale_type}
        settings |= {"proj": proj, "proj_type": proj_type}
        self._init_split(parameters, init, rank=rank, lr=lr, weight_decay=weight_decay, betas=betas, settings=settings)
