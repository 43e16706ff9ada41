"""What one measurement is about: a model shape, a batch and a method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

METHODS = {
    "adamw": "AdamW",
    "adamw-fused": "AdamW, fused kernel",
    "adam8bit": "8-bit Adam (torchao)",
    "galore": "GaLore",
    "flora": "Flora",
    "apollo": "APOLLO",
    "lora": "LoRA (peft)",
    "logra": "LoGRA",
    "logra-frozen": "LoGRA, rest frozen",
    "logra-kl": "LoGRA, rest frozen, KL control",
}
"""Method -> its name in tables."""
WITHOUT_RANK = ("adamw", "adamw-fused", "adam8bit")
NOT_FULL_WEIGHT = ("lora", "logra-frozen", "logra-kl")
"""Methods that leave a part of the model as it is."""
PROFILED = ("adamw", "logra", "logra-kl")
"""Methods of which tables show the operators of one step."""
PHASES = ("forward", "backward", "clip", "optimizer")
PEAK_ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""For processes whose peak memory is read, see ``recipes.bench.measure``."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a Qwen2 model."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int


SHAPES = {
    "qwen2.5-0.5b": Shape(hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocabulary=151936),
    "sweep": Shape(hidden=512, intermediate=2048, layers=8, heads=8, kv_heads=2, vocabulary=8192),
    "tiny": Shape(hidden=64, intermediate=192, layers=2, heads=2, kv_heads=1, vocabulary=512),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training step: fp32, decoder layers checkpointed, gradients clipped to norm 1."""

    method: str
    rank: int | None = None
    """None for methods that have none."""
    shape: Shape = field(default_factory=lambda: SHAPES["qwen2.5-0.5b"])
    batch: int = 2
    """Sequences."""
    length: int = 256
    """Tokens of each."""
    shards: int | None = None
    """Ranks of FSDP2 over gloo, each a process of its own; None for a plain module."""
    steps: int = 2
    """Measured, after one that is not."""
    threads: int = 2
    """Of each process."""
    profile: bool = False
    """Whether one more step is recorded by torch.profiler."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"method={self.method!r} is none of {', '.join(METHODS)}")
        if (self.rank is None) != (self.method in WITHOUT_RANK):
            raise ValueError(f"rank={self.rank!r}: {self.method} has {'no' if self.rank else 'a'} rank")
        if self.steps < 1:
            raise ValueError(f"steps={self.steps!r} must be at least 1")

    @property
    def name(self) -> str:
        """Method and rank, as tables and pictures show them."""
        return METHODS[self.method] + (f", rank {self.rank}" if self.rank else "")


def case_of(values: dict[str, Any]) -> Case:
    """A ``Case`` from its JSON."""
    shape = values.get("shape")
    return Case(**{**values, **({"shape": Shape(**shape)} if shape else {})})


def step_seconds(seconds: dict[str, float]) -> float:
    """Of a step whose phases and parts took ``seconds``."""
    return sum(seconds[phase] for phase in PHASES)
