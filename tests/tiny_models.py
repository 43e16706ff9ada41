"""Tiny randomly initialised language models of the architectures that people train, and a batch for them."""

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 64
_SIZE = dict(
    vocab_size=VOCABULARY,
    hidden_size=36,
    intermediate_size=70,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=12,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
    attn_implementation="eager",
)
# hidden 36 and k/v heads of 12 rows are no multiples of 64 sign bits, 70 rows are uneven on 4 ranks.
ARCHITECTURES = {
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, {"query_pre_attn_scalar": 12, "sliding_window": 8}),
}


def tiny_model(
    architecture: str = "qwen3", *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> nn.Module:
    config_class, model_class, extra = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    model = model_class(config_class(**{**_SIZE, **extra, "tie_word_embeddings": False, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # initialised to zero, where a wrong bias gradient would not show
                parameter.normal_(std=0.1)
    return model.to(dtype)


def tokens(batch: int = 4, length: int = 10, *, seed: int = 1) -> Tensor:
    return torch.randint(2, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, ids: Tensor) -> Tensor:
    """Mean next-token loss, differently weighted per position, so that no symmetry hides a mistake."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    losses = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="none")
    weights = torch.linspace(0.5, 1.5, ids.shape[1] - 1).repeat(ids.shape[0])
    return (losses * weights).mean()
