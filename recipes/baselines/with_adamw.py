"""A package's low-rank optimizer on the matrices and ``torch.optim.AdamW`` on the rest, seen as one optimizer.

The rest is trained by the same AdamW for every method, so that methods differ in what they do to the matrices only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from recipes.baselines.groups import split_by_shape


class WithAdamW(torch.optim.Optimizer):
    """Mixin, left of the package's optimizer. Both share ``param_groups`` and ``state`` with the whole, so that
    schedulers, checkpoints and offloading see one optimizer."""

    shards = False
    """Whether the package computes the same on sharded tensors (DTensor) as on whole ones."""

    def _init_split(
        self,
        parameters: Iterable[nn.Parameter],
        init: Callable[[list[dict[str, Any]]], None],
        *,
        rank: int,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float],
        settings: dict[str, Any],
    ) -> None:
        low_rank, rest = split_by_shape(parameters, rank)
        self._check_sharding(low_rank)
        init([{"params": low_rank, "rank": rank, **settings}])
        self._adamw: torch.optim.AdamW | None = None
        if rest:
            fused = all(p.device.type in ("cpu", "cuda") for p in rest)  # as LoGRA's
            self._adamw = torch.optim.AdamW(rest, lr=lr, weight_decay=weight_decay, betas=betas, fused=fused)
        if self._adamw is not None:
            self.add_param_group(self._adamw.param_groups[0])

    def _check_sharding(self, low_rank: list[nn.Parameter]) -> None:
        ranks = max((p.device_mesh.size() for p in low_rank if isinstance(p, DTensor)), default=1)
        if ranks > 1 and not self.shards:
            raise NotImplementedError(
                f"{type(self).__name__} cannot train parameters sharded over {ranks} ranks: its package multiplies "
                f"gradients with plain random matrices, which sharded ones refuse, and per shard it would be another "
                f"optimizer. Use one rank, or GaLoreAdamW, AdamW8bit or LoGRA"
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of the package on the matrices, then one of AdamW on the rest."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        whole = self.param_groups
        try:
            self.param_groups = whole[:1]
            with self._plain_tensors():
                super().step()
        finally:
            self.param_groups = whole
        if self._adamw is not None:
            self._adamw.param_groups, self._adamw.state = whole[1:], self.state
            self._adamw.step()
        return loss

    @contextmanager
    def _plain_tensors(self) -> Iterator[None]:
        """On one rank a DTensor holds everything: show the package what it holds."""
        group = self.param_groups[0]
        params: list[nn.Parameter] = group["params"]
        if self.shards or not any(isinstance(p, DTensor) for p in params):
            yield
            return
        state, plain = self.state, []
        for p in params:
            q = _local(p)
            q.grad = None if p.grad is None else _local(p.grad)
            plain.append(q)
        group["params"] = plain
        self.state = defaultdict(dict, {q: state[p] for p, q in zip(params, plain, strict=True)})
        try:
            yield
        finally:
            group["params"], self.state = params, state


def _local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
