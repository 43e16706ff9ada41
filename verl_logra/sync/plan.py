"""Whether a sync can be low-rank, and if not, why: a pure function that every trainer rank evaluates alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

REASONS = (
    "none",
    "refused",
    "first sync",
    "new replica",
    "resumed run",
    "changed targets",
    "failed sync",
    "missed update",
    "full_sync_interval",
)
"""What ``sync/full_reason`` counts: 0 for a low-rank sync."""


class ReceiverState(TypedDict):
    """What one rollout worker says before a sync. Plain values, because it crosses several process boundaries."""

    history: str
    """"" until a full sync succeeded."""
    update: int
    layout: str
    problem: str
    """Why the weights are not to be trusted; "" if they are."""
    refusal: str
    """Why this worker can take no exact low-rank update at all; "" if it can."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    kind: Literal["low_rank", "full", "plain"]
    """``plain``: a full sync that the receivers take as if LoGRA were not there."""
    reason: str = "none"
    """One of ``REASONS``."""
    detail: str = ""
    base: int = 0
    """Update that all receivers have, for ``low_rank``."""

    def metrics(self) -> dict[str, float]:
        return {"sync/full": float(self.kind != "low_rank"), "sync/full_reason": float(REASONS.index(self.reason))}

    def __str__(self) -> str:
        if self.kind == "low_rank":
            return f"low-rank weight sync from update {self.base}"
        return f"full weight sync ({self.reason}{': ' + self.detail if self.detail else ''})"


def choose(
    states: Sequence[ReceiverState],
    *,
    history: str,
    history_began: str,
    layout: str,
    oldest_base: int,
    last: int,
    refusal: str = "",
    syncs_since_full: int = 0,
    full_sync_interval: int | None = None,
) -> Plan:
    """Plans one sync for receivers in these states.

    Args:
        states: of all rollout workers.
        history, layout, last: the trainer's, see ``UpdateLog`` and ``wire.layout``.
        history_began: why the trainer's history began.
        oldest_base: the oldest update from which the trainer can still describe the way to ``last``.
        refusal: why the trainer can send no exact update at all.
        full_sync_interval: every how many syncs a full one is wanted; None never.
    """
    refusal = refusal or next((s["refusal"] for s in states if s["refusal"]), "")
    if refusal:
        return Plan(kind="plain", reason="refused", detail=refusal)
    problem = next((s["problem"] for s in states if s["problem"]), "")
    if problem:
        return Plan(kind="full", reason="failed sync", detail=problem)
    if not states or all(not s["history"] for s in states):
        resumed = history_began == "resumed run"
        return Plan(kind="full", reason="resumed run" if resumed else "first sync")
    if any(not s["history"] for s in states):
        missing = sum(not s["history"] for s in states)
        return Plan(kind="full", reason="new replica", detail=f"{missing} of {len(states)} workers have no weights yet")
    if any(s["layout"] != layout for s in states):
        other = next(s["layout"] for s in states if s["layout"] != layout)
        return Plan(kind="full", reason="changed targets", detail=f"receiver has {other}; trainer has {layout}")
    if any(s["history"] != history for s in states):
        return Plan(kind="full", reason="resumed run", detail=history_began if history_began not in REASONS else "")
    updates = sorted({s["update"] for s in states})
    if len(updates) > 1 or not oldest_base <= updates[0] <= last:
        detail = f"receivers have updates {updates}, the trainer can send {oldest_base + 1} to {last}"
        return Plan(kind="full", reason="missed update", detail=detail)
    if full_sync_interval is not None and syncs_since_full + 1 >= full_sync_interval:
        return Plan(kind="full", reason="full_sync_interval", detail=f"every {full_sync_interval} syncs")
    return Plan(kind="low_rank", base=updates[0])


def empty_state(**changes: Any) -> ReceiverState:
    """State of a worker that has received nothing."""
    state: ReceiverState = {"history": "", "update": 0, "layout": "", "problem": "", "refusal": ""}
    return {**state, **changes}  # type: ignore[typeddict-item]
