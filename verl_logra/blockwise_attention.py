"""A model's own eager attention, a block of queries at a time: forward-mode AD has no other attention it can use.

Eager attention alone has a forward derivative, and it holds scores of every query with every key: 2 sequences of 4096
tokens under 40 heads are 38 GB, tangents and float32 softmax included. A softmax runs over the keys, so a block of
queries needs no other block.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

NAME = "logra_blockwise_eager"
"""Under which transformers knows it, once ``register`` was called."""
BLOCK = 256


def _eager_attention_of(module: nn.Module) -> Any:
    for owner in type(module).__mro__:
        function = getattr(sys.modules.get(owner.__module__), "eager_attention_forward", None)
        if function is not None:
            return function
    raise NotImplementedError(f"{type(module).__module__} of {type(module).__name__} has no eager_attention_forward")


def blockwise_eager_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """As ``eager_attention_forward`` of the model's file, without the attention weights.

    ``query``: ``[batch, heads, queries, head_dim]``; ``attention_mask``: ``[batch, 1, queries, keys]``, additive.
    """
    eager = _eager_attention_of(module)
    blocks = []
    for start in range(0, query.shape[2], BLOCK):
        rows = slice(start, start + BLOCK)
        mask = None if attention_mask is None else attention_mask[:, :, rows]
        blocks.append(eager(module, query[:, :, rows], key, value, mask, **kwargs)[0])
    return torch.cat(blocks, dim=1), None


def register() -> str:
    """Tells transformers of it; returns its name there."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register(NAME, blockwise_eager_attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    return NAME
