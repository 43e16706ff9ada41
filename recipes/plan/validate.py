"""The planner against measured peaks on this CPU, and against published numbers: ``python -m recipes.plan.validate``.

Exits with 1 if a peak is off by more than 5% of what was measured here, or by more than 10% of what was published.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from recipes.plan.measure import Case
from verl_logra.planner.memory import GIB, Method, Rank, Setting
from verl_logra.planner.models import Model, load
from verl_logra.planner.text import columns

TOLERANCE = 0.05
PUBLISHED_TOLERANCE = 0.10

QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 2048,
    "tie_word_embeddings": False,
}
LLAMA = {**QWEN2, "model_type": "llama", "vocab_size": 32000, "tie_word_embeddings": True, "num_hidden_layers": 8}
WIDE = {**QWEN2, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
QWEN3 = {**QWEN2, "model_type": "qwen3", "head_dim": 64, "vocab_size": 16000, "num_hidden_layers": 8}

CASES: dict[str, Case] = {
    "AdamW, Qwen2 31M": Case(config=QWEN2, method="adamw"),
    "AdamW, many tokens, no checkpointing": Case(
        config=QWEN2, method="adamw", micro_batch=4, seq_len=512, checkpointing=False
    ),
    "AdamW, 2 ranks": Case(config=QWEN2, method="adamw", ranks=2),
    "AdamW, many tokens, 2 ranks": Case(config=QWEN2, method="adamw", ranks=2, micro_batch=4, seq_len=512),
    "AdamW, Llama 38M tied, bf16, 2 ranks": Case(
        config=LLAMA, method="adamw", ranks=2, compute="bfloat16", micro_batch=2
    ),
    "AdamW, Qwen3, no checkpointing, bf16": Case(
        config=QWEN3, method="adamw", compute="bfloat16", micro_batch=4, checkpointing=False
    ),
    "AdamW, 3 micro-batches, 2 ranks": Case(config=QWEN2, method="adamw", ranks=2, num_micro_batches=3),
    "LoRA, 2 ranks": Case(config=QWEN2, method="lora", ranks=2, micro_batch=2),
    "LoRA, 137M, no checkpointing": Case(config=WIDE, method="lora", rank=128, micro_batch=4, checkpointing=False),
    "LoGRA, Qwen2 31M": Case(config=QWEN2, method="logra"),
    "LoGRA, many tokens, no checkpointing": Case(
        config=QWEN2, method="logra", micro_batch=4, seq_len=512, checkpointing=False
    ),
    "LoGRA, 137M, rank 256, 2 ranks": Case(config=WIDE, method="logra", rank=256, ranks=2, micro_batch=2),
    "LoGRA, 137M, rest frozen, 2 ranks": Case(
        config=WIDE, method="logra", rank=256, ranks=2, micro_batch=2, non_target="frozen"
    ),
    "LoGRA, Llama 38M tied, bf16, 2 ranks": Case(
        config=LLAMA, method="logra", ranks=2, compute="bfloat16", micro_batch=2
    ),
    "LoGRA, Qwen3, rest frozen, no checkpointing, bf16": Case(
        config=QWEN3, method="logra", compute="bfloat16", micro_batch=4, checkpointing=False, non_target="frozen"
    ),
    "LoGRA, 3 micro-batches, 2 ranks": Case(config=QWEN2, method="logra", ranks=2, num_micro_batches=3),
    "LoGRA with KL control, rest frozen": Case(config=QWEN2, method="logra", kl=True, non_target="frozen", seq_len=512),
    "LoGRA with KL control, AdamW on the rest, 2 ranks": Case(config=LLAMA, method="logra", kl=True, ranks=2),
}
QUICK = ("AdamW, 2 ranks", "LoGRA, 137M, rank 256, 2 ranks")


def planned(case: Case) -> Rank:
    """The planner's view of a measured case."""
    values = {k: v for k, v in asdict(case).items() if k not in ("config", "method", "compute")}
    setting = Setting(device="cpu", compute_bytes=2 if case.compute == "bfloat16" else 4, sync="low_rank", **values)
    method: Any = case.method
    return Rank(Model.from_config("measured", case.config), setting, method)


def measured(case: Case) -> dict[str, int]:
    """Bytes: the peak of forward and backward, and of the optimizer's step, in fresh processes."""
    command = [sys.executable, "-m", "recipes.plan.measure", json.dumps(asdict(case))]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring failed: {done.stderr[-2000:]}")
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compare(case: Case) -> dict[str, tuple[float, float, str]]:
    """Of each phase and of the whole step: planned bytes, measured bytes, and the planner's name of the moment."""
    rank, truth = planned(case), measured(case)
    phases = {"forward_backward": list(rank.forward_backward()), "step": list(rank.step())}
    result: dict[str, tuple[float, float, str]] = {"held": (sum(rank.resident.values()), truth["held"], "held")}
    for name, moments in phases.items():
        top = max(moments, key=lambda m: m.total)
        result[name] = (top.total, truth[name], top.name)
    whole = max(phases, key=lambda name: result[name][0])
    peak = max(truth["forward_backward"], truth["step"])
    result["peak"] = (result[whole][0], peak, result[whole][2])
    return result


def published() -> list[tuple[str, float, float]]:
    """Name, planned and published GiB: Qwen2.5-Math-7B, 4 ranks, fp32 storage, bf16 computation, 2,048 tokens,
    checkpointing, AdamW on the rest; mean peak of an update (arXiv 2610.06647 and its public ports)."""
    model = load("Qwen/Qwen2.5-Math-7B")
    setting = Setting(ranks=4, rank=256, seq_len=2048)
    methods: tuple[tuple[str, Method, float], ...] = (
        ("dense AdamW", "adamw", 36.13),
        ("LoGRA, published port: sketch and projection replicated in fp32", "logra_port", 19.36),
    )
    return [
        (name, max(m.total for m in Rank(model, setting, method).training_step()) / GIB, truth)
        for name, method, truth in methods
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--phases", action="store_true", help="each phase by itself")
    args = parser.parse_args(argv)
    bad = 0
    rows = [["MiB per rank, on this CPU", "planned", "measured", "off", "peak at"]]
    for name, case in CASES.items():
        if args.only and args.only not in name:
            continue
        for phase, (plan, truth, moment) in compare(case).items():
            off = plan / truth - 1
            if phase == "peak":
                bad += abs(off) > TOLERANCE
            elif not args.phases:
                continue
            label = name if phase == "peak" else f"  {phase}"
            rows.append([label, f"{plan / 2**20:.1f}", f"{truth / 2**20:.1f}", f"{off:+.1%}", moment])
            print(*rows[-1], file=sys.stderr, flush=True)
    print(columns(rows), "\n")
    rows = [["GiB per rank, published", "planned", "published", "off"]]
    for name, plan, truth in published():
        bad += abs(plan / truth - 1) > PUBLISHED_TOLERANCE
        rows.append([name, f"{plan:.2f}", f"{truth:.2f}", f"{plan / truth - 1:+.1%}"])
    print(columns(rows))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
