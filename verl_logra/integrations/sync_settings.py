"""Settings of the low-rank weight sync, under ``actor_rollout_ref.rollout.checkpoint_engine``.

``backend=logra`` switches it on wherever verl reads that key. Its older trainer (``trainer.use_v1=False``) takes only
``naive`` for colocated rollouts; there ``+engine_kwargs.logra.enable=True`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from verl_logra.config import _check, _check_choices, _from_dict
from verl_logra.sync.session import SessionSettings


@dataclass(frozen=True, kw_only=True)
class SyncSettings:
    """``checkpoint_engine.engine_kwargs.logra``."""

    enable: bool = True
    """False switches the low-rank sync off although other keys are set."""
    low_half: Literal["host", "device", "fp32"] = "host"
    """Where a bf16 rollout keeps what bf16 cannot hold: 2 bytes per parameter in host memory, 2 on the device, or 4
    in host memory as a whole fp32 copy."""
    full_sync_interval: int | None = None
    """Every how many syncs a full one is sent, for those who want it; None never."""
    verify: bool = False
    """After every sync send all weights in full and compare every bit that vLLM computes with; for tests."""
    timeout_seconds: float = 300.0
    """How long one side waits for the next sign of life of the other; disaggregated rollouts wait three times that."""
    max_updates: int = 64
    """Updates the trainer keeps for receivers that have not had them; more, and those need a full sync."""
    transport: str | None = None
    """How messages reach disaggregated rollouts: ``zmq``, or a checkpoint engine of verl's that carries named tensors
    (``nccl``, which is hccl on Ascend); None picks zmq on a CPU and nccl elsewhere."""

    def __post_init__(self) -> None:
        _check_choices(self)
        interval = self.full_sync_interval
        _check(interval is None or interval >= 1, "full_sync_interval", interval, "None or at least 1")
        _check(self.timeout_seconds > 0, "timeout_seconds", self.timeout_seconds, "positive")
        _check(self.max_updates >= 1, "max_updates", self.max_updates, "at least 1")

    def session(self, bucket_bytes: int) -> SessionSettings:
        return SessionSettings(
            full_sync_interval=self.full_sync_interval,
            frame_bytes=min(64 << 20, bucket_bytes),
            max_updates=self.max_updates,
        )


def sync_settings(checkpoint_engine: Any) -> SyncSettings | None:
    """Settings out of verl's ``CheckpointEngineConfig``; None if the low-rank sync is off.

    Raises:
        ValueError: a key is unknown or a value is out of range.
    """
    values = checkpoint_engine.engine_kwargs.get("logra")
    if checkpoint_engine.backend != "logra" and values is None:
        return None
    settings = settings_from(values or {})
    return settings if settings.enable else None


def settings_from(values: Mapping[str, Any]) -> SyncSettings:
    return _from_dict(SyncSettings, dict(values), "rollout.checkpoint_engine.engine_kwargs.logra")
