"""What a proposed update would do to the policy, seen through the taps on a few sequences; no weight is touched.

``predict`` pushes the update as a tangent through the model (forward-mode AD), or takes a central difference of two
forwards; ``kl_since_remembered`` measures the KL of what the model is shown (``LoGRA.trial``) by a plain forward in
float32 activations. All ranks of a sharded model must call the same methods, since every forward gathers parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl_logra.core.kl import exact_kl, second_order_kl
from verl_logra.exact_forward import float32_activations
from verl_logra.sketch import Taps, taps_of

_DIFFERENCE_KL = 1e-6  # nats per token of the step that a finite difference takes: dz of 1e-3, fp32 rounds at 1e-6
_MAX_DIFFERENCES = 4


@dataclass(frozen=True)
class ProbeSequence:
    """One sequence and which of its tokens the policy generated."""

    input_ids: Int64[Tensor, " length"]
    response: Bool[Tensor, " length"]
    """True where the token is the policy's own; the first token cannot be."""
    temperature: float = 1.0
    """Of the policy that sampled it."""

    @property
    def num_logits(self) -> int:
        """Trailing positions whose logits are needed: from the one that predicts the first response token."""
        positions = self.response.nonzero()
        return len(self.input_ids) - int(positions[0]) + 1 if len(positions) else 1


@dataclass(frozen=True)
class MeanKL:
    """Nats per response token, over all ranks."""

    value: float
    num_tokens: int

    @property
    def usable(self) -> bool:
        return self.num_tokens > 0 and math.isfinite(self.value) and self.value >= 0


@contextmanager
def probing(model: nn.Module) -> Iterator[None]:
    """Evaluation mode and an attention that has a forward derivative; everything is as before afterwards.

    FSDP2 modules that stay gathered after a forward are resharded, since the optimizer writes to the shards.
    """
    training = {module: module.training for module in model.modules()}
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    try:
        model.eval()
        if attention is not None:
            model.set_attn_implementation("eager")
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        if attention is not None:
            model.set_attn_implementation(attention)
        for module, flag in training.items():
            module.training = flag
            if isinstance(module, FSDPModule):
                module.reshard()


class Probe:
    """A few sequences of the current mini-batch, on one data-parallel rank.

    Args:
        model: a causal language model whose output has ``.logits``, installed with LoGRA.
        sequences: this rank's; ranks may have different numbers and lengths of them.
        max_tokens: longer sequences keep their first tokens.
        autocast: makes the context of a training forward, mixed precision above all.
        method: ``jvp`` or ``finite_difference``.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequence[ProbeSequence],
        *,
        max_tokens: int = 4096,
        autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
        method: str = "jvp",
    ) -> None:
        taps = taps_of(model)
        if taps is None:
            raise ValueError("the model carries no LoGRA taps: call verl_logra.install(model, config) first")
        self.model = model
        self.taps: Taps = taps
        self.autocast = autocast
        self.method = method
        self.device = next(model.parameters()).device
        self.sequences = [
            replace(s, input_ids=s.input_ids[:max_tokens], response=s.response[:max_tokens]) for s in sequences
        ]
        # Every rank runs as many forwards as the rank with most sequences; a repeated one has no response token.
        missing = int(self._over_ranks([len(self.sequences)], dist.ReduceOp.MAX)[0]) - len(self.sequences)
        filler = self.sequences[0].input_ids if self.sequences else torch.zeros(2, dtype=torch.int64)
        self.sequences += [ProbeSequence(filler, torch.zeros_like(filler, dtype=torch.bool))] * missing
        self._before: list[Tensor] | None = None
        self._difference_scale = 1.0

    def predict(self, decay: float = 0.0) -> MeanKL:
        """Second-order KL of the proposed update, unscaled, with relative weight decay ``decay``."""
        if self.method == "finite_difference":
            return self._predict_by_difference(decay)
        kls = []
        for sequence in self.sequences:
            with probing(self.model), self.taps.tangent(decay), forward_ad.dual_level(), self.autocast():
                try:
                    primal, tangent = forward_ad.unpack_dual(self._logits(sequence))
                except (NotImplementedError, RuntimeError) as error:
                    raise RuntimeError(
                        f"a layer of the model has no forward derivative ({error}): set kl.probe=finite_difference, "
                        f"which needs none"
                    ) from error
            tangent = torch.zeros_like(primal) if tangent is None else tangent
            kls.append(second_order_kl(primal, tangent, sequence.temperature)[self._predicts_response(sequence)])
        return self._mean(kls)

    def _predict_by_difference(self, decay: float) -> MeanKL:
        """``dz = (z(W + e dW) - z(W - e dW)) / 2e``, with ``e`` such that the step ``e`` is ``_DIFFERENCE_KL``: small
        enough for the third order, large enough for float32."""
        for _ in range(_MAX_DIFFERENCES):
            kls, e = [], self._difference_scale
            for sequence in self.sequences:
                with self._exactly():
                    with self.taps.inject(e, decay):
                        ahead = self._logits(sequence)
                    with self.taps.inject(-e, decay):
                        behind = self._logits(sequence)
                middle = (ahead + behind).div_(2)
                difference = ahead.sub_(behind).div_(2)
                kls.append(second_order_kl(middle, difference, sequence.temperature)[self._predicts_response(sequence)])
            kl = self._mean(kls)
            if not kl.usable or kl.value == 0 or 0.1 < kl.value / _DIFFERENCE_KL < 10:
                break
            self._difference_scale = e * min(max(math.sqrt(_DIFFERENCE_KL / kl.value), 1e-3), 1e3)
        return MeanKL(kl.value / e**2, kl.num_tokens)

    @property
    def remembers(self) -> bool:
        """Whether there is a policy to compare with."""
        return self._before is not None

    def remember(self) -> None:
        """Keeps the policy of now for ``kl_since_remembered``: fp32 logits ``[response tokens, vocab]`` a sequence."""
        with self.taps.off():
            self._before = self._exact_logits()

    def kl_since_remembered(self) -> MeanKL:
        """KL from the remembered policy to that of the model as it is shown now (``LoGRA.trial``, or its weights)."""
        assert self._before is not None, "remember comes first"
        kls = []
        for sequence, before, now in zip(self.sequences, self._before, self._exact_logits(), strict=True):
            kls.append(exact_kl(before, now, sequence.temperature)[self._predicts_response(sequence)])
        return self._mean(kls)

    def _exact_logits(self) -> list[Tensor]:
        with self._exactly():
            return [self._logits(sequence) for sequence in self.sequences]

    @contextmanager
    def _exactly(self) -> Iterator[None]:
        with probing(self.model), float32_activations(self.model):
            yield

    def _logits(self, sequence: ProbeSequence) -> Float[Tensor, "positions vocab"]:
        ids = sequence.input_ids.to(self.device).unsqueeze(0)
        output = self.model(
            input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, logits_to_keep=sequence.num_logits
        )
        return output.logits[0]

    def _predicts_response(self, sequence: ProbeSequence) -> Bool[Tensor, " positions"]:
        """Which of the kept positions predict a response token; the last one predicts what was not sampled."""
        tail = sequence.response[len(sequence.response) - sequence.num_logits + 1 :]
        return torch.cat((tail, tail.new_zeros(1))).to(self.device)

    def _mean(self, kls: list[Tensor]) -> MeanKL:
        local = torch.cat(kls)
        total, tokens = self._over_ranks([float(local.sum()), len(local)], dist.ReduceOp.SUM)
        return MeanKL(total / tokens if tokens else 0.0, int(tokens))

    def _over_ranks(self, values: list[float], op: Any) -> list[float]:
        if not dist.is_initialized():
            return values
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=op)
        return tensor.tolist()
