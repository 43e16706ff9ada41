"""What the KL controller reads out of verl's training mini-batch.

verl hands the engine sequences without padding: ``input_ids`` is jagged ``[batch, prompt + response]``, and whatever
belongs to the response (``response_mask``, log-probs) is either jagged over the response or padded on its right.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_logra.probe import ProbeSequence


def _rows(tensor: Tensor) -> list[Tensor]:
    return list(tensor.unbind())


def _response_lengths(data: Any) -> list[int]:
    """Tokens of each response, those that the policy did not write (tool output) included."""
    responses = data["responses"]
    if responses.is_nested:
        return responses.offsets().diff().tolist()
    return data["attention_mask"][:, data["prompts"].shape[1] :].sum(dim=1).tolist()


def _temperatures(data: Any, batch_size: int) -> list[float]:
    temperature = data["temperature"]
    if isinstance(temperature, Tensor) and temperature.numel() == batch_size:
        return temperature.flatten().tolist()
    return [float(temperature)] * batch_size


def probe_sequences(data: Any, count: int, temperature: float | None = None) -> list[ProbeSequence]:
    """``count`` sequences of the mini-batch, evenly spaced among those with a response token; fewer if there are fewer.

    Evenly spaced, because neighbours answer the same prompt.

    Raises:
        NotImplementedError: the batch has images or other inputs that a probe of token ids would leave out.
        ValueError: the rollout's temperature is 0, where the policy has no KL to others.
    """
    multi_modal = data.get("multi_modal_inputs", None)
    if multi_modal is not None and any(getattr(inputs, "data", inputs) for inputs in multi_modal):
        raise NotImplementedError("the KL controller probes text only: leave out the kl settings for multi-modal data")
    ids, masks, lengths = _rows(data["input_ids"]), _rows(data["response_mask"]), _response_lengths(data)
    temperatures = _temperatures(data, len(ids)) if temperature is None else [temperature] * len(ids)
    usable = [i for i, mask in enumerate(masks) if bool(mask[: lengths[i]].any())]
    sequences = []
    for k in range(min(count, len(usable))):
        i = usable[k * len(usable) // min(count, len(usable))]
        if temperatures[i] <= 0:
            raise ValueError(f"the rollout's temperature is {temperatures[i]}: set kl.temperature to a positive one")
        response = torch.zeros(len(ids[i]), dtype=torch.bool, device=ids[i].device)
        response[len(ids[i]) - lengths[i] :] = masks[i][: lengths[i]].bool()
        sequences.append(ProbeSequence(ids[i], response, temperatures[i]))
    return sequences


def mean_log_prob_difference(data: Any) -> float | None:
    """Mean over all ranks' response tokens of rollout log-prob minus trainer log-prob, in nats per token.

    None when the rollout's log-probs are not in the batch; verl puts them there on
    ``actor_rollout_ref.rollout.calculate_log_probs=True``.
    """
    if "rollout_log_probs" not in data or "old_log_probs" not in data:
        return None
    total, tokens = 0.0, 0.0
    fields = (_rows(data[name]) for name in ("rollout_log_probs", "old_log_probs", "response_mask"))
    for rollout, trainer, mask, length in zip(*fields, _response_lengths(data), strict=True):
        mask = mask[:length].bool()
        total += float((rollout[:length] - trainer[:length])[mask].double().sum())
        tokens += float(mask.sum())
    if dist.is_initialized():
        sums = torch.tensor([total, tokens], dtype=torch.float64, device=data["input_ids"].device)
        dist.all_reduce(sums)
        total, tokens = sums.tolist()
    return total / tokens if tokens else None
