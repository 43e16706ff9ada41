"""The LoGRA optimizer: RowAdam on gradient sketches, applied through a rounded low-rank factor (arXiv 2610.06647).

One step has two halves. ``propose`` turns the sketches ``U.grad`` into the update factor and writes it into ``U``,
where a probe can look at it; ``commit`` applies ``alpha`` times it to the weights, zeroes ``U`` and draws new
projections. Between the two nothing has happened yet: ``discard`` forgets the proposal and leaves weights, moments,
projections and the update count as they were.

State per target is ``second_moment [out]`` in fp32, sharded with the rows of ``U``; a bf16 weight also keeps its low
half ``[out, in]`` in int16, so that it moves as an fp32 one would. Everything that is not a target is trained by a
nested ``torch.optim.AdamW`` that shares ``param_groups`` and ``state`` with this optimizer, so that schedulers,
checkpoints and offloading see one optimizer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from verl_logra.config import LoGRAConfig
from verl_logra.core import factor, row_adam
from verl_logra.core.split_weight import join_weight, nudge_ties_, split_weight
from verl_logra.proposal import Proposal, StepReport
from verl_logra.rest import RestDisplacement
from verl_logra.sharding import check_row_sharded, local, sharded_like, sum_over_shards_
from verl_logra.sketch import Target, install, taps_of

logger = logging.getLogger(__name__)


class LoGRA(torch.optim.Optimizer):
    """LoGRA on any ``torch.nn.Module``, sharded by FSDP2 or not.

    Args:
        model: installs the targets if ``verl_logra.install`` was not called; that must come before ``fully_shard``.
        config: settings, or a mapping of them.
        lr: learning rate. ``scale="ratio"`` uses its ratio to this initial value, ``scale="lr"`` the value itself.
        weight_decay: decoupled: each update multiplies the weights by ``1 - alpha * lr * weight_decay``.

    Raises:
        TypeError: ``model`` is not a module (in verl: the stock engine built the optimizer; the message says why).
        ValueError: see ``verl_logra.install``.
    """

    def __init__(
        self,
        model: nn.Module,
        config: LoGRAConfig | Mapping[str, Any] | None = None,
        *,
        lr: float = 1e-6,
        weight_decay: float = 0.0,
        **settings: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(
                "LoGRA needs the model, not its parameters. In verl the stock engine built it, so the plugin is not in "
                "charge: set actor_rollout_ref.actor.strategy=fsdp2 (critic.strategy=fsdp2), and see whether "
                "`python -c 'import verl_logra.integrations.plugin'` works in the environment of the workers"
            )
        if settings:
            raise TypeError(f"unknown arguments {sorted(settings)}: put settings into config")
        if not isinstance(config, LoGRAConfig):
            config = LoGRAConfig.from_dict(config or {})
        if not lr >= 0 or not weight_decay >= 0:
            raise ValueError(f"lr={lr!r} and weight_decay={weight_decay!r} must not be negative")
        self.config = config
        self.targets: dict[str, Target] = install(model, config)
        taps = taps_of(model)
        assert taps is not None
        self.taps = taps
        self.step_scale: Callable[[LoGRA], float | None] | None = None
        """Decides ``alpha`` between the halves of ``step``; None refuses the step."""
        self.last_step: StepReport | None = None
        self.listeners: list[Callable[[factor.AppliedUpdate], None]] = []
        """Told what every committed update did to the targets; nothing is kept when there are none."""
        self._proposal: Proposal | None = None
        self._rest: RestDisplacement | None = None
        self._checked_sketches = False

        updates = [target.update for target in self.targets.values()]
        # The sharded parameters: a module shows its unsharded ones while FSDP2 keeps it gathered after a forward.
        self._weights: list[Tensor] = [target.module.weight for target in self.targets.values()]
        group = {"params": updates, "lr": lr, "weight_decay": weight_decay, "base_lr": lr, "num_updates": 0}
        group |= {"num_refreshes": 0, "target_names": list(self.targets)}
        super().__init__([group], {"lr": lr, "weight_decay": weight_decay})
        self._init_target_state()

        own = {id(update) for update in updates}
        rest = [p for p in model.parameters() if p.requires_grad and id(p) not in own]
        self._adamw: torch.optim.AdamW | None = None
        if rest:
            a = config.adamw
            self._adamw = torch.optim.AdamW(
                rest,
                lr=lr if a.lr is None else a.lr,
                betas=a.betas,
                eps=a.eps,
                weight_decay=weight_decay if a.weight_decay is None else a.weight_decay,
                # One pass over an embedding without temporaries of its size; torch has it for these devices.
                fused=all(p.device.type in ("cpu", "cuda") for p in rest),
            )
            self.add_param_group(self._adamw.param_groups[0])
            self._share_with_adamw()

    def _share_with_adamw(self) -> None:
        if self._adamw is not None:
            self._adamw.param_groups = self.param_groups[1:]
            self._adamw.state = self.state

    @torch.no_grad()
    def _init_target_state(self) -> None:
        for target, weight, update in self._rows():
            check_row_sharded(target.name, weight, update)
            weight_rows, update_rows = local(weight), local(update)
            update_rows.zero_()  # sharded loading may have left it uninitialised
            v = torch.zeros(update_rows.shape[0], dtype=torch.float32, device=update_rows.device)
            self.state[update]["second_moment"] = sharded_like(v, update)
            if weight_rows.dtype == torch.bfloat16:
                low = torch.zeros(weight_rows.shape, dtype=torch.int16, device=weight_rows.device)
                self.state[update]["low_half"] = sharded_like(low, update, target.in_features)
            elif weight_rows.dtype != torch.float32:
                raise ValueError(
                    f"{target.name} is stored in {weight_rows.dtype}; LoGRA trains float32 and bfloat16 weights"
                )

    def _rows(self) -> list[tuple[Target, Tensor, nn.Parameter]]:
        """Each target with its (sharded) weight and update parameter."""
        return list(zip(self.targets.values(), self._weights, self.param_groups[0]["params"], strict=True))

    def target_weights(self) -> list[tuple[str, Tensor, Tensor | None]]:
        """Name, (sharded) weight and, for a weight stored in bf16, (sharded) low half of every target."""
        return [(t.name, weight, self.state[update].get("low_half")) for t, weight, update in self._rows()]

    @property
    def proposal(self) -> Proposal | None:
        """The open proposal, between ``propose`` and ``commit`` or ``discard``."""
        return self._proposal

    @property
    def num_updates(self) -> int:
        """Updates applied so far."""
        return self.param_groups[0]["num_updates"]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Proposes an update, asks ``step_scale`` how much of it to apply, and commits. A non-finite gradient or a
        refusal leaves everything as it was; ``last_step`` tells what happened."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        proposal = self.propose()
        if not self._all_finite(proposal):
            logger.warning("LoGRA skips update %d: the gradient is not finite", self.num_updates + 1)
            self.discard()
            self.last_step = StepReport(proposal=None, alpha=0.0, applied=False)
            return loss
        try:
            alpha = 1.0 if self.step_scale is None else self.step_scale(self)
        except BaseException:
            self.discard()
            raise
        if alpha is None:
            self.discard()
        else:
            self.commit(alpha)
        self.last_step = StepReport(proposal=proposal, alpha=alpha or 0.0, applied=alpha is not None)
        return loss

    @torch.no_grad()
    def propose(self) -> Proposal:
        """Writes the update factor into every target's ``U`` (rounded as it will be applied) and returns its norms.

        Raises:
            RuntimeError: a target has no sketch after the first backward, or a proposal is already open.
        """
        if self._proposal is not None:
            raise RuntimeError("a proposal is already open: call commit(alpha) or discard() first")
        config, group = self.config, self.param_groups[0]
        rank, sharded_as = config.rank, group["params"][0]
        targets = self._rows()
        sketches = [local(s) for s in self._sketches()]
        updates = [local(update) for _, _, update in targets]
        num_rows = [len(sketch) for sketch in sketches]

        # One number per row: all targets' rows stand one after the other, so that a kernel serves every target.
        squares = torch.cat([row_adam.row_norms(s) for s in sketches]).square_()
        moments = torch.cat([local(self.state[update]["second_moment"]) for _, _, update in targets])
        moments = row_adam.updated_second_moment(moments, squares / rank, config.beta2)
        divisor = torch.ones_like(squares)
        if config.optimizer == "row_adam":
            divisor = row_adam.row_rms(moments, config.beta2, self.num_updates + 1)
            if config.scale == "ratio":
                rms_and_count = torch.stack((divisor, torch.ones_like(divisor)), dim=1).double()
                sums = sum_over_shards_(row_adam.layer_sums(rms_and_count, num_rows), sharded_as)
                eps = row_adam.relative_eps(sums[:, 0] / sums[:, 1], config.eps)
                divisor.add_(row_adam.spread_over_rows(eps, num_rows))
            else:
                divisor.add_(config.eps)

        # A row of the direction is a multiple of the sketch's row, and so are the int8 codes of both.
        scale = 1.0 / divisor
        steps: Sequence[Tensor] = []
        if config.factor_dtype == "int8":
            all_steps = factor.row_steps(torch.cat([row_adam.row_norms(s, torch.inf) for s in sketches]))
            scale, steps = all_steps / divisor, all_steps.split(num_rows)
        projected = []
        for i, ((target, _, _), sketch, rows) in enumerate(zip(targets, sketches, updates, strict=True)):
            rows.copy_(factor.row_codes(sketch, steps[i]) if steps else sketch)
            if steps and config.projection == "rademacher":
                signs = target.unscaled_projection(factor.sign_dtype(rows.device), rows.device)
                projected.append(row_adam.projected_code_squared_norms(rows, signs))
            else:
                unscaled = target.unscaled_projection(torch.float32, rows.device)
                projected.append(row_adam.projected_row_squared_norms(rows, unscaled))
        norms = torch.stack(
            (
                squares.double(),
                squares.double() / divisor.double().square_(),
                torch.cat(projected) * scale.double().square_() / rank,
                torch.cat([row_adam.row_norms(local(weight)) for _, weight, _ in targets]).square_().double(),
            ),
            dim=1,
        )
        norms = sum_over_shards_(row_adam.layer_sums(norms, num_rows), sharded_as)
        sketch_sq, direction_sq, update_sq, weight_sq = norms.unbind(1)

        if config.scale == "ratio":
            lr_share = group["lr"] / group["base_lr"] if group["base_lr"] else 0.0
            layer_factor = row_adam.ratio_factors(
                sketch_sq, direction_sq, update_sq, weight_sq, config.update_ratio * lr_share
            )
        else:
            layer_factor = torch.full_like(sketch_sq, group["lr"])
        update_norm = (layer_factor.square() * update_sq).sum().sqrt_()

        scale.mul_(row_adam.spread_over_rows(layer_factor.float(), num_rows))
        scales = scale.split(num_rows)
        for rows, row_scale in zip(updates, scales, strict=True):
            rows.mul_(row_scale.unsqueeze(1))
            if config.factor_dtype == "bfloat16":
                rows.copy_(rows.bfloat16())
        self._proposal = Proposal(
            sketch_norm=sketch_sq.sum().sqrt_().float(),
            update_norm=update_norm.float(),
            weight_norm=weight_sq.sum().sqrt_().float(),
            decay=group["lr"] * group["weight_decay"],
            second_moments=list(moments.split(num_rows)),
            row_scales=list(scales) if config.factor_dtype == "int8" else None,
        )
        return self._proposal

    @contextmanager
    def trial(self, alpha: float) -> Iterator[None]:
        """Forwards see the model as ``commit(alpha)`` would leave it: targets by their taps, the rest displaced."""
        if self._proposal is None:
            raise RuntimeError("no proposal is open: call propose() first")
        if self._adamw is not None and self._rest is None:
            self._rest = RestDisplacement(self._adamw)
        rest = nullcontext() if self._rest is None else self._rest.shown(alpha)
        with rest, self.taps.inject(alpha, self._proposal.decay):
            yield

    @torch.no_grad()
    def commit(self, alpha: float = 1.0) -> None:
        """Applies ``alpha`` times the proposed update, decay and the nested AdamW's displacement included."""
        proposal = self._take_proposal()
        decay = 1.0 - alpha * proposal.decay
        factors: list[tuple[Tensor, Tensor] | None] = []
        rows = self._rows()
        for i, (target, weight, update) in enumerate(rows):
            scale = None if proposal.row_scales is None else proposal.row_scales[i]
            applied = self._apply(target, local(weight), update, alpha, scale, decay)
            if self.listeners:
                factors.append(applied)
        moments = [local(self.state[update]["second_moment"]) for _, _, update in rows]
        torch._foreach_copy_(moments, proposal.second_moments)
        self._zero_updates()
        if self._adamw is not None:
            lrs = [g["lr"] for g in self._adamw.param_groups]
            for g, lr in zip(self._adamw.param_groups, lrs, strict=True):
                g["lr"] = lr * alpha
            try:
                self._adamw.step()
            finally:
                for g, lr in zip(self._adamw.param_groups, lrs, strict=True):
                    g["lr"] = lr
        self.param_groups[0]["num_updates"] += 1
        if self.listeners:
            exact = [f for f in factors if f is not None]
            record = factor.AppliedUpdate(
                self.num_updates, self.taps.refresh, decay, exact if len(exact) == len(factors) else None
            )
            for listener in self.listeners:
                listener(record)
        if self.config.refresh == "update":
            self.refresh_projections()

    def _apply(
        self, target: Target, weight: Tensor, update: nn.Parameter, alpha: float, scale: Tensor | None, decay: float
    ) -> tuple[Tensor, Tensor] | None:
        """Applies the update to one target; returns codes and coefficients if that was exact."""
        rows = local(update)
        low = self.state[update].get("low_half")
        applied = None
        if scale is not None and self.config.projection == "rademacher":
            signs = target.unscaled_projection(factor.sign_dtype(rows.device), rows.device)
            applied = factor.int8_codes(rows, scale), factor.row_coefficient(scale, alpha, self.config.rank)
        else:
            projection = target.projection().to(rows.device)
        # Blocks of rows: temporaries stay small, and in a CPU's cache from the product to the low halves.
        size = factor.block_rows(weight.shape[1], weight.device)
        for start in range(0, len(weight), size):
            block = slice(start, start + size)
            full = weight[block] if low is None else join_weight(weight[block], local(low)[block])
            if applied is not None:
                factor.apply_codes_(full, applied[0][block], applied[1][block], signs, decay)
                nudge_ties_(full)
            else:
                factor.apply_factor_(full, rows[block], alpha, projection, decay)
            if low is not None:
                high, low_rows = split_weight(full)
                weight[block].copy_(high)
                local(low)[block].copy_(low_rows)
        return applied

    @torch.no_grad()
    def discard(self) -> None:
        """Forgets the proposed update: weights, moments, projections and counts stay as they were."""
        self._take_proposal()
        self._zero_updates()

    def _zero_updates(self) -> None:
        torch._foreach_zero_([local(update) for update in self.param_groups[0]["params"]])

    def _take_proposal(self) -> Proposal:
        if self._proposal is None:
            raise RuntimeError("no proposal is open: call propose() first")
        proposal, self._proposal, self._rest = self._proposal, None, None
        return proposal

    def refresh_projections(self) -> None:
        """Draws new projections. Called by ``commit``; with ``refresh="sync"`` by whoever has sent the weights."""
        self.param_groups[0]["num_refreshes"] += 1
        self.taps.refresh = self.param_groups[0]["num_refreshes"]

    def state_bytes(self) -> int:
        """Bytes of optimizer state on this rank, the nested AdamW's included."""
        return sum(
            local(t).numel() * t.element_size()
            for s in self.state.values()
            for t in s.values()
            if isinstance(t, Tensor)
        )

    def _sketches(self) -> list[Tensor]:
        rows = self._rows()
        missing = [target.name for target, _, update in rows if update.grad is None]
        if missing and not self._checked_sketches:
            # An expert that got no token has no sketch either.
            bypassed = [name for name in missing if ".experts." not in name]
            if bypassed or len(missing) == len(rows):
                raise RuntimeError(
                    f"{len(missing)} targets have no sketch after the first backward, so their forward does not call "
                    f"nn.Linear (a fused kernel?) or reentrant checkpointing cut them off: {', '.join(missing[:6])}. "
                    f"Switch the fused kernel off, set use_reentrant=False, or put them into exclude_modules"
                )
        self._checked_sketches = True
        return [torch.zeros_like(u) if u.grad is None else u.grad for _, _, u in rows]

    def _all_finite(self, proposal: Proposal) -> bool:
        grads = [p.grad for g in self.param_groups[1:] for p in g["params"] if p.grad is not None]
        total = torch.nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        total = total.full_tensor() if isinstance(total, DTensor) else total
        return bool(torch.isfinite(proposal.sketch_norm + total.to(proposal.sketch_norm.device)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but the state of targets keeps its dtypes.

        Raises:
            ValueError: the checkpoint was written for other targets.
        """
        saved = state_dict["param_groups"][0].get("target_names")
        if saved != list(self.targets):
            differ = sorted(set(saved or []) ^ set(self.targets)) if saved else ["(not a LoGRA checkpoint)"]
            raise ValueError(f"the optimizer checkpoint is for other targets; they differ in: {', '.join(differ[:6])}")
        super().load_state_dict(state_dict)
        for update, index in zip(self.param_groups[0]["params"], state_dict["param_groups"][0]["params"], strict=True):
            for key, value in state_dict["state"][index].items():
                self.state[update][key] = value.detach().clone().to(update.device)
        self.taps.refresh = self.param_groups[0]["num_refreshes"]
        self._share_with_adamw()
