"""The table and the picture at the end of a recipe; also compares several runs.

    python -m recipes.common.report outputs/quickstart-logra [outputs/quickstart-adamw ...]

Reads ``metrics.jsonl``, ``run.json`` and hydra's ``config.yaml`` of each run; writes ``summary.json`` into each and
``curves.png`` into the first.
"""

import argparse
import json
import math
from collections import Counter
from operator import itemgetter
from pathlib import Path
from statistics import mean, median
from typing import Any

from safetensors import safe_open

from recipes.common.metrics import held_out_accuracy, read_metrics


def num_parameters(model_dir: Path) -> int:
    """Parameters in a model folder's safetensors; tied ones are stored, and counted, once."""
    total = 0
    for path in model_dir.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            total += sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118 (not a dict)
    return total


def optimizer_memory(run: Path) -> list[dict[str, int]]:
    """What each optimizer of a run held, its ranks added up, in the order of first steps: the actor's is the last."""
    found: dict[int, dict[str, int]] = {}
    for path in sorted((run / "optimizer_memory").glob("*.json")):
        total = found.setdefault(int(path.name.partition("-")[0]), Counter())
        total.update({name: value for name, value in json.loads(path.read_text()).items() if name != "optimizer"})
    return [dict(found[order]) for order in sorted(found)]


def summarize(
    records: list[dict[str, Any]],
    run: dict[str, Any],
    *,
    config: dict[str, Any],
    parameters: int,
    memory: dict[str, int] | None,
) -> dict[str, Any]:
    """What a run did, as plain numbers; memory and state in bytes, times in seconds."""
    steps = [r["data"] for r in records if "critic/score/mean" in r["data"]]
    accuracies = [a for a in (held_out_accuracy(r["data"]) for r in records) if a is not None]
    actor = config["actor_rollout_ref"]["actor"]
    ranks = config["trainer"]["n_gpus_per_node"]
    lora_rank = config["actor_rollout_ref"]["model"].get("lora_rank", 0)
    return {
        "optimizer": f"LoRA rank {lora_rank}" if lora_rank else actor["optim"]["optimizer"],
        "optimizer_settings": actor["optim"]["override_optimizer_config"],
        "learning_rate": actor["optim"]["lr"],
        "seed": config["data"]["seed"],
        "ranks": ranks,
        "steps": len(steps),
        "accuracy_before": accuracies[0] if accuracies else None,
        "accuracy_after": accuracies[-1] if accuracies else None,
        "reward_first_steps": mean(s["critic/score/mean"] for s in steps[:5]),
        "reward_last_steps": mean(s["critic/score/mean"] for s in steps[-5:]),
        "seconds_per_step": median(s["timing_s/step"] for s in steps),
        "wall_seconds": run["wall_seconds"],
        "peak_memory_bytes": run["peak_memory_bytes"],
        "trainer_peak_memory_bytes": round(max(s["actor/perf/max_memory_allocated_gb"] for s in steps) * 2**30),
        "parameters": parameters,
        # None for a run of a single update: they are measured in the second.
        "optimizer_state_bytes": memory and memory["state_bytes"],
        "gradient_bytes": memory and memory["gradient_bytes"],
        "added_parameter_bytes": memory and memory["added_parameter_bytes"],
    }


def size(num_bytes: float | None) -> str:
    """Bytes in the largest unit that leaves a number above one; a dash for what was not measured."""
    if num_bytes is None:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} GiB"


def percent(share: float | None) -> str:
    """A dash for what was not measured: a run may validate nothing."""
    return "-" if share is None else f"{share:.1%}"


def table(summaries: dict[str, dict[str, Any]]) -> str:
    """One column per run."""
    rows = [("", list(summaries))]
    for label, show in (
        ("optimizer", lambda s: f"{s['optimizer']}, lr {s['learning_rate']:g}"),
        ("steps, ranks, seed", lambda s: f"{s['steps']}, {s['ranks']}, {s['seed']}"),
        ("held-out accuracy before", lambda s: percent(s["accuracy_before"])),
        ("held-out accuracy after", lambda s: percent(s["accuracy_after"])),
        ("reward, first 5 steps", lambda s: f"{s['reward_first_steps']:.3f}"),
        ("reward, last 5 steps", lambda s: f"{s['reward_last_steps']:.3f}"),
        ("seconds per step", lambda s: f"{s['seconds_per_step']:.1f}"),
        ("wall time", lambda s: f"{s['wall_seconds']:.0f} s"),
        ("peak memory, all processes", lambda s: size(s["peak_memory_bytes"])),
        ("peak memory, trainer", lambda s: size(s["trainer_peak_memory_bytes"])),
        ("parameters", lambda s: f"{s['parameters']:,}"),
        ("optimizer state", lambda s: size(s["optimizer_state_bytes"])),
        ("gradients", lambda s: size(s["gradient_bytes"])),
        ("parameters it adds", lambda s: size(s["added_parameter_bytes"])),
    ):
        rows.append((label, [show(s) for s in summaries.values()]))
    widths = [max(len(row[1][column]) for row in rows) for column in range(len(summaries))]
    return "\n".join(
        f"  {label:<28}" + "  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    )


def predicted_as_applied(data: dict[str, float]) -> float:
    """KL predicted for the scaled update: verl's metric has that of the whole one, in nats per token."""
    return data["actor/logra_alpha"] ** 2 * data["actor/logra_predicted_kl"]


CONTROL_CURVES = {
    "actor/logra_kl_budget": ("budget", ":"),
    "actor/logra_predicted_kl": ("predicted", "--"),
    "actor/logra_realized_kl": ("realised", "-"),
}


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Sampled reward and held-out accuracy on the left; on the right the gradient norm, or, where the step controller
    was on, the KL of every update."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    steps = {name: [r for r in records if "critic/score/mean" in r["data"]] for name, records in runs.items()}
    controlled = any("actor/logra_realized_kl" in r["data"] for records in steps.values() for r in records)
    curves = CONTROL_CURVES if controlled else {"actor/grad_norm": ("gradient norm", "-")}
    for color, (name, records) in enumerate(runs.items()):
        x, reward = zip(*((r["step"], r["data"]["critic/score/mean"]) for r in steps[name]), strict=True)
        left.plot(x, reward, color=f"C{color}", alpha=0.4, label=f"{name}: reward")
        held_out = [(r["step"], held_out_accuracy(r["data"])) for r in records]
        held_out = [(step, value) for step, value in held_out if value is not None]
        if held_out:
            left.plot(*zip(*held_out, strict=True), "o-", color=f"C{color}", label=f"{name}: held-out accuracy")
        for metric, (label, style) in curves.items():
            value = predicted_as_applied if label == "predicted" else itemgetter(metric)
            points = [(r["step"], value(r["data"])) for r in steps[name] if metric in r["data"]]
            if points:
                right.plot(*zip(*points, strict=True), style, color=f"C{color}", label=f"{name}: {label}")
    left.set(title="Answers that are right", xlabel="step", ylim=(0, 1.02))
    if controlled:
        right.set(title="KL of one update", xlabel="step", ylabel="nats per token", yscale="log")
    else:
        right.set(title="Gradient norm before clipping", xlabel="step", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def report(folders: list[Path]) -> None:
    """Write the summaries and the picture, print the table."""
    import yaml

    records = {folder.name: read_metrics(folder) for folder in folders}
    summaries = {}
    for folder in folders:
        config = yaml.safe_load((folder / "hydra/.hydra/config.yaml").read_text())
        summaries[folder.name] = summarize(
            records[folder.name],
            json.loads((folder / "run.json").read_text()),
            config=config,
            parameters=num_parameters(Path(config["actor_rollout_ref"]["model"]["path"])),
            memory=next(reversed(optimizer_memory(folder)), None),
        )
        (folder / "summary.json").write_text(json.dumps(summaries[folder.name], indent=2) + "\n")
    draw(records, folders[0] / "curves.png")
    print(table(summaries))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="folder of a run, such as outputs/NAME")
    report(parser.parse_args().runs)
