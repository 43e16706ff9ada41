"""verl's platform interface for the CPU, registered as "cpu" when this module is imported.

verl picks it only on ``VERL_PLATFORM=cpu``: ``is_platform_available`` answers no, so that auto-detection on a machine
with an accelerator never lands here.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry

from verl_logra.cpu.device_module import DEVICE_MODULE


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """One host, no accelerator: gloo collectives, Ray slots that are only logical, weights moved by shared memory."""

    @property
    def device_name(self) -> str:
        return "cpu"

    @property
    def vendor_name(self) -> str:
        return "cpu"

    @property
    def device_module(self) -> ModuleType:
        return DEVICE_MODULE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return False

    def current_device(self) -> str:
        # verl types this as an index, but uses it as `tensor.to(get_device_id())`, and an index means an accelerator.
        return DEVICE_MODULE.current_device()

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        """There is one CPU, nothing to select."""

    def synchronize(self, device_index: int | None = None) -> None:
        """CPU work is done when the call returns."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """The settings are those of the CUDA allocator."""

    def empty_cache(self) -> None:
        """The CPU allocator keeps no cache."""

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        # Nothing sets it: verl then names devices by index, which is all a CPU has.
        return "VERL_CPU_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        """No device profiler."""

    def profiler_stop(self) -> None:
        """No device profiler."""

    def ray_resource_name(self) -> str:
        # verl places workers on the resources "GPU" and "NPU" only. `ray_kwargs.ray_init.num_gpus=N` makes N logical
        # ones, which is what a "device" of a worker is here.
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        # verl then hands weights from the trainer to vLLM through shared memory.
        return False

    def cudart(self) -> None:
        return None
