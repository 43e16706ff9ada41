"""What the nested AdamW is about to do to the rest of the model, known and shown before it is done.

A KL budget that left embeddings, norms and biases out would be no budget: on a tiny model AdamW at lr 3e-2 moved the
policy by 0.12 nats in a step whose targets were held to 6e-7. So the displacement is computed on copies, one parameter
at a time, and added to the parameters while a probe measures. Costs two copies of the rest while a step is verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from verl_logra.sharding import local


class RestDisplacement:
    """``AdamW.step()``'s displacement of every parameter that has a gradient, at the current learning rates."""

    @torch.no_grad()
    def __init__(self, adamw: torch.optim.AdamW) -> None:
        self._parameters: list[Tensor] = []
        self._before: list[Tensor] = []
        self._displacement: list[Tensor] = []
        for group in adamw.param_groups:
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay", "fused")}
            for parameter in (p for p in group["params"] if p.grad is not None):
                shadow = torch.nn.Parameter(parameter.detach().clone())
                shadow.grad = parameter.grad
                rehearsal = torch.optim.AdamW([shadow], **options)
                state = adamw.state.get(parameter, {})
                rehearsal.state[shadow] = {key: value.clone() for key, value in state.items()}
                rehearsal.step()
                before = local(parameter.detach())
                self._parameters.append(before)
                self._before.append(before.clone())
                self._displacement.append(local(shadow.detach()) - before)

    @contextmanager
    def shown(self, alpha: float) -> Iterator[None]:
        """The parameters moved by ``alpha`` times their displacement; bit for bit as before afterwards."""
        with torch.no_grad():
            torch._foreach_add_(self._parameters, self._displacement, alpha=alpha)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(self._parameters, self._before)
