"""What LoGRA's tap costs one ``nn.Linear``: forward and backward, input gradient included.

    python -m recipes.bench.layer [repeats]

Three versions of the layer take turns: ``dense`` (weight gradient), ``frozen`` (none: what any method that trains
something smaller has to pay) and ``tapped`` (LoGRA's sketch, its projection drawn anew every time, as in training).
The operations per token are 2 in out each for output, input gradient and weight gradient, and 2 rank (in + out) for the
sketch: ``ideal`` is tapped over dense if every operation took equally long.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from typing import Any

import torch
from torch import nn

from verl_logra import LoGRAConfig, install
from verl_logra.sketch import taps_of

SHAPES = ((896, 128), (896, 896), (896, 4864), (4864, 896), (3584, 3584))
"""``(in, out)``: Qwen2.5-0.5B's, and q_proj of the 7B model."""
RANKS = (64, 256)
TOKENS = (256, 1024)


def layers(in_features: int, out_features: int, rank: int) -> dict[str, nn.Module]:
    torch.manual_seed(0)
    made: dict[str, nn.Module] = {
        name: nn.Sequential(nn.Linear(in_features, out_features, bias=False)) for name in ("dense", "frozen", "tapped")
    }
    made["frozen"].requires_grad_(False)
    install(made["tapped"], LoGRAConfig(rank=rank, target_modules=("0",)))
    return made


def seconds(layer: nn.Module, features: torch.Tensor, grad_output: torch.Tensor) -> float:
    """Of one forward and backward."""
    taps = taps_of(layer)
    if taps is not None:
        taps.refresh += 1
    layer.zero_grad()
    start = time.perf_counter()
    layer(features).backward(grad_output)
    return time.perf_counter() - start


def measure(in_features: int, out_features: int, rank: int, tokens: int, repeats: int) -> dict[str, Any]:
    made = layers(in_features, out_features, rank)
    features = torch.randn(tokens, in_features, requires_grad=True)
    grad_output = torch.randn(tokens, out_features)
    times: dict[str, list[float]] = {name: [] for name in made}
    for repeat in range(repeats + 1):
        for name, layer in made.items():
            value = seconds(layer, features, grad_output)
            if repeat:
                times[name].append(value)
    median = {name: statistics.median(values) for name, values in times.items()}
    ratios = [t / d for t, d in zip(times["tapped"], times["dense"], strict=True)]
    dense = 3 * in_features * out_features
    return {
        "in": in_features,
        "out": out_features,
        "rank": rank,
        "tokens": tokens,
        "median_ms": {name: round(1e3 * value, 3) for name, value in median.items()},
        "tapped_over_dense": round(statistics.median(ratios), 3),
        "ideal": round((2 * in_features * out_features + rank * (in_features + out_features)) / dense, 3),
        "repeats": repeats,
    }


def main(argv: list[str]) -> None:
    repeats = max(3, 5 * int(argv[0])) if argv else 15
    rows = [measure(*shape, rank, tokens, repeats) for shape, rank, tokens in itertools.product(SHAPES, RANKS, TOKENS)]
    print(json.dumps({"threads": torch.get_num_threads(), "layers": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
