"""A vLLM worker extension that can load weights more than once on a CPU.

vLLM on a CPU packs the weight of every linear layer for oneDNN and drops the original (an empty parameter is left),
so the next ``load_weights`` has nothing to write to. The parameters are created again before verl's own update, which
ends with vLLM packing them again. Select it with::

    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_logra.cpu.vllm_worker.CPUWorkerExtension
"""

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod


def restore_packed_weights(model: torch.nn.Module) -> int:
    """Give every packed linear layer of a vLLM model a weight to load into; returns how many there were.

    The weights are NaN until they are loaded, so that an update which leaves one out cannot pass unnoticed.
    """
    packed = [
        layer
        for layer in model.modules()
        if isinstance(layer, LinearBase)
        and isinstance(layer.quant_method, UnquantizedLinearMethod)
        and layer.weight.numel() == 0
    ]
    for layer in packed:
        # The same call as in the layer's constructor. A replicated layer has no input size per partition.
        del layer.weight
        layer.quant_method.create_weights(
            layer,
            input_size_per_partition=getattr(layer, "input_size_per_partition", layer.input_size),
            output_partition_sizes=layer.output_partition_sizes,
            input_size=layer.input_size,
            output_size=layer.output_size,
            params_dtype=layer.params_dtype,
            weight_loader=getattr(layer, "weight_loader_v2", None) or layer.weight_loader,
        )
        layer.weight.data.fill_(float("nan"))
    return len(packed)


class CPUWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, for vLLM on a CPU."""

    def update_weights_from_ipc(
        self, peft_config: dict[str, Any] | None = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        for model in self._iter_all_models():
            restore_packed_weights(model)
        super().update_weights_from_ipc(peft_config=peft_config, base_sync_done=base_sync_done, use_shm=use_shm)
