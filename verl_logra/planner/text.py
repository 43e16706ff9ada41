"""A plan as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_logra.planner.memory import GIB

TITLES = {"adamw": "AdamW", "adam8bit": "8-bit Adam", "lora": "LoRA", "galore": "GaLore", "logra": "LoGRA"}


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([first.strip().ljust(widths[0]), *others]).rstrip())
    return "\n".join(lines)


def size(num_bytes: float) -> str:
    """Decimal units, as networks are sold."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.3g} {unit}"
    return f"{num_bytes / 1e3:.3g} kB"


def heading(plan: dict[str, Any]) -> str:
    model, s = plan["model"], plan["setting"]
    several = f" x {s['num_micro_batches']}" if s["num_micro_batches"] > 1 else ""
    traits = [
        f"{s['ranks']} FSDP2 ranks" if s["ranks"] > 1 else "1 rank",
        f"micro-batch {s['micro_batch']} x {s['seq_len']} tokens{several}",
        "checkpointing" if s["checkpointing"] else "no checkpointing",
        f"rank {s['rank']}",
        f"weights in {8 * s['storage_bytes']} bits, computation in {8 * s['compute_bytes']}",
        f"rest of the model {'frozen' if s['non_target'] == 'frozen' else 'under AdamW'} in LoGRA",
        f"KL control {'on' if s['kl'] else 'off'}",
    ]
    share = model["target_parameters"] / model["parameters"]
    name = f"{model['name']}: {model['parameters'] / 1e9:.2f}B parameters, {share:.0%} of them LoGRA's targets"
    return f"{name}\n{', '.join(traits)}"


def method_table(plan: dict[str, Any]) -> str:
    """GiB per rank at each method's own peak."""
    methods = plan["methods"]
    order = list(dict.fromkeys(name for m in methods.values() for name in m["parts_gib"]))
    rows = [["GiB per rank, at the peak", *(TITLES[m] for m in methods)]]
    for name in order:
        cells = [m["parts_gib"].get(name, 0.0) for m in methods.values()]
        rows.append([name, *(f"{cell:.2f}" if cell else "-" for cell in cells)])
    rows.append(["peak", *(f"{m['peak_gib']:.2f}" for m in methods.values())])
    dense = methods["adamw"]["peak_gib"]
    rows.append(["against AdamW", *(f"{m['peak_gib'] / dense - 1:+.0%}" for m in methods.values())])
    rows.append(["between steps", *(f"{m['resident_gib']:.2f}" for m in methods.values())])
    if plan["device_gib"] is not None:
        rows.append([f"fits {plan['device_gib']:g} GiB", *("yes" if m["fits"] else "no" for m in methods.values())])
        largest = plan["largest_rank"]
        rows.append(["largest rank", *(str(largest[m] or "-") if m in largest else "" for m in methods)])
    where = "\n".join(f"  {TITLES[m]} peaks at: {methods[m]['peak_at']}" for m in methods)
    return f"{columns(rows)}\n{where}"


def moment_table(plan: dict[str, Any], method: str) -> str:
    """The step of one method, moment by moment."""
    rows = [[f"{TITLES[method]}, GiB per rank", ""]]
    rows += [[name, f"{value:.2f}"] for name, value in plan["methods"][method]["moments_gib"].items()]
    return columns(rows)


def sync_table(plan: dict[str, Any]) -> str:
    sync = plan["sync"]
    full = sync["full_bytes"]
    updates = f", {sync['updates']} updates" if sync["updates"] > 1 else ""
    rows = [["weight sync to one replica", "bytes", "of full"]]
    for name, key in (
        ("full, bf16", "full_bytes"),
        (f"sparse delta, {sync['sparse_delta_density']:.1%} of elements", "sparse_delta_bytes"),
        (f"low-rank{updates}", "low_rank_bytes"),
        ("first full of low-rank syncs", "first_bytes"),
    ):
        rows.append([name, size(sync[key]), f"{sync[key] / full:.2%}"])
    note = f"  a replica keeps {sync['receiver_low_half_bytes'] / GIB:.1f} GiB of low halves for low-rank syncs"
    return f"{columns(rows)}\n{note}"


def fits_table(plans: list[dict[str, Any]]) -> str:
    """Peaks of several models; * marks what fits."""
    methods = list(plans[0]["methods"])
    rows = [["peak in GiB per rank, * fits", *(TITLES[m] for m in methods)]]
    for plan in plans:
        cells = [(plan["methods"][m]["peak_gib"], plan["methods"][m]["fits"]) for m in methods]
        rows.append([plan["model"]["name"], *(f"{peak:.1f}{'*' if fits else ' '}" for peak, fits in cells)])
    return columns(rows)
