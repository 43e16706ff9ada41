"""verl's FSDP engines for the device "cpu".

The first difference to the engines for cuda and npu: parameters already live in host memory, so nothing is offloaded
to it. verl offloads reference models always and others on ``fsdp_config.offload_policy=True``, through pinned memory,
and pinning needs an accelerator.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import verl.utils.model
from transformers import AutoModelForTokenClassification, PretrainedConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

BACKENDS = ["fsdp", "fsdp2"]


class WithoutHostOffload:
    """Mixin for verl's FSDP engines: wrap the model without a policy that offloads to the host."""

    engine_config: Any

    def _build_fsdp_module(self, module: torch.nn.Module) -> torch.nn.Module:
        with self._config_without_offload():
            return super()._build_fsdp_module(module)  # type: ignore[misc]

    @contextmanager
    def _config_without_offload(self) -> Iterator[None]:
        """The engine's config as one that asks for no offload; the user's own is back afterwards.

        verl decides inside ``_build_fsdp_module`` from these two fields, and other methods still need the true ones.
        """
        original = self.engine_config
        self.engine_config = copy.copy(original)
        for field in ("offload_policy", "forward_only"):
            object.__setattr__(self.engine_config, field, False)  # verl's config classes are frozen
        try:
            yield
        finally:
            self.engine_config = original


class CPUEngineWithLMHead(WithoutHostOffload, FSDPEngineWithLMHead):
    """Actor and reference on a CPU."""


class CPUEngineWithValueHead(WithoutHostOffload, FSDPEngineWithValueHead):
    """Critic on a CPU.

    verl loads every critic with flash attention, which needs an accelerator, and reports the failure as a missing
    package. Here a critic gets the attention of its configuration, as an actor does.
    """

    def _build_module(self) -> torch.nn.Module:
        load_valuehead_model = verl.utils.model.load_valuehead_model
        verl.utils.model.load_valuehead_model = _load_critic
        try:
            return super()._build_module()
        finally:
            verl.utils.model.load_valuehead_model = load_valuehead_model


def _load_critic(
    local_path: str, torch_dtype: torch.dtype, model_config: PretrainedConfig, trust_remote_code: bool
) -> torch.nn.Module:
    return AutoModelForTokenClassification.from_pretrained(
        local_path, dtype=torch_dtype, config=model_config, trust_remote_code=trust_remote_code
    )


def register_engines() -> None:
    """Register both with verl for the device "cpu"; a second call changes nothing."""
    for model_type, engine in (("language_model", CPUEngineWithLMHead), ("value_model", CPUEngineWithValueHead)):
        if EngineRegistry._engines.get(model_type, {}).get(BACKENDS[0], {}).get("cpu") is not engine:
            EngineRegistry.register(model_type=model_type, backend=BACKENDS, device="cpu")(engine)
