"""The benchmarks: peak memory and time of one training step, how they grow, and what LoGRA's taps cost a layer.

    bash recipes/bench/run.sh                                               all of it, hours
    bash recipes/bench/run.sh --suites step --methods adamw logra --ranks 64 --repeats 1
    bash recipes/bench/run.sh --suites step --size tiny --ranks 16 --threads 1        minutes, to see that it works

``step`` measures every method at the shape of Qwen2.5-0.5B (random weights), ``sweep`` AdamW and LoGRA over rank,
hidden size, tokens and FSDP2 ranks, ``layer`` one nn.Linear. Every peak and every repeat of a time is a fresh process,
and repeats go round the methods, so that a machine that slows down slows all of them. ``<suite>.json`` has every
measurement with hardware, versions and commit, ``<suite>.md`` and ``<suite>.png`` are made from it by
``recipes.bench.report``. What is measured already is not measured again: interrupt and call again as you like. Each
measurement says which of the file's environments it was taken in.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from recipes.bench.case import METHODS, PEAK_ENVIRONMENT, PROFILED, SHAPES, WITHOUT_RANK, Case, step_seconds
from recipes.bench.report import report

ROOT = Path(__file__).parents[2]
MEASURED = ("verl_logra", "recipes/bench/*.py", "recipes/baselines", "recipes/common/optimizer_memory.py")
"""What can change a number."""
MODULES = {
    "adam8bit": "torchao",
    "galore": "galore_torch",
    "flora": "flora_opt",
    "apollo": "apollo_torch",
    "lora": "peft",
}
"""Method -> module it needs from the extra ``bench``."""
PACKAGES = ("torch", "transformers", "verl-logra", "galore-torch", "flora-opt", "apollo-torch", "torchao", "peft")
SUITES = ("step", "sweep", "layer")
SWEEP_RANK = 64


def step_cases(methods: list[str], ranks: list[int], **settings: Any) -> list[Case]:
    """Every method, at every rank if it has one."""
    return [
        Case(method=method, rank=rank, **settings)
        for method in methods
        for rank in ((None,) if method in WITHOUT_RANK else ranks)
    ]


def sweep_cases(threads: int) -> list[Case]:
    """AdamW and LoGRA, one of rank, hidden size, tokens and shards varied at a time."""
    base = Case(method="logra", rank=SWEEP_RANK, shape=SHAPES["sweep"], threads=threads)
    cases = [replace(base, rank=rank) for rank in (16, 64, 256)]
    for hidden in (256, 512, 1024):
        shape = replace(base.shape, hidden=hidden, intermediate=4 * hidden, heads=hidden // 64)
        cases.append(replace(base, shape=shape))
    cases += [replace(base, length=length) for length in (64, 256, 1024)]
    cases += [replace(base, shards=shards, threads=1) for shards in (1, 2, 4)]
    both = [case for logra in cases for case in (logra, replace(logra, method="adamw", rank=None))]
    return list(dict.fromkeys(both))


def environment() -> dict[str, Any]:
    """Hardware, versions and commit."""

    def output(*command: str) -> str:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    def installed(package: str) -> str | None:
        try:
            return version(package)
        except PackageNotFoundError:
            return None

    cpu = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), ""
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "packages": {package: installed(package) for package in PACKAGES},
        "commit": output("git", "rev-parse", "HEAD"),
        "changed_files": output("git", "status", "--porcelain", "--untracked-files=all", "--", *MEASURED),
    }


def missing_modules(methods: list[str]) -> list[str]:
    """What the methods import and this environment lacks."""
    return sorted(m for m in {MODULES.get(method, "torch") for method in methods} if find_spec(m) is None)


class Results:
    """``<suite>.json``, rewritten after every measurement."""

    def __init__(self, folder: Path, suite: str, environment: dict[str, Any]) -> None:
        self.path = folder / f"{suite}.json"
        self.environments: list[dict[str, Any]] = []
        self.measurements: list[dict[str, Any]] = []
        if self.path.exists():
            data = json.loads(self.path.read_text())
            self.environments, self.measurements = data["environments"], data["measurements"]
        if environment not in self.environments:
            self.environments.append(environment)
        self.environment = self.environments.index(environment)

    def has(self, kind: str, case: Case, repeat: int) -> bool:
        key = kind, json.loads(json.dumps(asdict(case))), repeat
        return any((m["kind"], m["case"], m["repeat"]) == key for m in self.measurements)

    def add(self, kind: str, repeat: int, result: dict[str, Any]) -> None:
        about = {"kind": kind, "repeat": repeat, "environment": self.environment, "load_average": os.getloadavg()[0]}
        self.measurements.append({**about, **result})
        data = {"environments": self.environments, "measurements": self.measurements}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.replace(self.path)


def run_process(arguments: list[str], prefix: list[str], **variables: str) -> dict[str, Any]:
    """The JSON that a fresh Python process prints on its last line.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    command = [*prefix, sys.executable, "-W", "ignore", "-m", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_cases(results: Results, cases: list[Case], kinds: list[tuple[str, int]], prefix: list[str]) -> bool:
    """All kinds of all cases that are not there yet, round-robin; False if one failed."""
    succeeded = True
    for kind, repeat in kinds:
        for case in cases:
            profile = case.method in PROFILED and kind == "time" and repeat == 0
            case = replace(case, steps=1 if kind == "peak" else case.steps, profile=profile)
            if results.has(kind, case, repeat):
                continue
            start = time.monotonic()
            variables = {**(PEAK_ENVIRONMENT if kind == "peak" else {}), "OMP_NUM_THREADS": str(case.threads)}
            try:
                arguments = ["recipes.bench.measure", json.dumps(asdict(case))]
                result = run_process(arguments, prefix, **variables)
            except RuntimeError as error:
                print(f"{case.name}: failed: {error}", file=sys.stderr, flush=True)
                succeeded = False
                continue
            results.add(kind, repeat, result)
            seconds = sorted(step_seconds(s) for s in result["seconds"])
            value = (
                f"{result['peak_bytes'] / 2**30:.2f} GiB" if kind == "peak" else f"{seconds[len(seconds) // 2]:.2f} s"
            )
            name = f"{case.name}, hidden {case.shape.hidden}, {case.batch * case.length} tokens"
            name += f", {case.shards} shards" if case.shards else ""
            print(f"{kind} {repeat}: {name}: {value} (took {time.monotonic() - start:.0f} s)", flush=True)
    return succeeded


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="recipes/bench/run.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="of the suite step")
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256], help="of the suite step")
    parser.add_argument("--size", choices=SHAPES, default="qwen2.5-0.5b", help="of the suite step")
    parser.add_argument("--batch", type=int, default=2, help="sequences, of the suite step")
    parser.add_argument("--length", type=int, default=256, help="tokens of each, of the suite step")
    parser.add_argument("--repeats", type=int, default=3, help="processes that take the time of a case")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of a process")
    parser.add_argument("--kinds", nargs="+", choices=("peak", "time"), default=["peak", "time"])
    parser.add_argument("--out", type=Path, default=ROOT / "outputs" / "bench")
    parser.add_argument("--prefix", default="", help="command in front of every measured process, as 'numactl -N 0'")
    a = parser.parse_args(argv)
    missing = missing_modules(a.methods) if "step" in a.suites else []
    if missing:
        install = shlex.join(["uv", "pip", "install", "--python", sys.executable, "-e", f"{ROOT}[bench]"])
        parser.error(
            f"not installed: {', '.join(missing)}. `{install}` (or without VENV=..., run.sh itself) installs them; "
            f"--methods chooses others"
        )
    a.out.mkdir(parents=True, exist_ok=True)
    here = environment()
    prefix, succeeded = shlex.split(a.prefix), True
    kinds = [("peak", 0)] * ("peak" in a.kinds) + [("time", i) for i in range(a.repeats)] * ("time" in a.kinds)

    for suite in a.suites:
        results = Results(a.out, suite, here)
        if suite == "layer":
            if not results.measurements:
                results.add(
                    "layer",
                    0,
                    run_process(["recipes.bench.layer", str(a.repeats)], prefix, OMP_NUM_THREADS=str(a.threads)),
                )
        else:
            cases = sweep_cases(a.threads)
            if suite == "step":
                settings = {"shape": SHAPES[a.size], "batch": a.batch, "length": a.length, "threads": a.threads}
                cases = step_cases(a.methods, a.ranks, **settings)
            succeeded &= measure_cases(results, cases, kinds, prefix)
        print(report(results.path))
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
