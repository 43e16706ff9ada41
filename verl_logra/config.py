"""Settings of the optimizer and of the step controller.

In verl they live in ``actor_rollout_ref.actor.optim.override_optimizer_config`` (and ``critic.optim...``).
Learning rate, its schedule, weight decay and gradient clipping stay verl's own keys.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_T = TypeVar("_T")


def _from_dict(cls: type[_T], values: Mapping[str, Any], where: str) -> _T:
    """Builds a settings class from a mapping; an unknown key is refused with the closest valid one."""
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} must be a mapping of settings, got {values!r}")
    names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    for key in values:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"valid keys: {', '.join(names)}"
            raise ValueError(f"{where}: unknown key {key!r}; {hint}")
    return cls(**values)


def _check_choices(config: Any) -> None:
    """Every field annotated with ``Literal`` must hold one of the literal's values."""
    for name, hint in get_type_hints(type(config)).items():
        # The strings of Literal[...], also inside of Literal[...] | None.
        choices = [c for arg in (hint, *get_args(hint)) if get_origin(arg) is Literal for c in get_args(arg)]
        if choices and getattr(config, name) not in choices:
            raise ValueError(f"{name}={getattr(config, name)!r} is not one of {', '.join(map(repr, choices))}")


def _check(condition: bool, name: str, value: Any, legal: str) -> None:
    if not condition:
        raise ValueError(f"{name}={value!r} is out of range: it must be {legal}")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """The nested ``torch.optim.AdamW`` of everything that is not a target (``non_target="adamw"``)."""

    lr: float | None = None
    """Learning rate of the rest; ``None`` takes the optimizer's. Schedules multiply both."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float | None = None
    """``None`` takes the optimizer's."""

    def __post_init__(self) -> None:
        if not isinstance(self.betas, (list, tuple)) or len(self.betas) != 2:
            raise ValueError(f"adamw.betas={self.betas!r} must be two numbers, for example [0.9, 0.999]")
        object.__setattr__(self, "betas", tuple(self.betas))
        for beta in self.betas:
            _check(_number(beta) and 0 <= beta < 1, "adamw.betas", self.betas, "two numbers in [0, 1)")
        _check(_number(self.eps) and self.eps > 0, "adamw.eps", self.eps, "positive")
        for name in ("lr", "weight_decay"):
            value = getattr(self, name)
            _check(value is None or (_number(value) and value >= 0), f"adamw.{name}", value, "None or non-negative")


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The predicted-KL step controller. Defaults are the published ones (arXiv 2610.06647)."""

    budget: float = 2e-4
    """Nats per response token that one update may move the policy."""
    budget_final: float | None = 2e-5
    """Budget at the end of the schedule; ``None`` keeps ``budget``."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    schedule_updates: int = 300
    """Optimizer updates from ``budget`` to ``budget_final``, which holds from there on."""
    alpha_max: float = 3.0
    """The step may be stretched up to this factor when the prediction is below the budget."""
    alpha_min: float = 0.0
    """A step whose scale would fall below this is refused instead of being applied tiny."""
    probe: Literal["jvp", "finite_difference"] = "jvp"
    """How the logits' tangent is found: forward-mode AD, or two forwards for kernels without a forward derivative."""
    probe_sequences: int = 2
    """Sequences of the mini-batch that each data-parallel rank probes. Answers of a few tokens need more than two."""
    probe_max_tokens: int = 4096
    """Longest probe sequence, prompt included; longer ones keep their first tokens."""
    temperature: float | None = None
    """Temperature of the policy that the KL is about; ``None`` takes the rollout's."""
    mismatch: bool = True
    """Subtract a moving average of ``max(0, mean(rollout log-prob - trainer log-prob))`` from the budget."""
    mismatch_ema: float = 0.3
    """Weight of the newest observation."""
    mismatch_floor: float = 0.5
    """The mismatch never takes more of the budget than leaves this share."""
    verify: bool = True
    """Measure the KL of the scaled step by one plain forward before it is applied; shrink while it is too large."""
    verify_tolerance: float = 1.5
    """A verified KL up to this multiple of the budget is accepted."""
    max_update_ratio: float | None = 1e-2
    """Upper bound of ``alpha * ||delta W|| / ||W||`` over all targets, for where no probe sees what a step does: no
    sound update of a pretrained model is near a hundredth of its weights. ``None``: no bound."""
    calibrate: bool | None = None
    """Divide the budget by a running mean of realised / predicted KL; ``None``: where AdamW moves the rest."""
    realized_every: int = 0
    """Measure the realised KL by one forward after every n-th update; 0: only where ``calibrate`` needs it."""

    def __post_init__(self) -> None:
        _check_choices(self)
        _check(_number(self.budget) and self.budget > 0, "kl.budget", self.budget, "positive (nats per token)")
        final = self.budget_final
        _check(final is None or (_number(final) and final > 0), "kl.budget_final", final, "positive or None")
        _check(self.schedule_updates >= 1, "kl.schedule_updates", self.schedule_updates, "at least 1")
        _check(_number(self.alpha_max) and self.alpha_max > 0, "kl.alpha_max", self.alpha_max, "positive")
        _check(0 <= self.alpha_min < self.alpha_max, "kl.alpha_min", self.alpha_min, "in [0, alpha_max)")
        _check(self.probe_sequences >= 1, "kl.probe_sequences", self.probe_sequences, "at least 1")
        _check(self.probe_max_tokens >= 2, "kl.probe_max_tokens", self.probe_max_tokens, "at least 2")
        t = self.temperature
        _check(t is None or (_number(t) and t > 0), "kl.temperature", t, "positive or None")
        _check(0 < self.mismatch_ema <= 1, "kl.mismatch_ema", self.mismatch_ema, "in (0, 1]")
        _check(0 < self.mismatch_floor <= 1, "kl.mismatch_floor", self.mismatch_floor, "in (0, 1]")
        _check(self.verify_tolerance >= 1, "kl.verify_tolerance", self.verify_tolerance, "at least 1")
        r = self.max_update_ratio
        _check(r is None or (_number(r) and r > 0), "kl.max_update_ratio", r, "positive or None")
        _check(self.realized_every >= 0, "kl.realized_every", self.realized_every, "0 or a number of updates")


DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class LoGRAConfig:
    """The LoGRA optimizer (arXiv 2610.06647)."""

    rank: int = 256
    """Rows of the projection: each target's gradient ``[out, in]`` is kept as a sketch ``[out, rank]``."""
    seed: int = 42
    """Base seed of the projections; part of the wire format of the low-rank weight sync."""
    projection: Literal["rademacher", "gaussian"] = "rademacher"
    refresh: Literal["update", "sync", "never"] = "update"
    """When the projection is drawn anew: after each optimizer update, after each weight sync, or never."""
    scale: Literal["ratio", "lr"] = "ratio"
    """``ratio``: all targets move by ``update_ratio`` of their weights' norm (times lr / initial lr), each layer in
    proportion to its sketch norm. ``lr``: the update is ``lr * direction @ A``."""
    update_ratio: float = 6e-5
    """``||delta W|| / ||W||`` of one update over all targets, for ``scale="ratio"``."""
    optimizer: Literal["row_adam", "sgd"] = "row_adam"
    """``sgd`` takes the sketch itself as the direction; meant for tests."""
    beta2: float = 0.95
    eps: float = 1e-8
    """Added to a row's RMS; with ``scale="ratio"`` relative to the layer's mean row RMS."""
    target_modules: tuple[str, ...] = DEFAULT_TARGETS
    """Leaf names, or patterns of qualified names (anything with a dot, ``*`` allowed) of ``nn.Linear`` modules."""
    exclude_modules: tuple[str, ...] = ()
    """The same kind of patterns; they win over ``target_modules``."""
    non_target: Literal["adamw", "frozen"] | None = None
    """The rest of the model. ``None``: ``frozen`` with the KL controller, as published, else ``adamw``."""
    adamw: AdamWConfig = field(default_factory=AdamWConfig)
    factor_dtype: Literal["int8", "bfloat16", "float32"] = "int8"
    """What the update factor is rounded to before anyone applies it; only ``int8`` syncs exactly."""
    kl: KLConfig | None = None
    """The step controller; off when absent."""

    def __post_init__(self) -> None:
        for name, cls in (("adamw", AdamWConfig), ("kl", KLConfig)):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, _from_dict(cls, value, name))
            elif not (isinstance(value, cls) or (name == "kl" and value is None)):
                raise ValueError(f"{name}={value!r} must be a mapping of settings")
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(v, str) for v in value):
                raise ValueError(f"{name}={value!r} must be a list of module names, for example [q_proj, v_proj]")
            object.__setattr__(self, name, tuple(value))
        if self.non_target is None:
            object.__setattr__(self, "non_target", "frozen" if self.kl is not None else "adamw")
        _check_choices(self)
        for name in ("rank", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be an integer")
        _check(self.rank >= 1, "rank", self.rank, "at least 1")
        _check(_number(self.update_ratio) and self.update_ratio > 0, "update_ratio", self.update_ratio, "positive")
        _check(_number(self.beta2) and 0 <= self.beta2 < 1, "beta2", self.beta2, "in [0, 1)")
        _check(_number(self.eps) and self.eps > 0, "eps", self.eps, "positive")
        if not self.target_modules:
            raise ValueError("target_modules is empty: name at least one nn.Linear, or drop optimizer_impl=verl_logra")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> LoGRAConfig:
        """Builds the settings from verl's free-form ``override_optimizer_config``.

        Raises:
            ValueError: a key is unknown (the closest valid one is named) or a value is out of range.
        """
        return _from_dict(cls, values, "override_optimizer_config of LoGRA")
