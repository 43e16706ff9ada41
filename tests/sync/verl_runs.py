"""What a run of ``verl_runs.sh`` showed: one line, exit code 1 if it is not what a working sync gives.

    python tests/sync/verl_runs.py RUN [OTHER] --steps 60

One run: its steps, its syncs, which of them were verified. Two: whether their rewards are equal step by step.
"""

import argparse
import json
import re
import statistics
import sys
from pathlib import Path

SYNC = re.compile(r"(low-rank|full) weight sync[^\n]*? verified at step \S+: 0 bytes differ in (\d+) elements")
SECONDS = re.compile(
    r"low-rank weight sync[^\n]*?it took ([\d.]+) s \(([^)]*)\), a full sync by verl alone ([\d.]+) s \(([^)]*)\)"
)
PART = re.compile(r"([a-z ]+) ([\d.]+)")
REWARD = "critic/score/mean"


def rewards(run):
    steps = [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [step[REWARD] for step in steps if REWARD in step]


def medians_of_parts(texts):
    """Of texts like "wait 0.012, update 0.345"."""
    seconds = {}
    for text in texts:
        for name, value in PART.findall(text):
            seconds.setdefault(name.strip(), []).append(float(value))
    return ", ".join(f"{name} {1000 * statistics.median(values):.0f}" for name, values in seconds.items())


def report_one(run, num_steps):
    log = (run / "train.log").read_text(errors="replace")
    kinds = [kind for kind, _ in SYNC.findall(log)]
    wrong = "computes with other weights" in log
    scores, code = rewards(run), json.loads((run / "run.json").read_text())["exit_code"]
    parts = [f"{run.name}: exit {code}, {len(scores)} steps"]
    if scores:
        parts.append(f"mean reward {statistics.mean(scores[-10:]):.4f} at the end")
    found = SECONDS.findall(log)
    times = [(float(low_rank), float(full)) for low_rank, _, full, _ in found]
    if kinds:
        parts.append(f"{len(kinds)} syncs verified, {kinds.count('low-rank')} of them low-rank")
        parts.append("BYTES DIFFER" if wrong else "0 bytes differ")
    if times:
        low_rank, full = (statistics.median(seconds) for seconds in zip(*times, strict=True))
        parts.append(f"median seconds {low_rank:.3f} low-rank, {full:.3f} full")
        parts.append(f"median of their ratios {statistics.median(a / b for a, b in times):.2f}")
    print(", ".join(parts), flush=True)
    for kind, texts in (("low-rank", [t for _, t, _, _ in found]), ("full", [t for _, _, _, t in found])):
        if medians := medians_of_parts(texts):
            print(f"  median ms of the worker in a {kind} sync: {medians}", flush=True)
    return code == 0 and len(scores) >= num_steps and not wrong


def report_two(run, other):
    pairs = list(zip(rewards(run), rewards(other), strict=True))
    equal = sum(a == b for a, b in pairs)
    first = next((f", first difference at step {i}" for i, (a, b) in enumerate(pairs, 1) if a != b), "")
    print(f"{run.name} and {other.name}: rewards equal in {equal} of {len(pairs)} steps{first}", flush=True)
    return equal == len(pairs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()
    runs = arguments.runs
    sys.exit(not (report_one(runs[0], arguments.steps) if len(runs) == 1 else report_two(*runs)))
