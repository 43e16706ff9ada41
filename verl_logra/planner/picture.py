"""A plan as a picture: what every method holds at its own peak, and the device's memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl_logra.planner.text import TITLES

COLOURS = {
    "weights": "#4e79a7",
    "update factors": "#f1ce63",
    "adapters": "#f1ce63",
    "projections": "#b6992d",
    "sketches": "#ffbe7d",
    "optimizer state": "#e15759",
    "optimizer temporaries": "#ff9d9a",
    "gradients": "#f28e2b",
    "unsharded gradients": "#d7b5a6",
    "gathered layers": "#a0cbe8",
    "activations": "#59a14f",
    "logits": "#8cd17d",
    "probe": "#b07aa1",
    "sync buffers": "#9d7660",
    "critic": "#79706e",
    "rollout": "#bab0ac",
    "receiver's low halves": "#d4a6c8",
}


def draw(plan: dict[str, Any], path: Path) -> None:
    """Stacked bars of ``Plan.as_dict()``, GiB per rank.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--picture needs matplotlib: pip install matplotlib") from None
    methods, setting = plan["methods"], plan["setting"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    bottoms = [0.0] * len(methods)
    for part, colour in COLOURS.items():
        heights = [m["parts_gib"].get(part, 0.0) for m in methods.values()]
        if not any(heights):
            continue
        axes.bar(range(len(methods)), heights, 0.6, bottom=bottoms, label=part, color=colour)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    for i, top in enumerate(bottoms):
        axes.annotate(f"{top:.1f}", (i, top), (0, 3), textcoords="offset points", ha="center", weight="bold")
    limit = plan["device_gib"]
    if limit is not None:
        axes.axhline(limit, color="black", linestyle="--", linewidth=1)
        axes.annotate(
            f"device: {limit:g} GiB", (len(methods) - 0.6, limit), (0, 3), textcoords="offset points", ha="right"
        )
    axes.set_ylim(0, 1.1 * max([*bottoms, limit or 0.0]))
    axes.set_xticks(range(len(methods)), [TITLES[m] for m in methods])
    axes.set_ylabel("GiB per rank, at the peak of a step")
    axes.set_title(
        f"{plan['model']['name']}, {setting['ranks']} ranks, {setting['micro_batch']} x {setting['seq_len']} tokens, "
        f"rank {setting['rank']}",
        fontsize=11,
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right center", frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
