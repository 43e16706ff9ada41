"""Reading the metrics that verl's file logger writes: one ``{"step": int, "data": {name: value}}`` per line."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

METRICS = "metrics.jsonl"
EARLIER = "earlier.jsonl"
"""Records of the parts before the last resumption: verl's file logger starts its own file anew."""


def held_out_accuracy(data: dict[str, float]) -> float | None:
    """Greedy accuracy on the held-out questions, where verl validated at that step."""
    values = [value for name, value in data.items() if name.startswith("val-core/") and name.endswith("/mean@1")]
    return mean(values) if values else None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """verl's records ``{"step": int, "data": {name: value}}`` in the order of their steps.

    Of a resumed run: those of all its parts. Where an interrupted part went on behind its last checkpoint, steps were
    done again, and the later record counts.
    """
    by_step: dict[int, dict[str, Any]] = {}
    for path in (run / EARLIER, run / METRICS):
        if path.exists():
            records = [json.loads(line) for line in path.read_text().splitlines()]
            by_step.update({record["step"]: record for record in records})
    if not by_step:
        raise ValueError(f"{run}/{METRICS} is empty: the run did not finish a step, see {run}/train.log")
    return [by_step[step] for step in sorted(by_step)]
