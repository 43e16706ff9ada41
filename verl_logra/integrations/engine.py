"""LoGRA inside verl's FSDP2 engines, for actor and critic.

The engine class that verl would use on this platform is subclassed and registered for the (device, vendor) pair, which
verl looks up before the device alone. With another optimizer the subclass does exactly what its base does.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from verl.utils.device import get_device_id, get_device_name, get_vendor
from verl.utils.metric import AggregationType, Metric
from verl.utils.model import convert_weight_keys
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.utils import unfuse_moe_params

from verl_logra.controller import KLController
from verl_logra.integrations.batch import mean_log_prob_difference, probe_sequences
from verl_logra.integrations.settings import logra_settings, refuse_strategy, wants_logra
from verl_logra.integrations.trained_model import LoGRATrainedModel
from verl_logra.optimizer import LoGRA
from verl_logra.probe import Probe
from verl_logra.sketch import install
from verl_logra.sync.sender import nudge_all_
from verl_logra.sync.session import WeightSync


class LoGRAEngine:
    """Mixin over ``FSDPEngineWithLMHead`` and ``FSDPEngineWithValueHead``."""

    module: torch.nn.Module
    optimizer: Any

    def __init__(self, *, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.logra_config = logra_settings(
            model_config=model_config, engine_config=engine_config, optimizer_config=optimizer_config
        )
        super().__init__(  # type: ignore[call-arg]
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )
        self.kl_controller: KLController | None = None
        self._train_data: Any = None
        self.weight_sync: WeightSync | None = None

    def _build_module(self) -> torch.nn.Module:
        module = super()._build_module()  # type: ignore[misc]
        if self.logra_config is not None:
            install(module, self.logra_config)
        return module

    def _build_optimizer(self, module: torch.nn.Module) -> torch.optim.Optimizer:
        if self.logra_config is None:
            return super()._build_optimizer(module)  # type: ignore[misc]
        optim = self.optimizer_config  # type: ignore[attr-defined]
        optimizer = LoGRA(module, self.logra_config, lr=optim.lr, weight_decay=optim.weight_decay)
        if self.logra_config.kl is not None:
            self.kl_controller = KLController(optimizer, self.logra_config.kl)
        self.weight_sync = self._build_weight_sync(module, optimizer)
        return optimizer

    def _build_weight_sync(self, module: torch.nn.Module, optimizer: LoGRA) -> WeightSync:
        model_type = self.model_config.hf_config.model_type  # type: ignore[attr-defined]
        model = LoGRATrainedModel(
            module,
            optimizer,
            parameters=lambda: super(LoGRAEngine, self).get_per_tensor_param()[0],  # type: ignore[misc]
            rename=lambda state: convert_weight_keys(state, module),
            export=lambda items: unfuse_moe_params(items, model_type),
            device=get_device_id(),
        )
        if not model.refusal:
            nudge_all_(model.weights())  # so that training does not depend on how its weights are sent
        return WeightSync(model, optimizer.num_updates, optimizer.listeners.append)

    def forward_backward_batch(self, data: Any, loss_function: Callable[..., Any], forward_only: bool = False) -> Any:
        if not forward_only:
            self._train_data = data
        return super().forward_backward_batch(data, loss_function, forward_only=forward_only)  # type: ignore[misc]

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        start = time.perf_counter()
        outputs = super().train_batch(data, loss_function)  # type: ignore[misc]
        seconds = time.perf_counter() - start
        if self.logra_config is not None and self.is_mp_src_rank_with_outputs():  # type: ignore[attr-defined]
            for name, value in self._logra_metrics(seconds).items():
                outputs["metrics"][f"logra_{name}"] = Metric(AggregationType.MEAN, value)
            if self.weight_sync is not None:
                for name, value in self.weight_sync.metrics.items():
                    outputs["metrics"][name] = Metric(AggregationType.MEAN, value)
        return outputs

    def optimizer_step(self) -> float:
        if self.logra_config is not None:
            self.optimizer.last_step = None
        if self.kl_controller is not None:
            self._prepare_probe(self.kl_controller)
        self._train_data = None
        # Probe sequences are whole on every rank: the sequence-parallel attention must not split them.
        sequence_parallel_group = get_ulysses_sequence_parallel_group()
        set_ulysses_sequence_parallel_group(None)
        try:
            return super().optimizer_step()  # type: ignore[misc]
        finally:
            set_ulysses_sequence_parallel_group(sequence_parallel_group)

    def _prepare_probe(self, controller: KLController) -> None:
        kl = controller.config
        data = self._train_data
        dtype = self._autocast_dtype  # type: ignore[attr-defined]
        controller.probe = Probe(
            self.module,
            probe_sequences(data, kl.probe_sequences, kl.temperature),
            max_tokens=kl.probe_max_tokens,
            method=kl.probe,
            autocast=nullcontext if dtype == torch.float32 else lambda: torch.autocast(get_device_name(), dtype=dtype),
        )
        difference = mean_log_prob_difference(data)
        if difference is not None:
            controller.observe_mismatch(difference)

    def _logra_metrics(self, seconds: float) -> dict[str, float]:
        step = self.optimizer.last_step
        # verl does not call the optimizer when the gradient norm is not finite.
        metrics = {"applied": 0.0, "alpha": 0.0} if step is None else step.metrics()
        if self.kl_controller is not None and step is not None:
            metrics |= self.kl_controller.metrics()
            metrics["control_share"] = self.kl_controller.seconds / seconds
        metrics |= {"targets": float(len(self.optimizer.targets)), "updates": float(self.optimizer.num_updates)}
        return metrics | {"state_bytes": float(self.optimizer.state_bytes())}

    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> Any:
        """As verl's, but what iterates over the weights can also send what changed since the last time."""
        if self.weight_sync is None:
            return super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        session = self.weight_sync.session(self.optimizer.num_updates)
        self._weights_leave()
        return session, None

    def get_per_tensor_param_shard(self, *args: Any, **kwargs: Any) -> Any:
        exported = super().get_per_tensor_param_shard(*args, **kwargs)  # type: ignore[misc]
        self._weights_leave()
        return exported

    def _weights_leave(self) -> None:
        if self.logra_config is not None and self.logra_config.refresh == "sync":
            self.optimizer.refresh_projections()

    def load_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        if self.logra_config is not None and local_path is not None:
            world_size = torch.distributed.get_world_size()
            written = glob.glob(os.path.join(local_path, "optim_world_size_*_rank_0.pt"))
            if written and not os.path.exists(os.path.join(local_path, f"optim_world_size_{world_size}_rank_0.pt")):
                raise ValueError(
                    f"{local_path} was written by another number of ranks ({os.path.basename(written[0])}) than the "
                    f"{world_size} of this run: resume with as many, or merge the model with verl.model_merger and "
                    f"start from it"
                )
        super().load_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        if self.weight_sync is not None:
            self.weight_sync.restart(self.optimizer.num_updates, "resumed run")


class _RefusingEngine:
    """Mixin over engines of other strategies: LoGRA is refused by name before anything is built."""

    def __init__(self, *, optimizer_config: Any, engine_config: Any, **kwargs: Any) -> None:
        if optimizer_config is not None and wants_logra(optimizer_config):
            refuse_strategy(engine_config.strategy)
        super().__init__(optimizer_config=optimizer_config, engine_config=engine_config, **kwargs)  # type: ignore[call-arg]


def register_engines() -> None:
    """Puts LoGRA's engines before verl's for this platform: the FSDP2 ones train, all others refuse."""
    device, vendor = get_device_name(), get_vendor()
    for model_type in ("language_model", "value_model"):
        for backend, registered in EngineRegistry._engines[model_type].items():
            if device not in registered and (device, vendor) not in registered:
                continue
            base: type[BaseEngine] = EngineRegistry.get_engine_cls(model_type, backend)
            mixin = LoGRAEngine if backend == "fsdp2" else _RefusingEngine
            registered[(device, vendor)] = type(f"{mixin.__name__}_{base.__name__}".lstrip("_"), (mixin, base), {})
