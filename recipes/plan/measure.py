"""Measures what one training step allocates on a CPU, in this process alone: the truth the planner is compared with.

    python -m recipes.plan.measure '{"method": "logra", "rank": 64, "ranks": 2, ...}'     (keys: ``Case``)

Method: torch's profiler records every allocation and release of the CPU allocator from before the model is built,
inside of kernels too. The running sum of their bytes is the number of live bytes; its maximum is the peak. It is what
``torch.cuda.max_memory_allocated`` reports on a GPU, and unlike the resident set of a process it has no malloc
fragmentation, no libraries and no thread stacks in it. What it does not see is scratch that oneDNN, gloo and OpenMP
allocate behind torch's back.

The step is the one verl's FSDP2 engine runs: decoder layers, untied embedding and head, and the root under
``fully_shard`` in fp32 storage, gradients reduced in fp32, non-reentrant checkpointing of decoder layers,
log-probabilities row by row, gradient clipping, optimizer. The second step is measured, when all state exists.
"""

from __future__ import annotations

import ctypes
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import ProfilerActivity, profile, record_function

PHASES = ("forward_backward", "step")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured step."""

    config: dict[str, Any]
    """Of a Hugging Face model, ``model_type`` included."""
    method: str
    """adamw, lora or logra."""
    rank: int = 64
    ranks: int = 1
    seq_len: int = 256
    micro_batch: int = 1
    num_micro_batches: int = 1
    checkpointing: bool = True
    compute: str = "float32"
    non_target: str = "adamw"
    kl: bool = False
    """LoGRA's step controller, with two sequences of ``seq_len`` tokens."""


def build(case: Case) -> Any:
    """The model in fp32, randomly initialised."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**case.config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    if case.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def shard(model: Any, case: Case) -> None:
    """As verl's ``apply_fsdp2``."""
    mesh = init_device_mesh("cpu", (case.ranks,))
    policy = MixedPrecisionPolicy(param_dtype=getattr(torch, case.compute), reduce_dtype=torch.float32)
    alone = set() if model.config.tie_word_embeddings else {"embed_tokens", "lm_head"}
    layers = type(model)._no_split_modules
    modules = [m for n, m in model.named_modules() if type(m).__name__ in layers or n.rpartition(".")[2] in alone]
    for module in [*modules, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)


def optimizer_of(model: Any, case: Case) -> torch.optim.Optimizer:
    """Prepares and shards the model for the method."""
    from verl_logra import LoGRA, LoGRAConfig, install
    from verl_logra.config import DEFAULT_TARGETS

    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        model.enable_input_require_grads()
        get_peft_model(model, LoraConfig(r=case.rank, lora_alpha=case.rank, target_modules=list(DEFAULT_TARGETS)))
    if case.method in ("lora", "adamw"):
        shard(model, case)
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)
    kl = {"probe_sequences": 2} if case.kl else None
    config = LoGRAConfig.from_dict({"rank": case.rank, "non_target": case.non_target, "kl": kl})
    install(model, config)
    shard(model, case)
    optimizer = LoGRA(model, config, lr=1e-5)
    optimizer.listeners.append(lambda applied: None)  # a weight sync
    return optimizer


def log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """As verl's ``logprobs_from_logits_v2`` on packed sequences: ``logits [tokens, vocab]``."""
    if logits.dtype == torch.float32:
        chosen = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        return chosen - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])
    rows = zip(logits, labels, strict=True)
    return torch.stack([torch.log_softmax(x, dim=-1).gather(-1, y.unsqueeze(-1)).squeeze(-1) for x, y in rows])


@contextmanager
def phase(name: str, on: bool) -> Iterator[None]:
    if not on:
        yield
        return
    with record_function(f"phase:{name}"):
        yield


def train(model: Any, optimizer: torch.optim.Optimizer, case: Case) -> None:
    """Two steps; the phases of the second are marked."""
    dtype = getattr(torch, case.compute)
    ids = torch.randint(2, model.config.vocab_size, (case.micro_batch, case.seq_len))
    labels = torch.roll(ids, -1, dims=1).flatten()
    prepare = probes(model, optimizer, case) if case.kl else lambda: None
    for step in range(2):
        with phase("forward_backward", step == 1):
            for number in range(case.num_micro_batches):
                model.set_requires_gradient_sync(number == case.num_micro_batches - 1)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
                    logits = model(input_ids=ids, use_cache=False).logits
                    loss = -log_probs(logits.flatten(0, 1), labels).mean()
                    del logits
                loss.backward()
                del loss
        prepare()
        with phase("step", step == 1):
            torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            optimizer.zero_grad()


def probes(model: nn.Module, optimizer: Any, case: Case) -> Callable[[], None]:
    """Gives the step controller its probe."""
    from verl_logra.controller import KLController
    from verl_logra.probe import Probe, ProbeSequence

    controller = KLController(optimizer, optimizer.config.kl)
    ids = torch.randint(2, 100, (case.seq_len,))
    response = torch.ones(case.seq_len, dtype=torch.bool)
    response[0] = False

    def prepare() -> None:
        bf16 = case.compute == "bfloat16"
        controller.probe = Probe(
            model,
            [ProbeSequence(ids, response)] * 2,
            autocast=lambda: torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16),
        )

    return prepare


def count_all_threads() -> None:
    """The allocator counts what other threads free as well; gloo's do, and the profiler sees this thread only."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def peaks(roots: list[Any]) -> dict[str, int]:
    """Live bytes: what is held when the second step begins, and the peak of each of its phases."""
    spans, memory, pending = {}, [], list(roots)
    while pending:
        event = pending.pop()
        pending += event.children
        if event.name.startswith("phase:"):
            spans[event.name.removeprefix("phase:")] = (event.start_time_ns, event.end_time_ns)
        elif event.name == "[memory]":
            memory.append((event.start_time_ns, event.extra_fields.total_allocated))
    result = {"held": 0, **dict.fromkeys(PHASES, 0)}
    for time, live in sorted(memory):
        if time < spans["forward_backward"][0]:
            result["held"] = live
        for name, (start, end) in spans.items():
            if start <= time <= end:
                result[name] = max(result[name], live)
    return result


def run_rank(rank: int, case: Case, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.ranks)
    count_all_threads()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        model = build(case)
        train(model, optimizer_of(model, case), case)
    result = peaks(profiler.profiler.kineto_results.experimental_event_tree())
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def main(argv: list[str]) -> None:
    case = Case(**json.loads(argv[0]))
    with tempfile.TemporaryDirectory() as folder:
        # Forked: nothing has run yet, and torch is imported once.
        mp.start_processes(run_rank, (case, folder), nprocs=case.ranks, start_method="fork")


if __name__ == "__main__":
    main(sys.argv[1:])
