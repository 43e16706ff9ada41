"""Runs verl's training command, shows its progress, and ends it whatever happens.

    python -m recipes.common.launch --out DIR --steps 40 [--resume] --  python -m verl.trainer.main_ppo ...

DIR gets ``train.log`` (everything the run prints), ``metrics.jsonl`` (verl's file logger: one JSON object per step) and
``run.json`` (wall time in seconds, peak memory in bytes, exit code). A vLLM worker that hits an error can leave verl
waiting for ever, so a run that writes no metrics for ``--stall-limit`` seconds is stopped and its last errors shown.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from recipes.common.metrics import EARLIER, METRICS, held_out_accuracy

RUN_MARK = "VERL_LOGRA_RUN"
"""Environment variable that every process of one run inherits, and no process of another run has."""
MEMORY_PERIOD = 5.0
SIGNS_OF_LIFE = 15.0
"""Seconds between two memory samples, and between two progress lines while verl starts."""


def processes_of_run(mark: str) -> list[psutil.Process]:
    """Every process that inherited this run's mark, this one excepted; Ray detaches some from their parents."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(RUN_MARK) == mark:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue  # ended meanwhile, or another user's: not ours
    return found


def proportional_memory(processes: list[psutil.Process]) -> int:
    """Bytes that the processes use together; pages they share are counted once."""
    total = 0
    for process in processes:
        try:
            total += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return total


def stop(mark: str) -> None:
    """End every process of the run: ask first, insist after ten seconds."""
    running = processes_of_run(mark)
    for process in running:
        _signal(process, signal.SIGTERM)
    _, alive = psutil.wait_procs(running, timeout=10)
    for process in {*alive, *processes_of_run(mark)}:
        _signal(process, signal.SIGKILL)


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself
        process.send_signal(number)


def new_records(path: Path, position: int) -> tuple[list[dict[str, Any]], int]:
    """Complete lines of a JSON-lines file after ``position``, and the position behind them."""
    if not path.exists():
        return [], position
    with path.open("rb") as file:
        file.seek(position)
        block = file.read()
    block = block[: block.rfind(b"\n") + 1]
    return [json.loads(line) for line in block.splitlines()], position + len(block)


def progress_line(record: dict[str, Any], num_steps: int, elapsed: float) -> str:
    """What a person wants to see of one step."""
    data, held_out = record["data"], held_out_accuracy(record["data"])
    parts = [f"step {record['step']:3d}/{num_steps}"]
    if "critic/score/mean" in data:
        parts.append(f"reward {data['critic/score/mean']:.3f}")
    if held_out is not None:
        parts.append(f"held-out accuracy {held_out:.3f}")
    if "timing_s/step" in data:
        parts.append(f"{data['timing_s/step']:.1f} s/step")
    return "  ".join([*parts, f"({elapsed:.0f} s)"])


def last_errors(log: Path, count: int = 5) -> list[str]:
    """The last distinct lines of the log that look like the name and text of an exception."""
    seen: dict[str, None] = {}
    for line in log.read_text(errors="replace").splitlines():
        match = re.search(r"\b[A-Z]\w*(?:Error|Exception)\b: .*", line)
        if match:
            seen.pop(match.group(), None)
            seen[match.group()] = None
    return list(seen)[-count:]


def ticks(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Yields about twice a second while the process runs, and once after."""
    while process.poll() is None:
        yield
        time.sleep(0.5)
    yield


def set_earlier_part_aside(out: Path) -> dict[str, Any]:
    """Keep the records of the part that is resumed; returns its ``run.json``, in which earlier parts are counted."""
    metrics, earlier = out / METRICS, out / EARLIER
    if metrics.exists():
        complete, _ = new_records(metrics, 0)  # a part that was killed may end in half a line
        with earlier.open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in complete)
        metrics.unlink()
    path = out / "run.json"
    return json.loads(path.read_text()) if path.exists() else {}


def run(
    command: list[str], *, out: Path, num_steps: int, stall_limit: float, time_limit: float, resume: bool = False
) -> int:
    """Run ``command`` to its end or to a limit; returns its exit code, 124 if it was stopped."""
    mark = uuid.uuid4().hex
    metrics, log = out / METRICS, out / "train.log"
    before = set_earlier_part_aside(out) if resume else {}
    environment = {**os.environ, RUN_MARK: mark, "VERL_FILE_LOGGER_PATH": str(metrics)}
    start = last_news = last_line = time.monotonic()
    last_sample = 0.0
    position, peak_memory, stopped_because = 0, 0, None
    print(f"  everything verl prints goes to {log}", flush=True)
    with log.open("wb") as log_file:
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=log_file, stderr=log_file)
    try:
        for _ in ticks(process):
            now = time.monotonic()
            records, position = new_records(metrics, position)
            for record in records:
                print("  " + progress_line(record, num_steps, now - start), flush=True)
                last_news = last_line = now
            if position == 0 and now - last_line > SIGNS_OF_LIFE:
                print(f"  starting verl, Ray and vLLM ... {now - start:.0f} s", flush=True)
                last_line = now
            if now - last_sample > MEMORY_PERIOD:
                peak_memory = max(peak_memory, proportional_memory(processes_of_run(mark)))
                last_sample = now
            if now - last_news > stall_limit:
                stopped_because = f"no step was finished for {stall_limit:.0f} s (STALL_LIMIT sets the bound)"
            elif now - start > time_limit:
                stopped_because = f"it was not done after {time_limit:.0f} s (TIME_LIMIT sets the bound)"
            if stopped_because:
                break
    finally:
        stop(mark)
    code = 124 if stopped_because else process.wait()
    summary = {
        "wall_seconds": before.get("wall_seconds", 0.0) + time.monotonic() - start,
        "peak_memory_bytes": max(before.get("peak_memory_bytes", 0), peak_memory),
        "exit_code": code,
    }
    (out / "run.json").write_text(json.dumps(summary) + "\n")
    if code:
        reason = stopped_because or f"exit code {code}"
        print(f"error: the run failed: {reason}. Last errors in {log}:", file=sys.stderr)
        print("\n".join(f"  {line}" for line in last_errors(log)) or "  (none)", file=sys.stderr)
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", action="store_true", help="DIR has earlier parts of this run: add to them")
    parser.add_argument("--stall-limit", type=float, default=300)
    parser.add_argument("--time-limit", type=float, default=3600)
    parser.add_argument("command", nargs="+")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` runs
    sys.exit(
        run(
            arguments.command,
            out=arguments.out,
            num_steps=arguments.steps,
            stall_limit=arguments.stall_limit,
            time_limit=arguments.time_limit,
            resume=arguments.resume,
        )
    )
