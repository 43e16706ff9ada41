"""The table and the picture of recipes/kl_control.

    python -m recipes.kl_control.report outputs

Reads the runs ``kl_control-<method>-x<factor>-seed<seed>``; writes ``kl_control/table.md``, ``kl_control/result.json``
and ``kl_control/kl_control.png`` into the same folder.
"""

import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean
from typing import Any

from recipes.common.metrics import held_out_accuracy, read_metrics

METHODS = {"adamw": "AdamW", "logra": "LoGRA, no control", "control": "LoGRA, KL control"}
Runs = dict[tuple[str, str], dict[str, list[dict[str, Any]]]]


def collect(folder: Path) -> Runs:
    """``{(method, factor): {seed: records}}`` of the finished runs."""
    runs: Runs = defaultdict(dict)
    for summary in sorted(folder.glob("kl_control-*/summary.json")):
        match = re.fullmatch(r"kl_control-(\w+)-x(\w+)-seed(\w+)", summary.parent.name)
        if match:
            runs[match[1], match[2]][match[3]] = read_metrics(summary.parent)
    if not runs:
        raise FileNotFoundError(f"{folder} has no finished run kl_control-*: call recipes/kl_control/run.sh first")
    return runs


def accuracies(records: list[dict[str, Any]]) -> list[tuple[int, float]]:
    """(step, held-out greedy accuracy) at every validation."""
    found = ((r["step"], held_out_accuracy(r["data"])) for r in records)
    return [(step, value) for step, value in found if value is not None]


def controlled_updates(runs: Runs) -> list[dict[str, float]]:
    """Budget, prediction at the applied scale, and realised KL of every controlled update, in nats per token."""
    updates = []
    for (method, _), seeds in runs.items():
        for records in seeds.values() if method == "control" else ():
            for data in (r["data"] for r in records if "actor/logra_realized_kl" in r["data"]):
                updates.append(
                    {
                        "budget": data["actor/logra_kl_budget"],
                        "predicted": data["actor/logra_alpha"] ** 2 * data["actor/logra_predicted_kl"],
                        "realized": data["actor/logra_realized_kl"],
                        "alpha": data["actor/logra_alpha"],
                    }
                )
    return updates


def result(runs: Runs) -> dict[str, Any]:
    """Final accuracies per method and factor, and how the controlled updates kept to their budget."""
    updates = [u for u in controlled_updates(runs) if u["alpha"] > 0]
    ratios = [u["realized"] / u["predicted"] for u in updates if u["predicted"] > 0]
    return {
        "accuracy": {
            f"{method} x{factor}": {
                "before": [accuracies(r)[0][1] for r in seeds.values()],
                "after": [accuracies(r)[-1][1] for r in seeds.values()],
            }
            for (method, factor), seeds in runs.items()
        },
        "controlled_updates": len(updates),
        "share_of_predictions_within_0.8_to_1.25": mean(0.8 <= r <= 1.25 for r in ratios) if ratios else None,
        "largest_realized_over_budget": max((u["realized"] / u["budget"] for u in updates), default=None),
    }


def table(runs: Runs) -> str:
    """Markdown: held-out accuracy at the end, mean and every seed."""
    factors = sorted({factor for _, factor in runs}, key=float)
    lines = ["| held-out accuracy | " + " | ".join(f"learning rate x {f}" for f in factors) + " |"]
    lines.append("|---" * (len(factors) + 1) + "|")
    for method, label in METHODS.items():
        cells = []
        for factor in factors:
            after = [accuracies(records)[-1][1] for records in runs.get((method, factor), {}).values()]
            cells.append(f"{mean(after):.1%} ({', '.join(f'{a:.1%}' for a in after)})" if after else "-")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    before = mean(accuracies(records)[0][1] for seeds in runs.values() for records in seeds.values())
    return "\n".join([*lines, "", f"Before training: {before:.1%}. Per seed in brackets."])


def draw(runs: Runs, path: Path) -> None:
    """Accuracy over steps for the largest factor on the left; predicted, realised and budgeted KL on the right."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    factor = max((factor for _, factor in runs), key=float)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for color, (method, label) in enumerate(METHODS.items()):
        for i, records in enumerate(runs.get((method, factor), {}).values()):
            left.plot(
                *zip(*accuracies(records), strict=True), "o-", color=f"C{color}", alpha=0.7, label=None if i else label
            )
    left.set(title=f"Learning rate x {factor}: held-out accuracy", xlabel="update", ylim=(-0.02, 1.02))
    records = next(iter(runs["control", factor].values()))
    steps = [r for r in records if "actor/logra_realized_kl" in r["data"]]
    x = [r["step"] for r in steps]
    predicted = [r["data"]["actor/logra_alpha"] ** 2 * r["data"]["actor/logra_predicted_kl"] for r in steps]
    unscaled = [r["data"]["actor/logra_predicted_kl"] for r in steps]
    right.plot(x, unscaled, color="C3", alpha=0.6, label="predicted, step not scaled")
    right.plot(x, predicted, color="C0", label="predicted, scaled step")
    right.plot(x, [r["data"]["actor/logra_realized_kl"] for r in steps], ".", color="C1", label="realised")
    right.plot(x, [r["data"]["actor/logra_kl_budget"] for r in steps], "k--", linewidth=1, label="budget")
    right.set(title="KL of each update, nats per token", xlabel="update", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(folder: Path) -> None:
    runs = collect(folder)
    out = folder / "kl_control"
    out.mkdir(exist_ok=True)
    (out / "result.json").write_text(json.dumps(result(runs), indent=2) + "\n")
    (out / "table.md").write_text(table(runs) + "\n")
    draw(runs, out / "kl_control.png")
    print(table(runs))
    for name, value in result(runs).items():
        if name != "accuracy":
            print(f"{name.replace('_', ' ')}: {value if isinstance(value, int) else round(value, 3)}")


if __name__ == "__main__":
    report(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs"))
