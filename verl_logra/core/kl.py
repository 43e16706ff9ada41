"""How far a step moves the policy, and how much of it fits a budget (arXiv 2610.06647, section 4).

KL divergences are in nats per token, per row of ``logits [tokens, vocab]``; ``temperature`` is the sampling policy's.
"""

import math
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float, Float64
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 24  # logits widened at a time: 64 MiB in fp32, 110 tokens of a vocabulary of 150k


def _token_chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    tokens, vocabulary = tensors[0].shape
    size = max(1, _CHUNK_ELEMENTS // vocabulary)
    for start in range(0, tokens, size):
        yield tuple(t[start : start + size].float() for t in tensors)


def second_order_kl(
    logits: Float[Tensor, "tokens vocab"], tangent: Float[Tensor, "tokens vocab"], temperature: float = 1.0
) -> Float64[Tensor, " tokens"]:
    """``KL(p_W || p_{W + dW}) ~= 1/2 Var_p[dz / T]`` of logits ``z`` that change by ``dz`` (Fisher)."""
    out = []
    for z, dz in _token_chunks(logits, tangent):
        p = torch.softmax(z / temperature, dim=-1)
        centred = dz - (p * dz).sum(dim=-1, keepdim=True)
        out.append((p * centred.square_()).sum(dim=-1).double().mul_(0.5 / temperature**2))
    return torch.cat(out) if out else logits.new_zeros(0, dtype=torch.float64)


def exact_kl(
    logits: Float[Tensor, "tokens vocab"], changed: Float[Tensor, "tokens vocab"], temperature: float = 1.0
) -> Float64[Tensor, " tokens"]:
    """``KL(p || q)`` of the policies that two sets of logits are.

    Summed as ``sum p (r - 1 - log r)`` with ``r = q / p``, whose terms are all non-negative: the plain form cancels to
    rounding noise at the 1e-5 nats of a small step.
    """
    out = []
    for z, changed_z in _token_chunks(logits, changed):
        log_p = torch.log_softmax(z / temperature, dim=-1)
        log_r = torch.log_softmax(changed_z / temperature, dim=-1) - log_p
        out.append((log_p.exp() * (torch.expm1(log_r) - log_r)).sum(dim=-1).double())
    return torch.cat(out) if out else logits.new_zeros(0, dtype=torch.float64)


def step_scale(predicted_kl: float, budget: float, alpha_max: float) -> float:
    """``alpha = min(alpha_max, sqrt(budget / predicted))``: the KL of a step grows with the square of its scale."""
    if predicted_kl <= budget / alpha_max**2:
        return alpha_max
    return math.sqrt(budget / predicted_kl)


def shrunk_scale(alpha: float, measured_kl: float, budget: float) -> float:
    """The scale at which a step whose KL was measured at ``alpha`` would meet the budget, to second order."""
    return alpha * math.sqrt(budget / measured_kl)


def budget_at(
    update: int, start: float, end: float, length: int, schedule: Literal["cosine", "linear", "constant"]
) -> float:
    """Budget of update number ``update`` (from 0): ``start`` there, ``end`` from update ``length`` on."""
    if schedule == "constant":
        return start
    progress = min(update / length, 1.0)
    share = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return end + (start - end) * share


def mismatch_average(average: float | None, observed: float, weight: float) -> float:
    """Moving average of how much more likely the rollout engine finds its own tokens than the trainer does, in nats per
    token; negative observations count as none."""
    observed = max(0.0, observed)
    return observed if average is None else average + weight * (observed - average)


def budget_after_mismatch(budget: float, mismatch: float, floor: float) -> float:
    """The engines' disagreement has already spent part of the budget, but never more than leaves ``floor`` of it."""
    return max(budget - mismatch, floor * budget)


def calibration_average(average: float | None, observed: float, weight: float = 0.5) -> float:
    """Running geometric mean of realised KL over ``alpha^2 * predicted``; an observation counts as 0.1 to 1000."""
    observed = min(max(observed, 0.1), 1e3)
    return observed if average is None else math.exp((1 - weight) * math.log(average) + weight * math.log(observed))
