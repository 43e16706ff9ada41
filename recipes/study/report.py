"""Tables and pictures of the study, from the results that are there.

    python -m recipes.study.report [FOLDER]

FOLDER (default: recipes/study/results) has the results of recipes.study.run. Prints the tables; for the results kept
with the code it also renews them in recipes/study/README.md. ``methods.png`` and ``ablations.png`` go beside them.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from recipes.common.report import size
from recipes.study.experiments import ABLATIONS, LEARNING_RATES, METHODS, REFERENCE, Experiment
from recipes.study.run import RESULTS

Results = dict[str, list[dict[str, Any]]]
README = Path(__file__).parent / "README.md"
BEGIN, END = "<!-- tables: recipes.study.report writes them -->", "<!-- end of tables -->"
TITLES = {
    "methods": "Methods",
    "rank": "Rank",
    "projection": "Projection",
    "scale": "Scale of the update",
    "kl-budget": "KL budget",
    "factors": "Precision of the update factors",
    "refresh": "Refresh of the projection",
    "learning-rates": "Learning rates",
}
LAST_UPDATES = 10
"""The reward is averaged over so many updates at the end: 1280 sampled answers, against 128 held-out ones."""


def load(folder: Path) -> Results:
    """Results per experiment, in the order of their seeds."""
    found: Results = defaultdict(list)
    for path in folder.glob("*.json"):
        result = json.loads(path.read_text())
        found[result["experiment"]].append(result)
    if not found:
        raise FileNotFoundError(f"{folder} has no results: call recipes/study/run.sh first")
    return {name: sorted(results, key=lambda r: r["seed"]) for name, results in found.items()}


def final_accuracies(results: Sequence[dict[str, Any]]) -> list[float]:
    return [result["accuracy"][-1][1] for result in results]


def final_rewards(results: Sequence[dict[str, Any]]) -> list[float]:
    return [mean(result["reward"][-LAST_UPDATES:]) for result in results]


def held_bytes(result: dict[str, Any]) -> int:
    """Gradients, optimizer state and added parameters: what training holds besides weights and activations."""
    summary = result["summary"]
    return sum(summary[name] for name in ("gradient_bytes", "optimizer_state_bytes", "added_parameter_bytes"))


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation of the seeds, in percent."""
    text = f"{mean(values):.1%}"
    return f"{text} ± {stdev(values):.1%}" if len(values) > 1 else text


def table(experiments: Sequence[Experiment], results: Results) -> str:
    """Markdown; an experiment without results has no row."""
    lines = ["| | seeds | held-out accuracy | reward at the end | gradients, state, added parameters |"]
    lines.append("|---|---|---|---|---|")
    for experiment in experiments:
        runs = results.get(experiment.name)
        if runs:
            cells = [
                experiment.label,
                str(len(runs)),
                spread(final_accuracies(runs)),
                spread(final_rewards(runs)),
                size(held_bytes(runs[0])),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def groups(results: Results) -> dict[str, list[Experiment]]:
    """Comparisons that have results; each ablation of a default shows the default, ``REFERENCE``, first."""
    found: dict[str, list[Experiment]] = {"methods": list(METHODS)}
    for experiment in ABLATIONS:
        alone = experiment.group == "refresh"  # has its own setting of `update`
        found.setdefault(experiment.group, [] if alone else [REFERENCE]).append(experiment)
    found["learning-rates"] = [
        e for m in METHODS for e in (m, *(x for x in LEARNING_RATES if x.name.startswith(m.name + "-lr")))
    ]
    return {
        group: members
        for group, members in found.items()
        if any(e.name in results for e in members if e.group == group)
    }


def draw(experiments: Sequence[Experiment], results: Results, axes: Any) -> None:
    """Held-out accuracy over updates: mean of the seeds, and their range."""
    for experiment in experiments:
        runs = results.get(experiment.name)
        if runs:
            steps = [step for step, _ in runs[0]["accuracy"]]
            columns = list(zip(*([value for _, value in run["accuracy"]] for run in runs), strict=True))
            (line,) = axes.plot(steps, [mean(column) for column in columns], "o-", label=experiment.label)
            low, high = [min(c) for c in columns], [max(c) for c in columns]
            axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15)
    axes.set(xlabel="update", ylabel="held-out accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def pictures(results: Results, folder: Path) -> None:
    """One picture of the methods, one with a panel per ablation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = groups(results)
    methods = compared.pop("methods", [])
    if any(experiment.name in results for experiment in methods):
        figure, axes = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
        draw(methods, results, axes)
        figure.savefig(folder / "methods.png", dpi=120)
    compared.pop("learning-rates", None)
    if compared:
        size_of_all = (5 * len(compared), 4)
        figure, panels = pyplot.subplots(1, len(compared), figsize=size_of_all, squeeze=False, constrained_layout=True)
        for axes, (group, members) in zip(panels[0], compared.items(), strict=True):
            draw(members, results, axes)
            axes.set_title(TITLES[group])
        figure.savefig(folder / "ablations.png", dpi=120)
    pyplot.close("all")


def tables(results: Results) -> str:
    """Every comparison under a heading of its own."""
    return "\n\n".join(f"### {TITLES[group]}\n\n{table(m, results)}" for group, m in groups(results).items())


def renew(readme: Path, text: str) -> None:
    """Put the tables between the marks of the README."""
    before, _, rest = readme.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise ValueError(f"{readme} lacks the lines {BEGIN!r} and {END!r}, between which the tables go")
    readme.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS)
    folder = parser.parse_args().folder
    results = load(folder)
    print(tables(results))
    pictures(results, folder)
    if folder == RESULTS:
        renew(README, tables(results))
