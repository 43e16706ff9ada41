"""What a proposed update would do to the policy, seen through the taps on a few sequences; no weight is touched.

``predict`` pushes the update as a tangent through the model (forward-mode AD), or takes a central difference of two
forwards; ``kl_since_remembered`` measures the KL of what the model is shown (``LoGRA.trial``) by a plain forward in
float32 activations. All ranks of a sharded model must call the same methods, since every forward gathers parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from verl_logra.blockwise_attention import register as register_blockwise_attention
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
    switch: Any = getattr(model, "set_attn_implementation", None)
    try:
        model.eval()
        if attention is not None:
            switch(register_blockwise_attention())
        with torch.no_grad(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            yield
    finally:
        if attention is not None:
            switch(attention)
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
        self._before: list[Tensor] | None = None
        self._difference_scale = 1.0
        # A rank without a sequence takes part in the forwards all the same, since they gather parameters.
        no_sequence = ProbeSequence(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.bool))
        self._pad(list(sequences) or [no_sequence], max_tokens)

    def _pad(self, sequences: list[ProbeSequence], max_tokens: int) -> None:
        """One batch, padded on the left, so that the logits that are needed are the last ones of every row."""
        rows = [(s.input_ids[:max_tokens], s.response[:max_tokens]) for s in sequences]
        size = len(rows), max(len(ids) for ids, _ in rows)
        ids = torch.zeros(size, dtype=torch.int64, device=self.device)
        attended, response = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
        for i, (row_ids, row_response) in enumerate(rows):
            ids[i, -len(row_ids) :] = row_ids.to(self.device)
            attended[i, -len(row_ids) :] = 1
            response[i, -len(row_ids) :] = row_response.to(self.device)
        # The logits at one position are those of the token at the next.
        first = int(response.any(dim=0).int().argmax()) if response.any() else size[1] - 1
        keep = size[1] - max(first - 1, 0)
        self._inputs = {
            "input_ids": ids,
            "attention_mask": attended,
            "position_ids": (attended.cumsum(dim=1) - 1).clamp_(min=0),
            "logits_to_keep": keep,
            "use_cache": False,
        }
        self._predicts_response = torch.cat((response, torch.zeros_like(response[:, :1])), dim=1)[:, 1:][:, -keep:]
        self._temperatures = [s.temperature for s in sequences]

    def predict(self, decay: float = 0.0) -> MeanKL:
        """Second-order KL of the proposed update, unscaled, with relative weight decay ``decay``."""
        if self.method == "finite_difference":
            return self._predict_by_difference(decay)
        with probing(self.model), self.taps.tangent(decay), forward_ad.dual_level(), self.autocast():
            try:
                primal, tangent = forward_ad.unpack_dual(self.model(**self._inputs).logits)
            except (NotImplementedError, RuntimeError) as error:
                raise RuntimeError(
                    f"a layer of the model has no forward derivative ({error}): set kl.probe=finite_difference, "
                    f"which needs none"
                ) from error
        tangent = torch.zeros_like(primal) if tangent is None else tangent
        return self._mean(second_order_kl, self._response_logits(primal), self._response_logits(tangent))

    def _predict_by_difference(self, decay: float) -> MeanKL:
        """``dz = (z(W + e dW) - z(W - e dW)) / 2e``, with ``e`` such that the step ``e`` is ``_DIFFERENCE_KL``: small
        enough for the third order, large enough for float32."""
        for _ in range(_MAX_DIFFERENCES):
            e = self._difference_scale
            with self.taps.inject(e, decay):
                ahead = self._exact_logits()
            with self.taps.inject(-e, decay):
                behind = self._exact_logits()
            middle = [(a + b) / 2 for a, b in zip(ahead, behind, strict=True)]
            difference = [(a - b) / 2 for a, b in zip(ahead, behind, strict=True)]
            kl = self._mean(second_order_kl, middle, difference)
            if not kl.usable or kl.value == 0 or 0.1 < kl.value / _DIFFERENCE_KL < 10:
                break
            self._difference_scale = e * min(max(math.sqrt(_DIFFERENCE_KL / kl.value), 1e-3), 1e3)
        return MeanKL(kl.value / e**2, kl.num_tokens)

    @property
    def remembers(self) -> bool:
        """Whether there is a policy to compare with."""
        return self._before is not None

    def remember(self) -> None:
        """Keeps the policy of now for ``kl_since_remembered``: logits ``[response tokens, vocab]`` in fp32."""
        with self.taps.off():
            self._before = self._exact_logits()

    def kl_since_remembered(self) -> MeanKL:
        """KL from the remembered policy to that of the model as it is shown now (``LoGRA.trial``, or its weights)."""
        assert self._before is not None, "remember comes first"
        return self._mean(exact_kl, self._before, self._exact_logits())

    def _exact_logits(self) -> list[Tensor]:
        with probing(self.model), float32_activations(self.model):
            return self._response_logits(self.model(**self._inputs).logits)

    def _response_logits(self, logits: Float[Tensor, "batch positions vocab"]) -> list[Tensor]:
        """Each sequence's logits of its response tokens, ``[tokens, vocab]``."""
        return [row[mask] for row, mask in zip(logits, self._predicts_response, strict=True)]

    def _mean(self, kl: Callable[..., Tensor], first: list[Tensor], second: list[Tensor]) -> MeanKL:
        """``kl`` averaged over the response tokens of all ranks."""
        kls = torch.cat([kl(a, b, t) for a, b, t in zip(first, second, self._temperatures, strict=True)])
        sums = torch.stack((kls.sum(), torch.full_like(kls.sum(), len(kls))))
        if dist.is_initialized():
            dist.all_reduce(sums)
        total, tokens = sums.tolist()
        return MeanKL(total / tokens if tokens else 0.0, int(tokens))
