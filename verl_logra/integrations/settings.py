"""Reads LoGRA's settings out of verl's configuration and refuses what would be silently wrong."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from verl_logra.config import AdamWConfig, LoGRAConfig

logger = logging.getLogger(__name__)


def wants_logra(optimizer_config: Any) -> bool:
    """Whether ``optim.optimizer_impl`` and ``optim.optimizer`` name LoGRA.

    Raises:
        ValueError: one of the two keys does and the other does not.
    """
    name = getattr(optimizer_config, "optimizer", None)
    implementation = getattr(optimizer_config, "optimizer_impl", "verl_logra" if name == "LoGRA" else None)
    if (name == "LoGRA") != (implementation == "verl_logra"):
        raise ValueError(
            f"optim.optimizer={name} with optim.optimizer_impl={implementation}: LoGRA needs both "
            f"optim.optimizer_impl=verl_logra and optim.optimizer=LoGRA"
        )
    return name == "LoGRA"


def refuse_strategy(strategy: str) -> None:
    """Raises for every training engine but FSDP2."""
    if strategy != "fsdp2":
        why = "flattens parameters, so sketches have no rows" if strategy == "fsdp" else "is not supported"
        raise ValueError(
            f"strategy={strategy} {why}: LoGRA needs actor_rollout_ref.actor.strategy=fsdp2 "
            f"(critic.strategy=fsdp2 for a critic)"
        )


def logra_settings(*, model_config: Any, engine_config: Any, optimizer_config: Any) -> LoGRAConfig | None:
    """LoGRA's settings for one FSDP engine of verl; None if it trains nothing or with another optimizer.

    Raises:
        ValueError: a setting of verl's that LoGRA cannot work with, and what to set instead.
    """
    if optimizer_config is None or engine_config.forward_only or not wants_logra(optimizer_config):
        return None
    refuse_strategy(engine_config.strategy)
    if model_config.lora_rank > 0 or model_config.lora_adapter_path or model_config.lora.get("rank", 0) > 0:
        raise ValueError(
            "LoRA and LoGRA are both on: LoGRA trains the full weights that LoRA freezes. Set "
            "actor_rollout_ref.model.lora_rank=0 and no lora_adapter_path, or another optimizer"
        )
    if engine_config.qat.enable:
        raise ValueError("quantisation-aware training replaces the nn.Linear that LoGRA sketches: set qat.enable=False")

    values = optimizer_config.override_optimizer_config or {}
    critic = model_config.model_type == "value_model"
    if critic and isinstance(values, Mapping) and values.get("kl") is not None:
        logger.warning("a critic has no policy whose KL could be predicted: the kl settings are off for it")
        values = {key: value for key, value in values.items() if key != "kl"}
    config = LoGRAConfig.from_dict(values)
    if critic and config.non_target == "frozen":
        raise ValueError("non_target=frozen would freeze the critic's new value head: set non_target=adamw for it")
    if config.kl is not None and engine_config.use_fused_kernels:
        raise ValueError(
            "the KL controller needs logits, which fused kernels never build: set "
            "actor_rollout_ref.model.use_fused_kernels=False, or leave out the kl settings"
        )
    if "betas" not in (values.get("adamw") or {}):
        rest: AdamWConfig = dataclasses.replace(config.adamw, betas=tuple(optimizer_config.betas))
        config = dataclasses.replace(config, adamw=rest)
    return config
