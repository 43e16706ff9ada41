"""A model in fp32 with random weights, and each method's optimizers for it.

All full-weight methods train the same parameters: the seven projections of attention and MLP in their own way, the rest
(embedding, norms, biases) by the fused ``torch.optim.AdamW``, which LoGRA and the baselines use for it.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from recipes.baselines.groups import split_by_shape
from recipes.bench.case import Case

LR, WEIGHT_DECAY = 1e-6, 0.01


def build_model(case: Case) -> nn.Module:
    """Qwen2 of transformers with a tied head and non-reentrant checkpointing of its decoder layers."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    s = case.shape
    config = Qwen2Config(
        vocab_size=s.vocabulary,
        hidden_size=s.hidden,
        intermediate_size=s.intermediate,
        num_hidden_layers=s.layers,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(config)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def shard(model: nn.Module, case: Case) -> None:
    """Row shards of decoder layers and the root, as verl's FSDP2 engine makes them."""
    from torch.distributed.fsdp import fully_shard

    if case.shards is not None:
        for layer in model.model.layers:  # type: ignore[union-attr]
            fully_shard(layer)
        fully_shard(model)


def build_optimizers(model: nn.Module, case: Case) -> list[Optimizer]:
    """Prepares and shards the model for the method; every optimizer of the list takes a step."""
    method = case.method
    if method.startswith("logra"):
        from verl_logra import LoGRA, LoGRAConfig, install

        config = LoGRAConfig.from_dict(
            {
                "rank": case.rank,
                "non_target": "adamw" if method == "logra" else "frozen",
                "kl": {} if method == "logra-kl" else None,
            }
        )
        install(model, config)
        shard(model, case)
        return [LoGRA(model, config, lr=LR, weight_decay=WEIGHT_DECAY)]
    if method == "lora":
        from peft import LoraConfig, inject_adapter_in_model

        from verl_logra.config import DEFAULT_TARGETS

        assert case.rank is not None
        model.requires_grad_(False)
        inject_adapter_in_model(LoraConfig(r=case.rank, target_modules=list(DEFAULT_TARGETS)), model)
        shard(model, case)
        trained = [p for p in model.parameters() if p.requires_grad]
        return [AdamW(trained, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)]

    shard(model, case)
    if method in ("adamw", "adamw-fused"):
        fused = True if method == "adamw-fused" else None
        return [AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=fused)]
    import recipes.baselines as baselines

    if method == "adam8bit":
        matrices, rest = split_by_shape(model.parameters(), rank=0)
        return [
            baselines.AdamW8bit(matrices, lr=LR, weight_decay=WEIGHT_DECAY),
            AdamW(rest, lr=LR, weight_decay=WEIGHT_DECAY, fused=True),
        ]
    classes = {"galore": baselines.GaLoreAdamW, "flora": baselines.Flora, "apollo": baselines.APOLLOAdamW}
    return [classes[method](model.parameters(), rank=case.rank, lr=LR, weight_decay=WEIGHT_DECAY)]
