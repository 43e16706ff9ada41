"""Flora (arXiv 2402.03293): Adafactor whose first moment is kept under a random projection, from flora-opt."""

from __future__ import annotations

from collections.abc import Iterable

import flora_opt
from torch import nn

from recipes.baselines.with_adamw import WithAdamW


class Flora(WithAdamW, flora_opt.Flora):
    """``kappa`` steps between two projections. Without ``beta1`` Flora keeps no first moment, and so nothing low-rank.

    Its step is ``lr`` times the RMS of the weight (Adafactor's ``scale_parameter``, the package's default).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        *,
        rank: int = 256,
        kappa: int = 1000,
        beta1: float = 0.9,
        scale_parameter: bool = True,
        seed: int = 0,
    ) -> None:
        def init(groups: list) -> None:
            flora_opt.Flora.__init__(
                self,
                groups,
                lr=lr,
                weight_decay=weight_decay,
                beta1=beta1,
                kappa=kappa,
                scale_parameter=scale_parameter,
                seed=seed,
            )

        # betas are AdamW's, for the rest.
        self._init_split(parameters, init, rank=rank, lr=lr, weight_decay=weight_decay, betas=betas, settings={})

    @staticmethod
    def _get_options(param_group: dict, param_shape: tuple[int, ...]) -> tuple[bool, bool, bool]:
        """As the package, whose guess "more than four times as long as wide is an embedding" is wrong for Qwen2.5's
        MLPs: they would keep a full first moment. Our groups hold no embeddings."""
        factored, first_moment, _ = flora_opt.Flora._get_options(param_group, param_shape)
        return factored, first_moment, first_moment and factored
