"""Methods side by side, what fits a device, and what a weight sync sends: the numbers behind ``verl-logra plan``."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from verl_logra.planner import wire_bytes
from verl_logra.planner.memory import GIB, METHODS, Method, Moment, Rank, Setting
from verl_logra.planner.models import Model

GENERATION = "generation"


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Rollouts that share the trainer's devices and sleep while it trains."""

    memory_share: float
    """vLLM's gpu_memory_utilization."""
    tensor_parallel: int = 1
    offload: bool = False
    """verl's param_offload and optimizer_offload: the trainer's tensors are in host memory during generation."""
    low_halves: Literal["host", "device"] = "host"
    """Where receivers of low-rank syncs keep what bf16 cannot hold."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One question to the planner."""

    model: Model
    setting: Setting
    device_gib: float | None = None
    rollout: Rollout | None = None
    density: float = 0.01
    """Share of elements that a sparse delta carries."""
    updates_per_sync: int = 1

    def moments(self, method: Method) -> list[Moment]:
        """The training step, and generation where rollouts share the device."""
        rank = Rank(self.model, self.setting, method)
        found = rank.moments()
        if self.rollout is None:
            return found
        kept = 0.0
        if method == "logra" and self.setting.sync == "low_rank" and self.rollout.low_halves == "device":
            # A plain tensor of the worker: vLLM's sleep does not move it.
            kept = 2 * sum(p.numel for p in self.model.targets) / self.rollout.tensor_parallel
            found = [Moment(m.name, {**m.parts, "receiver's low halves": kept}) for m in found]
        resident = {} if self.rollout.offload else dict(rank.resident)
        if self.setting.critic and not self.rollout.offload:
            resident["critic"] = sum(rank.resident.values())
        if self.device_gib is not None:
            resident["rollout"] = self.rollout.memory_share * self.device_gib * GIB
        if kept:
            resident["receiver's low halves"] = kept
        return [*found, Moment(GENERATION, resident)]

    def peak(self, method: Method) -> Moment:
        return max(self.moments(method), key=lambda moment: moment.total)

    def fits(self, method: Method) -> bool | None:
        """None without a device's memory to fit."""
        return None if self.device_gib is None else self.peak(method).total <= self.device_gib * GIB

    def with_rank(self, rank: int) -> Plan:
        return replace(self, setting=replace(self.setting, rank=rank))

    def largest_rank(self, method: Method) -> int | None:
        """Largest rank that fits the device, up to the narrowest target; None: not even 1 does."""
        low, high = 0, min(p.shape[1] for p in self.model.targets)
        while low < high:
            middle = (low + high + 1) // 2
            if self.with_rank(middle).fits(method):
                low = middle
            else:
                high = middle - 1
        return low or None

    def as_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON. ``gib``: bytes / 2^30."""
        model, setting = self.model, self.setting
        methods: dict[str, Any] = {}
        for method in METHODS:
            peak = self.peak(method)
            methods[method] = {
                "peak_gib": peak.total / GIB,
                "peak_at": peak.name,
                "parts_gib": {name: size / GIB for name, size in peak.parts.items() if size},
                "resident_gib": sum(Rank(model, setting, method).resident.values()) / GIB,
                "moments_gib": {m.name: m.total / GIB for m in self.moments(method)},
                "fits": self.fits(method),
            }
        ranked: tuple[Method, ...] = () if self.device_gib is None else ("lora", "galore", "logra")
        targets = sum(p.numel for p in model.targets)
        return {
            "model": {"name": model.name, "parameters": model.num_parameters, "target_parameters": targets},
            "setting": asdict(setting),
            "rollout": None if self.rollout is None else asdict(self.rollout),
            "device_gib": self.device_gib,
            "methods": methods,
            "largest_rank": {method: self.largest_rank(method) for method in ranked},
            "sync": {
                "full_bytes": wire_bytes.full_bytes(model),
                "sparse_delta_bytes": wire_bytes.sparse_delta_bytes(model, self.density),
                "sparse_delta_density": self.density,
                "low_rank_bytes": wire_bytes.low_rank_bytes(
                    model, setting.rank, updates=self.updates_per_sync, rest_moves=setting.non_target == "adamw"
                ),
                "updates": self.updates_per_sync,
                "first_bytes": wire_bytes.first_bytes(model),
                "receiver_low_half_bytes": 2 * targets,
            },
        }
