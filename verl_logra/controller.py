"""Predict, verify, commit: scales every update so that the policy moves by a KL budget (arXiv 2610.06647, section 4).

The controller sits between the halves of ``LoGRA.step``. It predicts the KL of the proposed update, chooses the scale
that fits the budget, measures the KL of the scaled update by a forward, shrinks the scale while that is too large, and
refuses the step when nothing else is safe. Every decision depends only on numbers summed over all ranks, so all ranks
decide alike.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from verl_logra.config import KLConfig
from verl_logra.core import kl as maths
from verl_logra.optimizer import LoGRA
from verl_logra.probe import Probe

logger = logging.getLogger(__name__)

MAX_VERIFICATIONS = 6
MAX_REFUSALS = 3
FEW_TOKENS = 32


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the controller decided about one update, and what came of it. KL in nats per response token."""

    budget: float
    """After the schedule and the mismatch."""
    predicted_kl: float = math.nan
    """Of the unscaled step, to second order."""
    alpha: float | None = None
    """Scale of the step; None for a refused one."""
    verified_kl: float | None = None
    """Measured before the step, with the scaled update injected through the taps."""
    verifications: int = 0
    capped: bool = False
    """Whether ``max_update_ratio`` set the scale."""
    realized_kl: float | None = None
    """Measured after the step."""
    refusal: str | None = None
    """Why the step was refused."""


@dataclass
class ControllerState:
    """What a resumed run needs to know; saved with the optimizer."""

    mismatch: float | None = None
    calibration: float | None = None
    refused: int = 0
    refused_in_a_row: int = 0


class KLController:
    """Scales the steps of a LoGRA optimizer to a KL budget.

    Before each ``optimizer.step()`` give it the probe: ``controller.probe = Probe(model, sequences, ...)``.

    Raises:
        RuntimeError: a step without a probe, or three refused steps in a row.
    """

    def __init__(self, optimizer: LoGRA, config: KLConfig) -> None:
        self.optimizer = optimizer
        self.config = config
        self.calibrates = config.calibrate
        if self.calibrates is None:
            self.calibrates = optimizer.config.non_target == "adamw"
        self.probe: Probe | None = None
        self.last: Decision | None = None
        self._warned_of_few_tokens = False
        self.seconds = 0.0
        """Wall time that predicting and measuring took in the last step."""
        optimizer.step_scale = self._step_scale
        optimizer.register_step_post_hook(self._after_step)

    @property
    def state(self) -> ControllerState:
        """Lives in the optimizer's first parameter group, so that its checkpoints hold it."""
        return ControllerState(**self.optimizer.param_groups[0].get("kl_controller", {}))

    def _update_state(self, **changes: Any) -> None:
        self.optimizer.param_groups[0]["kl_controller"] = asdict(replace(self.state, **changes))

    def observe_mismatch(self, log_prob_difference: float) -> None:
        """Takes in the mean of rollout log-prob minus trainer log-prob over the batch's response tokens, all ranks."""
        if self.config.mismatch and math.isfinite(log_prob_difference):
            average = maths.mismatch_average(self.state.mismatch, log_prob_difference, self.config.mismatch_ema)
            self._update_state(mismatch=average)

    def budget(self) -> float:
        """Budget of the next update after the schedule and the mismatch."""
        c = self.config
        end = c.budget if c.budget_final is None else c.budget_final
        budget = maths.budget_at(self.optimizer.num_updates, c.budget, end, c.schedule_updates, c.schedule)
        return maths.budget_after_mismatch(budget, self.state.mismatch or 0.0, c.mismatch_floor)

    def metrics(self) -> dict[str, float]:
        """The last decision as numbers for a log."""
        d = self.last
        if d is None:
            return {}
        named = {
            "kl_budget": d.budget,
            "predicted_kl": d.predicted_kl,
            "verified_kl": d.verified_kl,
            "realized_kl": d.verified_kl if d.realized_kl is None else d.realized_kl,
            "verifications": float(d.verifications),
            "capped": float(d.capped),
            "refused": float(d.refusal is not None),
            "mismatch": self.state.mismatch,
            "calibration": self.state.calibration,
        }
        return {name: value for name, value in named.items() if value is not None and math.isfinite(value)}

    def _step_scale(self, optimizer: LoGRA) -> float | None:
        if self.probe is None:
            raise RuntimeError("the KL controller has no probe for this step: set controller.probe first")
        start = time.perf_counter()
        decision = self._decide(self.probe)
        self.seconds = time.perf_counter() - start
        self.last = decision
        if decision.refusal is None:
            self._update_state(refused_in_a_row=0)
            return decision.alpha
        state = self.state
        self._update_state(refused=state.refused + 1, refused_in_a_row=state.refused_in_a_row + 1)
        logger.warning("LoGRA refuses update %d: %s", optimizer.num_updates + 1, decision.refusal)
        if self.state.refused_in_a_row >= MAX_REFUSALS:
            raise RuntimeError(
                f"{MAX_REFUSALS} updates in a row were refused, the last because {decision.refusal}. Lower the "
                f"learning rate or update_ratio, raise kl.budget, or set kl.probe=finite_difference"
            )
        return None

    def _decide(self, probe: Probe) -> Decision:
        config, proposal = self.config, self.optimizer.proposal
        assert proposal is not None
        decision = Decision(budget=self.budget())
        budget = decision.budget / (self.state.calibration or 1.0)

        predicted = probe.predict(proposal.decay)
        decision = replace(decision, predicted_kl=predicted.value)
        if predicted.num_tokens == 0:
            return replace(decision, refusal="no probe sequence has a response token")
        if predicted.num_tokens < FEW_TOKENS and not self._warned_of_few_tokens:
            self._warned_of_few_tokens = True
            logger.warning(
                "the KL probe sees %d response tokens, which say little about the batch: raise kl.probe_sequences=%d",
                predicted.num_tokens,
                config.probe_sequences,
            )
        if not predicted.usable:
            return replace(decision, refusal=f"the predicted KL is {predicted.value}")

        alpha = maths.step_scale(predicted.value, budget, config.alpha_max)
        if config.max_update_ratio is not None:
            largest = float(proposal.update_ratio) + proposal.decay
            if alpha * largest > config.max_update_ratio:
                alpha = config.max_update_ratio / largest
                decision = replace(decision, capped=True)
        if config.verify or self._measures_after(self.optimizer.num_updates + 1):
            probe.remember()
        if config.verify:
            verified, alpha, verifications = self._verified_scale(probe, alpha, decision.budget)
            decision = replace(decision, verified_kl=verified, verifications=verifications)
            if not verified <= config.verify_tolerance * decision.budget:
                why = f"the step scaled by {alpha:.3g} still causes {verified:.3g} nats, budget {decision.budget:.3g}"
                return replace(decision, refusal=why)
        if alpha < config.alpha_min:
            return replace(decision, refusal=f"its scale {alpha:.3g} is below kl.alpha_min={config.alpha_min}")
        return replace(decision, alpha=alpha)

    def _verified_scale(self, probe: Probe, alpha: float, budget: float) -> tuple[float, float, int]:
        """Measured KL, the scale it was measured at, and how many measurements it took."""
        for verifications in range(1, MAX_VERIFICATIONS + 1):
            with self.optimizer.trial(alpha):
                measured = probe.kl_since_remembered().value
            within = measured <= self.config.verify_tolerance * budget
            if within or not math.isfinite(measured) or verifications == MAX_VERIFICATIONS:
                break
            alpha = maths.shrunk_scale(alpha, measured, budget)
        return measured, alpha, verifications

    def _measures_after(self, num_updates: int) -> bool:
        """Whether update number ``num_updates`` (from 1) is followed by a measurement."""
        every = self.config.realized_every
        return (bool(self.calibrates) and not self.config.verify) or (every > 0 and num_updates % every == 0)

    @torch.no_grad()
    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Measures the realised KL where it is due and calibrates by it, or by the verified one."""
        probe, self.probe = self.probe, None
        step, decision = optimizer.last_step, self.last
        if probe is None or decision is None or step is None or not step.applied:
            return
        if self._measures_after(optimizer.num_updates):
            start = time.perf_counter()
            decision = replace(decision, realized_kl=probe.kl_since_remembered().value)
            self.seconds += time.perf_counter() - start
            self.last = decision
        measured = decision.verified_kl if decision.realized_kl is None else decision.realized_kl
        expected = (decision.alpha or 0.0) ** 2 * decision.predicted_kl
        if self.calibrates and measured is not None and expected > 0 and math.isfinite(measured):
            self._update_state(calibration=maths.calibration_average(self.state.calibration, measured / expected))
