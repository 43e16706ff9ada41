"""How well critics learnt, side by side.

    python -m recipes.ppo.report outputs/ppo-critic-adamw outputs/ppo-critic-logra

Value loss, and explained variance of the returns (1 is perfect, 0 is no better than a constant), as means over quarters
of the run; then the actor's result and what the critic's optimizer holds.
"""

import argparse
import json
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from recipes.common.metrics import read_metrics
from recipes.common.report import optimizer_memory, percent, size

CURVES = {"value loss": "critic/vf_loss", "explained variance": "critic/vf_explained_var"}
QUARTERS = 4


def quarters(values: list[float]) -> list[float]:
    """Means over four equal parts; a run of fewer updates has as many parts as updates."""
    parts = min(QUARTERS, len(values))
    bounds = [round(i * len(values) / parts) for i in range(parts + 1)]
    return [mean(values[a:b]) for a, b in pairwise(bounds)]


def row(label: str, cells: list[str]) -> str:
    return f"  {label:<32}" + "".join(f"{cell:>24}" for cell in cells)


def table(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """One column per run, four numbers in a cell."""
    lines = [row("", list(runs))]
    for label, metric in CURVES.items():
        values = [[r["data"][metric] for r in records if metric in r["data"]] for records in runs.values()]
        lines.append(row(f"{label}, by quarter", [" ".join(f"{v:5.2f}" for v in quarters(run)) for run in values]))
    return lines


def report(folders: list[Path]) -> None:
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in folders]
    print("\n".join(table({folder.name: read_metrics(folder) for folder in folders})))
    print(row("held-out accuracy after", [percent(s["accuracy_after"]) for s in summaries]))
    critics = [next(iter(optimizer_memory(folder)), {}) for folder in folders]
    for label, name in (("critic's optimizer state", "state_bytes"), ("critic's gradients", "gradient_bytes")):
        print(row(label, [size(critic.get(name)) for critic in critics]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run of recipes/ppo/run.sh")
    report(parser.parse_args().runs)
