"""Reading the metrics that verl's file logger writes: one ``{"step": int, "data": {name: value}}`` per line."""

import json
from pathlib import Path
from statistics import mean
from typing import Any


def held_out_accuracy(data: dict[str, float]) -> float | None:
    """Greedy accuracy on the held-out questions, where verl validated at that step."""
    values = [value for name, value in data.items() if name.startswith("val-core/") and name.endswith("/mean@1")]
    return mean(values) if values else None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """verl's records ``{"step": int, "data": {name: value}}`` in the order of their steps."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if not records:
        raise ValueError(f"{run}/metrics.jsonl is empty: the run did not finish a step, see {run}/train.log")
    return records
