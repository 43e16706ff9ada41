"""The receiver inside vLLM's workers, as a worker extension over verl's.

verl's server picks it by itself when the low-rank sync is on (see ``rollout``). On a CPU vLLM packs the weight of every
linear layer for oneDNN and drops it; there the worker keeps the unpacked parameters, applies updates to them and lets
vLLM pack them again. On an accelerator updates go into vLLM's own parameters, in place.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import zmq
from torch import Tensor, nn
from verl.utils.vllm.patch import patch_vllm_moe_model_weight_loader
from verl.utils.vllm.vllm_quant_utils import is_quantized_model
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.platforms import current_platform

from verl_logra.cpu.vllm_worker import CPUWorkerExtension, restore_packed_weights, vLLMColocateWorkerExtension
from verl_logra.integrations.bounded_transfer import BoundedReceiver
from verl_logra.integrations.vllm_layout import Layout
from verl_logra.sync.plan import ReceiverState, empty_state
from verl_logra.sync.receiver import LowHalf, Receiver
from verl_logra.sync.wire import is_frame

logger = logging.getLogger(__name__)

_Base: Any = CPUWorkerExtension if current_platform.is_cpu() else vLLMColocateWorkerExtension


class UnpackedWeights:
    """The parameters of linear layers that vLLM packs and drops on a CPU; empty elsewhere."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._kept: dict[LinearBase, nn.Parameter] = {}

    def weight_of(self, layer: LinearBase) -> Tensor:
        return self._kept.get(layer, layer.weight)

    def unpack(self) -> None:
        """Gives every packed layer its parameter back, to be read, loaded into, and packed again."""
        if not current_platform.is_cpu():
            return
        for layer, weight in self._kept.items():
            layer.weight = weight
        restore_packed_weights(self._model)
        for layer in self._model.modules():
            if isinstance(layer, LinearBase) and isinstance(layer.quant_method, UnquantizedLinearMethod):
                self._kept[layer] = layer.weight

    def pack(self) -> None:
        for layer in self._kept:
            layer.quant_method.process_weights_after_loading(layer)


class Parts:
    """Seconds of one sync by what this worker did in them."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def all(self, rest: str) -> dict[str, float]:
        """``rest`` names what no part was about."""
        total = time.perf_counter() - self._start
        return {**self._seconds, rest: total - sum(self._seconds.values())}


@dataclass
class _Sync:
    """What the extension keeps in a worker."""

    receiver: Receiver
    unpacked: UnpackedWeights
    stopped: bool = False
    compute_logits: Any = None
    """The model's own override while generation is stopped."""
    remembered: dict[str, Tensor] | None = None
    known: ReceiverState | None = None
    parts: Parts = field(default_factory=Parts)
    """Of the sync that is going on, or the last one."""
    full_seconds: dict[str, float] = field(default_factory=dict)


class LoGRAWorkerExtension(_Base):
    """verl's extension, and low-rank weight updates."""

    _logra: _Sync | None = None
    device: torch.device | None

    def logra_state(self, low_half: LowHalf) -> ReceiverState:
        """What this worker has, before a sync."""
        if self._logra is None:
            model = self.model_runner.model
            unpacked = UnpackedWeights(model)
            receiver = Receiver(Layout(model, unpacked.weight_of).locate, _sum_over_tensor_parallel, low_half)
            refusal = self._logra_refusal()
            if refusal:
                receiver.refuse(refusal)
            self._logra = _Sync(receiver, unpacked)
        return self._logra.receiver.state

    def update_weights_from_ipc(self, *args: Any, **kwargs: Any) -> None:
        """A full update that does not come through the receiver, which therefore knows nothing any more."""
        if self._logra is not None and not self._logra.receiver.state["refusal"]:
            self._logra.receiver.state = empty_state()
        if self._logra is not None:
            self._logra.parts = Parts()
        super().update_weights_from_ipc(*args, **kwargs)
        if self._logra is not None:
            self._logra.full_seconds = self._logra.parts.all("wait and pack")

    def _update_weights(self, *args: Any, **kwargs: Any) -> None:
        parts = Parts() if self._logra is None else self._logra.parts
        with parts.of("load"):
            super()._update_weights(*args, **kwargs)

    def logra_receive(self, full: bool, use_shm: bool, timeout_seconds: float) -> dict[str, Any]:
        """Takes one message from the trainer on this device.

        Returns:
            problem: what went wrong, "" if nothing did; kept_bytes; seconds, by part.
        """
        assert self._logra is not None, "logra_state comes first"
        receiver, unpacked = self._logra.receiver, self._logra.unpacked
        model = self.model_runner.model
        self._logra.parts = parts = Parts()
        self._logra_stop_generation(self._logra, model)
        receiver.start()
        with parts.of("unpack"):
            unpacked.unpack()
        if full:
            patch_vllm_moe_model_weight_loader(model)
        problem, loaded = "", full
        pending: list[tuple[str, Tensor]] = []

        def load() -> None:
            if pending:
                self._update_weights(pending, None, False)
                pending.clear()

        def take(bucket: list[tuple[str, Tensor]], is_last: bool) -> None:
            nonlocal problem, loaded
            if problem:
                return  # the rest is drained, so that the sender is not left waiting
            try:
                for name, tensor in bucket:
                    if is_frame(name):
                        load()  # END compares what is in the model
                    with parts.of("update"):
                        mine = receiver.take(name, tensor)
                    if not mine:
                        pending.append((name, tensor))
                        loaded = True
                load()
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
                logger.exception("a weight sync failed in this worker")

        if self.device is None:
            self.device = torch.device(f"{current_platform.device_type}:{self.local_rank}")
        transfer = BoundedReceiver(
            zmq_handle=self._get_zmq_handle(), device=self.device, use_shm=use_shm, seconds=timeout_seconds
        )
        try:
            transfer.receive_weights(take)
        except zmq.ZMQError as error:
            problem = problem or f"the trainer gave no sign of life for {timeout_seconds:g} s ({error})"
        problem = problem or receiver.state["problem"]
        with parts.of("pack"):
            if loaded:
                process_weights_after_loading(model, self.model_runner.vllm_config.model_config, self.device)
            else:
                unpacked.pack()
        if problem:
            receiver.abandon(problem)
        else:
            self._logra_allow_generation(self._logra, model)
        return {"problem": problem, "kept_bytes": receiver.kept_bytes(), "seconds": parts.all("wait")}

    def logra_remember(self) -> None:
        """Verification, first half: keeps a copy of everything this worker computes with."""
        assert self._logra is not None, "logra_state comes first"
        self._logra.remembered = {name: t.clone() for name, t in effective_tensors(self.model_runner.model)}
        self._logra.known = self._logra.receiver.state

    def logra_compare(self) -> dict[str, Any]:
        """Verification, second half, after a full update by verl alone.

        Returns:
            differ: bytes that are not those of the copy, by tensor; elements: how many were compared; seconds of the
            full update, by part.
        """
        assert self._logra is not None and self._logra.remembered is not None and self._logra.known is not None
        remembered, self._logra.remembered = self._logra.remembered, None
        differ, elements = {}, 0
        for name, tensor in effective_tensors(self.model_runner.model):
            before = remembered.pop(name)
            different = int((_bytes(before) != _bytes(tensor)).sum())
            elements += tensor.numel()
            if different:
                differ[name] = different
        differ |= {name: tensor.numel() for name, tensor in remembered.items()}
        # The full update brought what was there already, so the receiver still knows what it holds.
        self._logra.receiver.state, self._logra.known = self._logra.known, None
        return {"differ": differ, "elements": elements, "seconds": self._logra.full_seconds}

    def _logra_refusal(self) -> str:
        config = self.model_runner.vllm_config
        parallel = config.parallel_config
        if self._is_qat_model or self._is_modelopt_qat or is_quantized_model(config):
            return "the rollout is quantised, where an update cannot be exact"
        if parallel.pipeline_parallel_size > 1:
            return "pipeline_model_parallel_size > 1: workers hold different targets"
        if parallel.data_parallel_size > 1:
            return "rollout.data_parallel_size > 1: verl reaches the workers of one shard only"
        if config.lora_config is not None:
            return "the rollout serves LoRA adapters"
        if self._use_mtp_drafter_weight_sync():
            return "the rollout has a draft model that shares weights"
        return ""

    def _logra_stop_generation(self, sync: _Sync, model: nn.Module) -> None:
        """Until the weights are whole again, a step of this worker is an error."""
        if sync.stopped:
            return

        def refuse(*args: Any, **kwargs: Any) -> NoReturn:
            raise RuntimeError("a weight sync did not finish: the weights are half updated and must not generate")

        sync.stopped, sync.compute_logits = True, model.__dict__.get("compute_logits")
        model.compute_logits = refuse  # type: ignore[assignment]

    def _logra_allow_generation(self, sync: _Sync, model: nn.Module) -> None:
        sync.stopped = False
        del model.__dict__["compute_logits"]
        if sync.compute_logits is not None:
            model.compute_logits = sync.compute_logits
        sync.compute_logits = None


def _sum_over_tensor_parallel(sums: Tensor) -> Tensor:
    group = get_tp_group()
    if group.world_size == 1:
        return sums
    total = sums.cpu()
    dist.all_reduce(total, group=group.cpu_group)
    return total


def effective_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer that the model computes with; packed weights are read through the layer itself."""
    packed = {
        f"{name}.weight": layer
        for name, layer in model.named_modules()
        if getattr(layer, "cpu_linear", None) is not None
    }
    for name, layer in packed.items():
        yield f"{name} (packed)", _read_packed(layer)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.numel():
            yield name, tensor.detach()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _read_packed(layer: Any) -> Tensor:
    """``W = (I W^T)^T``: exact, because each element is a sum of one product with 1 and products with 0."""
    size = getattr(layer, "input_size_per_partition", None) or getattr(layer, "input_size", None) or layer.embedding_dim
    dtype = getattr(layer, "params_dtype", None) or layer.weight.dtype
    return layer.cpu_linear(torch.eye(size, dtype=dtype), layer.weight, None).T.contiguous()
