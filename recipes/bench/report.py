"""Tables and pictures of the benchmarks, from their JSON alone.

    python -m recipes.bench.report outputs/bench/step.json [...]

Times are medians over processes of the median step of each; ratios are medians of ratios within one repeat, whose
processes ran one after the other.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipes.bench.case import NOT_FULL_WEIGHT, PHASES, Case, case_of, step_seconds

REFRESH = {"galore": 200, "apollo": 200}
"""Steps between two projections, as the authors recommend."""
GIB, MIB = 2**30, 2**20


class Measured:
    """All measurements of one case."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.peak: dict[str, Any] | None = None
        self.repeats: dict[int, dict[str, Any]] = {}
        """Timed processes by the number of their repeat."""

    def step_seconds(self, repeat: int) -> float:
        """Median step of one process."""
        return statistics.median(step_seconds(s) for s in self.repeats[repeat]["seconds"])

    @property
    def seconds(self) -> list[float]:
        return [self.step_seconds(repeat) for repeat in sorted(self.repeats)]

    def part(self, name: str) -> float:
        """Median seconds of a phase or part of one."""
        return statistics.median(s.get(name, 0.0) for r in self.repeats.values() for s in r["seconds"])

    def ratios(self, other: Measured) -> list[float]:
        """Of step times, within each repeat that has both."""
        both = sorted(self.repeats.keys() & other.repeats.keys())
        return [self.step_seconds(r) / other.step_seconds(r) for r in both]

    def refresh_seconds(self) -> float:
        """How much longer the optimizer's first step took, the one that computes projections."""
        extra = (
            r["warmup_seconds"]["optimizer"] - statistics.median(s["optimizer"] for s in r["seconds"])
            for r in self.repeats.values()
        )
        return statistics.median(extra)


def collect(measurements: list[dict[str, Any]]) -> dict[Case, Measured]:
    """By case, whatever it recorded besides."""
    found: dict[Case, Measured] = {}
    for m in measurements:
        case = case_of({**m["case"], "steps": 1, "profile": False})
        measured = found.setdefault(case, Measured(case))
        if m["kind"] == "peak":
            measured.peak = m
        else:
            measured.repeats[m["repeat"]] = m
    return found


def spread(values: list[float], digits: int = 2) -> str:
    """Median (lowest to highest)."""
    if not values:
        return "-"
    middle = f"{statistics.median(values):.{digits}f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def environment_line(e: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {v}" for name, v in e["packages"].items() if v)
    changed = ", with local changes" if e["changed_files"] else ""
    return f"{e['cpu']}, {e['cores']} cores, {e['memory_gib']} GiB; {packages}; commit {e['commit'][:10]}{changed}"


def step_report(data: dict[str, Any], picture: Path) -> str:
    cases = collect(data["measurements"])
    dense = next((m for c, m in cases.items() if c.method == "adamw"), None)
    rows = []
    for measured in cases.values():
        peak, held = measured.peak, (measured.peak or {}).get("held_bytes")
        relative = "-"
        if peak and dense and dense.peak:
            relative = f"{peak['peak_bytes'] / dense.peak['peak_bytes'] - 1:+.0%}"
        rows.append(
            [
                measured.case.name + ("" if measured.case.method not in NOT_FULL_WEIGHT else " *"),
                f"{peak['peak_bytes'] / GIB:.2f}" if peak else "-",
                relative,
                f"{held['target gradients'] / MIB:.0f}" if held else "-",
                f"{held['target state'] / MIB:.1f}" if held else "-",
                f"{(held['added parameters'] + held['projections']) / MIB:.1f}" if held else "-",
                spread(measured.seconds),
                spread(measured.ratios(dense)) if dense else "-",
            ]
        )
    header = ["method", "peak, GiB", "to AdamW", "gradients or sketches, MiB", "state, MiB", "added, MiB"]
    text = [markdown([*header, "step, s", "time to AdamW's"], rows), "", "\\* trains a part of the model only."]
    text += notes(list(cases))
    text += ["", "Seconds of a step:", "", phases_table(list(cases.values()))]
    refreshes = [refresh_line(m) for c, m in cases.items() if c.method in REFRESH and m.repeats]
    text += ["", *refreshes] if refreshes else []
    for measured in cases.values():
        profiles = [r["profile"] for r in measured.repeats.values() if r.get("profile")]
        if profiles:
            text += ["", f"Operators of one step of {measured.case.name}, own CPU seconds (calls):", ""]
            text.append(
                ", ".join(f"{o['name']} {o['self_ms'] / 1e3:.2f} ({o['calls']})" for o in profiles[0]["operators"])
            )
    draw_step(list(cases.values()), picture)
    return "\n".join(text)


def notes(cases: list[Case]) -> list[str]:
    """What a reader of the table has to know about methods that are in it."""
    methods, lines = {case.method for case in cases}, []
    if "adam8bit" in methods:
        lines.append(
            "Every full-weight method, 8-bit Adam included, leaves the embedding (tied to the head) and the norms to "
            "AdamW in fp32."
        )
    shape = cases[0].shape
    rows = shape.hidden * shape.kv_heads // shape.heads
    ranks = sorted({c.rank for c in cases if c.rank and c.rank >= rows})
    if ranks and methods & {"galore", "flora", "apollo"}:
        lines.append(
            f"k_proj and v_proj have {rows} rows: at rank {', '.join(map(str, ranks))} GaLore, Flora and APOLLO would "
            f"save nothing there and leave them to AdamW; LoGRA sketches them."
        )
    return ["", *lines] if lines else []


def phases_table(measured: list[Measured]) -> str:
    """Phases of every method; parts of the optimizer's for LoGRA."""
    parts = ["propose", "predict", "verify", "commit", "adamw of the rest", "projections"]
    rows = []
    for m in measured:
        if m.repeats:
            values = [m.part(name) for name in (*PHASES, *parts)]
            rows.append([m.case.name, *(f"{v:.2f}" if v else "" for v in values)])
    header = ["method", *PHASES, *(f"of it {p}" if p != "projections" else "projections, anywhere" for p in parts)]
    return markdown(header, rows)


def refresh_line(measured: Measured) -> str:
    every, extra = REFRESH[measured.case.method], measured.refresh_seconds()
    step = statistics.median(measured.seconds)
    return (
        f"{measured.case.name}: its first projections took {extra:.1f} s; every {every} steps that is "
        f"{extra / every:.2f} s a step, {extra / every / step:.0%} more."
    )


def draw_step(measured: list[Measured], path: Path) -> None:
    """Peaks on the left, seconds by phase on the right."""
    pyplot = _pyplot()
    rows = [m for m in reversed(measured) if m.peak or m.repeats]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 1.2 + 0.33 * len(rows)), sharey=True, constrained_layout=True
    )
    names = [m.case.name for m in rows]
    colors = ["C0" if m.case.method.startswith("logra") else "0.6" for m in rows]
    peaks = [m.peak["peak_bytes"] / GIB if m.peak else 0.0 for m in rows]
    left.bar_label(left.barh(names, peaks, color=colors), fmt="%.2f", padding=3)
    left.set(xlabel="peak memory of a training step, GiB", xlim=(0, 1.12 * max(peaks)))
    start = [0.0] * len(rows)
    for i, phase in enumerate(PHASES):
        values = [m.part(phase) if m.repeats else 0.0 for m in rows]
        right.barh(names, values, left=start, color=f"C{i}", label=phase)
        start = [a + b for a, b in zip(start, values, strict=True)]
    dense = [s for m, s in zip(rows, start, strict=True) if m.case.method == "adamw"]
    if dense:
        right.axvline(dense[0], color="k", linestyle="--", linewidth=1, label="AdamW")
    right.set(xlabel="time of a training step, s (GaLore, APOLLO: without refreshes)")
    right.legend(fontsize=8)
    for axes in (left, right):
        axes.grid(axis="x", alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


AXES: dict[str, Callable[[Case], int]] = {
    "rank": lambda c: c.rank or 0,
    "hidden size": lambda c: c.shape.hidden,
    "tokens": lambda c: c.batch * c.length,
    "FSDP2 ranks": lambda c: c.shards or 0,
}


def series_of(cases: dict[Case, Measured]) -> dict[str, dict[str, list[Measured]]]:
    """For each axis and method the cases that differ from the base along it, base included, in its order."""
    plain = [c for c in cases if c.shards is None]
    base: dict[str, Any] = {
        name: statistics.mode(AXES[name](c) for c in plain if c.method == "logra")
        for name in AXES
        if name != "FSDP2 ranks"
    }
    series: dict[str, dict[str, list[Measured]]] = {name: defaultdict(list) for name in AXES}
    for name in AXES:
        for case, measured in cases.items():
            others = [o for o in base if o != name and not (o == "rank" and case.rank is None)]
            sharded = (case.shards is not None) == (name == "FSDP2 ranks")
            if sharded and all(AXES[o](case) == base[o] for o in others):
                series[name][case.method].append(measured)
        for found in series[name].values():
            found.sort(key=lambda m: AXES[name](m.case))
    return series


def bytes_per_target_parameter(measured: Measured) -> dict[str, float]:
    """On one rank: what training a weight of attention or MLP takes besides the weight."""
    assert measured.peak is not None
    held = measured.peak["held_bytes"]
    keys = ("target gradients", "target state", "added parameters", "projections")
    return {key: held[key] / measured.peak["target_parameters"] for key in keys}


def sweep_report(data: dict[str, Any], picture: Path) -> str:
    cases = collect(data["measurements"])
    series = series_of(cases)
    text: list[str] = []
    for name, methods in series.items():
        rows = []
        for method, found in methods.items():
            if method == "adamw" and name == "rank":
                continue
            for m in found:
                dense = next((d for d in cases.values() if d.case == _dense(m.case)), None)
                peak = m.peak["peak_bytes"] / MIB if m.peak else float("nan")
                ratios = m.ratios(dense) if dense else []
                rows.append([str(AXES[name](m.case)), m.case.name, f"{peak:.0f}", spread(m.seconds), spread(ratios)])
        text += [markdown([name, "method", "peak, MiB", "step, s", "time to AdamW's"], rows), ""]
    rows = []
    for found in series["FSDP2 ranks"].values():
        for m in found:
            if m.peak:
                values = bytes_per_target_parameter(m)
                parts = [f"{v:.4f}" for v in (*values.values(), sum(values.values()))]
                rows.append([str(m.case.shards), m.case.name, *parts])
    header = ["FSDP2 ranks", "method", "gradients or sketches", "state", "added", "projections", "sum"]
    text += ["Bytes per target parameter on one rank, besides the weight:", "", markdown(header, rows)]
    draw_sweep(series, picture)
    return "\n".join(text)


def _dense(case: Case) -> Case:
    return replace(case, method="adamw", rank=None)


def draw_sweep(series: dict[str, dict[str, list[Measured]]], path: Path) -> None:
    """A column for each axis, memory above and time below."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(2, len(series), figsize=(3.4 * len(series), 6), constrained_layout=True)
    for column, (name, methods) in enumerate(series.items()):
        for method, found in sorted(methods.items()):
            peaks = [m.peak["peak_bytes"] / MIB if m.peak else float("nan") for m in found]
            times = [statistics.median(m.seconds) if m.repeats else float("nan") for m in found]
            for axis, values in zip(axes[:, column], (peaks, times), strict=True):
                if name == "rank" and method == "adamw":
                    axis.axhline(values[0], color="0.5", linestyle="--", label="AdamW")
                else:
                    style = {"color": "0.5"} if method == "adamw" else {"color": "C0"}
                    axis.plot([AXES[name](m.case) for m in found], values, "o-", label=found[0].case.name, **style)
        for axis, label in zip(axes[:, column], ("peak of a rank, MiB", "step, s"), strict=True):
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.set(xlabel=name, ylabel=label if column == 0 else "")
            axis.set_ylim(bottom=0)
            axis.grid(alpha=0.3)
        axes[0, column].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def layer_report(data: dict[str, Any], picture: Path) -> str:
    layers = data["measurements"][-1]["layers"]
    rows = [
        [f"{r['in']} to {r['out']}", str(r["tokens"]), str(r["rank"])]
        + [f"{r['median_ms'][name]:.2f}" for name in ("dense", "frozen", "tapped")]
        + [f"{r['tapped_over_dense']:.2f}", f"{r['ideal']:.2f}"]
        for r in layers
    ]
    header = ["nn.Linear", "tokens", "rank", "dense, ms", "frozen, ms", "LoGRA, ms", "LoGRA / dense", "by operations"]
    draw_layers(layers, picture)
    return markdown(header, rows)


def draw_layers(layers: list[dict[str, Any]], path: Path) -> None:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(9, 4), constrained_layout=True)
    kinds = sorted({(r["rank"], r["tokens"]) for r in layers})
    shapes = list(dict.fromkeys((r["in"], r["out"]) for r in layers))
    width = 0.8 / len(kinds)
    for i, kind in enumerate(kinds):
        chosen = [r for r in layers if (r["rank"], r["tokens"]) == kind]
        x = [shapes.index((r["in"], r["out"])) + width * (i - (len(kinds) - 1) / 2) for r in chosen]
        label = f"rank {kind[0]}, {kind[1]} tokens"
        axes.bar(x, [r["tapped_over_dense"] for r in chosen], width, color=f"C{i}", label=label)
        axes.plot(x, [r["ideal"] for r in chosen], "k_", markersize=14, label="by operations" if i == 0 else None)
    axes.axhline(1, color="0.5", linewidth=1)
    axes.set_xticks(range(len(shapes)), [f"{a} to {b}" for a, b in shapes])
    axes.set(ylabel="LoGRA / dense, forward and backward", xlabel="nn.Linear")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


REPORTS = {"step": step_report, "sweep": sweep_report, "layer": layer_report}


def report(path: Path) -> str:
    """Writes the table and the picture beside a result file; returns the table."""
    data = json.loads(path.read_text())
    text = REPORTS[path.stem](data, path.with_suffix(".png"))
    lines = []
    for i, environment in enumerate(data["environments"]):
        loads = [m["load_average"] for m in data["measurements"] if m["environment"] == i]
        if loads:
            about = f"{len(loads)} of {len(data['measurements'])} measurements: {environment_line(environment)}; load"
            lines.append(f"- {about} average {spread(loads, 1)} after them.")
    text += "\n\n" + "\n".join(lines) + "\n"
    path.with_suffix(".md").write_text(text)
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(report(Path(argument)))
