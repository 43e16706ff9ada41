"""Measures one case in this process alone and prints it as one line of JSON.

    python -m recipes.bench.measure '{"method": "logra", "rank": 64}'     (keys: ``Case``)

**Peak memory** is the largest resident set during forward, backward, clipping and optimizer of any step, the first one
included, minus the resident set before the model was built, so that Python and its libraries do not count. Building
the model, and what this file does between the phases, is not part of it. With several ranks it is the peak of the rank
that has the highest. ``recipes.bench.run`` starts the processes whose peak is read with a fixed malloc threshold
(``PEAK_ENVIRONMENT``), with which freed tensors go back to the system at once; by default glibc keeps them, and the
resident set says little. That costs page faults, so time is taken in processes without it.

**Bytes** of weights, gradients, optimizer state, update parameters and held projections are counted exactly.

**Time** is wall time of forward, backward, clipping and optimizer. For LoGRA the optimizer's parts are timed as well;
``projections`` are drawn and unpacked inside of forward, backward and the other parts.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.profiler import ProfilerActivity, profile, record_function

from recipes.bench.case import PEAK_ENVIRONMENT, PHASES, SHAPES, Case, case_of
from recipes.bench.methods import build_model, build_optimizers
from recipes.common.optimizer_memory import num_bytes


def resident_bytes(key: str = "VmRSS") -> int:
    """Resident set of this process: ``VmRSS`` now, ``VmHWM`` its largest since ``reset_peak``."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: the benchmark needs Linux")


def reset_peak() -> None:
    """Makes the largest resident set the present one."""
    Path("/proc/self/clear_refs").write_text("5")


class Stopwatch:
    """Seconds by name; regions may nest, and show in a torch profile."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            with record_function(name):
                yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Times every call of a method of an object or a class."""
        function = getattr(owner, method)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return function(*args, **kwargs)

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        seconds, self.seconds = dict(self.seconds), defaultdict(float)
        return seconds


def watch_parts(optimizer: Optimizer, stopwatch: Stopwatch) -> None:
    """The parts of a LoGRA step; nothing for another optimizer."""
    from verl_logra import LoGRA
    from verl_logra.probe import Probe
    from verl_logra.sketch import Target

    if not isinstance(optimizer, LoGRA):
        return
    stopwatch.watch(optimizer, "propose", "propose")
    stopwatch.watch(optimizer, "commit", "commit")
    stopwatch.watch(Target, "unscaled_projection", "projections")
    stopwatch.watch(Probe, "predict", "predict")
    stopwatch.watch(Probe, "remember", "verify")
    stopwatch.watch(Probe, "kl_since_remembered", "verify")
    if optimizer._adamw is not None:
        stopwatch.watch(optimizer._adamw, "step", "adamw of the rest")


def log_likelihood_loss(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean over all tokens but the first."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def held_bytes(model: nn.Module, optimizers: list[Optimizer]) -> dict[str, int]:
    """Exact bytes on this rank by category, to be read between backward and the optimizer's step.

    ``target`` is about the weights of attention and MLP or what stands in for them (LoGRA's update parameters, whose
    gradients are the sketches; LoRA's adapters), ``rest`` about every other parameter.
    """
    from verl_logra.sketch import UPDATE, taps_of

    named = dict(model.named_parameters())
    added = {n: p for n, p in named.items() if n.endswith(f".{UPDATE}") or ".lora_" in n}
    target = list(added.values()) or [p for n, p in named.items() if n.endswith("_proj.weight")]
    rest = [p for n, p in named.items() if n not in added and not any(p is t for t in target)]
    taps = taps_of(model)

    def gradients(parameters: list[nn.Parameter]) -> int:
        return num_bytes(p.grad for p in parameters if p.grad is not None)

    def states(parameters: list[nn.Parameter]) -> int:
        return num_bytes(o.state[p] for p in parameters for o in optimizers if p in o.state)

    return {
        "weights": num_bytes(p for n, p in named.items() if n not in added),
        "added parameters": num_bytes(added.values()),
        "target gradients": gradients(target),
        "target state": states(target),
        "rest gradients": gradients(rest),
        "rest state": states(rest),
        "projections": num_bytes(t._words for t in taps.targets.values()) if taps else 0,
    }


def target_parameters(model: nn.Module) -> int:
    """Elements of the weights of attention and MLP, whole."""
    return sum(p.numel() for n, p in model.named_parameters() if n.endswith("_proj.weight"))


class Trainer:
    """A model, its optimizers and a batch."""

    def __init__(self, case: Case) -> None:
        self.model = build_model(case)
        self.num_targets = target_parameters(self.model)
        self.optimizers = build_optimizers(self.model, case)
        self.stopwatch = Stopwatch()
        generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
        size = case.batch, case.length
        self.ids = torch.randint(0, case.shape.vocabulary, size, generator=generator)
        self._probe: Callable[[], None] = lambda: None
        if case.method == "logra-kl":
            self._control()

    def _control(self) -> None:
        """The step controller, with the batch's first two sequences as its probe, all of whose tokens but a prompt of a
        quarter are a response."""
        from verl_logra.controller import KLController
        from verl_logra.probe import Probe, ProbeSequence

        optimizer: Any = self.optimizers[0]
        controller = KLController(optimizer, optimizer.config.kl)
        response = torch.arange(self.ids.shape[1]) >= self.ids.shape[1] // 4
        sequences = [ProbeSequence(ids, response) for ids in self.ids[:2]]

        def set_probe() -> None:
            controller.probe = Probe(self.model, sequences)

        self._probe = set_probe

    def step(self) -> dict[str, Any]:
        """One training step: seconds by phase and part, peak resident bytes by phase, bytes held, the loss."""
        peaks = {}
        self.stopwatch.take()

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            reset_peak()
            with self.stopwatch(name):
                yield
            peaks[name] = resident_bytes("VmHWM")

        with phase("forward"):
            loss = log_likelihood_loss(self.model, self.ids)
        with phase("backward"):
            loss.backward()
        with phase("clip"):
            trained = [p for p in self.model.parameters() if p.grad is not None]
            norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        held = held_bytes(self.model, self.optimizers)
        self._probe()
        with phase("optimizer"):
            for optimizer in self.optimizers:
                optimizer.step()
        for parameter in trained:
            parameter.grad = None
        seconds = self.stopwatch.take()
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return {
            "seconds": seconds,
            "peak_bytes": peaks,
            "held_bytes": held,
            "loss": float(loss.detach()),
            "gradient_norm": float(norm),
        }


def profiled_step(trainer: Trainer, num_operators: int = 12) -> dict[str, Any]:
    """The operators that took most of one step, with their own CPU time in milliseconds (of all threads) and calls."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step = trainer.step()
    events = sorted(profiler.key_averages(), key=lambda e: e.self_cpu_time_total, reverse=True)
    operators = [e for e in events if "::" in e.key][:num_operators]
    return {
        "seconds": step["seconds"],
        "operators": [
            {"name": e.key, "calls": e.count, "self_ms": round(e.self_cpu_time_total / 1e3, 2)} for e in operators
        ],
    }


def measure(case: Case) -> dict[str, Any]:
    """One warm-up step (in which state is made and GaLore and APOLLO compute their first projections), then
    ``case.steps`` measured ones."""
    torch.set_num_threads(case.threads)
    # A tiny model first, so that imports, thread pools and the allocator's own structures are there already.
    Trainer(replace(case, shape=SHAPES["tiny"], rank=case.rank and 8, length=32)).step()
    gc.collect()
    before = resident_bytes()
    reset_peak()
    trainer = Trainer(case)
    watch_parts(trainer.optimizers[0], trainer.stopwatch)
    warmup, *steps = [trainer.step() for _ in range(1 + case.steps)]
    every = [warmup, *steps]
    return {
        "case": asdict(case),
        "malloc_fixed": all(os.environ.get(k) == v for k, v in PEAK_ENVIRONMENT.items()),
        "base_bytes": before,
        "peak_bytes": max(max(s["peak_bytes"].values()) for s in every) - before,
        "peak_bytes_by_phase": {p: max(s["peak_bytes"][p] for s in every) - before for p in PHASES},
        "held_bytes": steps[-1]["held_bytes"],
        "target_parameters": trainer.num_targets,
        "warmup_seconds": warmup["seconds"],
        "seconds": [s["seconds"] for s in steps],
        "losses": [s["loss"] for s in every],
        "gradient_norm": steps[-1]["gradient_norm"],
        "page_faults": resource.getrusage(resource.RUSAGE_SELF).ru_minflt,
        "profile": profiled_step(trainer) if case.profile else None,
    }


def _measure_rank(rank: int, case: Case, folder: str) -> None:
    assert case.shards is not None
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.shards)
    result = measure(case)
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure_sharded(case: Case) -> dict[str, Any]:
    """The rank with the highest peak; ranks of FSDP2 are fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_measure_rank, (case, folder), nprocs=case.shards)
        results = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.shards or 1)]
    return max(results, key=lambda r: r["peak_bytes"])


def main(argv: list[str]) -> None:
    case = case_of(json.loads(argv[0]))
    print(json.dumps(measure(case) if case.shards is None else measure_sharded(case)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
