"""``torch.cpu`` with the memory and RNG functions of ``torch.cuda`` that verl calls on any device.

Memory is the resident size of this process in bytes: on a CPU the allocator keeps no statistics of its own, and what
the machine runs out of is resident memory. "Reserved" therefore equals "allocated", and a peak cannot be reset.
"""

import resource
from types import ModuleType
from typing import Any

import psutil
import torch


class CPUDeviceModule(ModuleType):
    """Stands in for ``torch.cpu``; names that are not defined here come from ``torch.cpu`` itself."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def __eq__(self, other: object) -> bool:
        # verl recognises a CPU by `get_torch_device() == torch.cpu`.
        return other is self or other is torch.cpu

    def __hash__(self) -> int:
        return hash(torch.cpu)

    def is_available(self) -> bool:
        return True

    def get_device_name(self, device: Any = None) -> str:
        return "CPU"

    def current_device(self) -> str:
        """The device as a string: ``tensor.to(0)`` means an accelerator and fails on a CPU-only torch."""
        return "cpu"

    def set_device(self, device: Any) -> None:
        """There is one CPU, nothing to select."""

    def memory_allocated(self, device: Any = None) -> int:
        """Resident bytes of this process."""
        return psutil.Process().memory_info().rss

    def max_memory_allocated(self, device: Any = None) -> int:
        """Largest resident size of this process so far, in bytes (Linux counts it in KiB)."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    memory_reserved = memory_allocated
    max_memory_reserved = max_memory_allocated

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        """Free and total bytes of the machine."""
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def empty_cache(self) -> None:
        """The CPU allocator keeps no cache."""

    def ipc_collect(self) -> None:
        """No memory is shared through device IPC."""

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """The kernel's peak of a process cannot be reset."""

    def set_per_process_memory_fraction(self, fraction: float, device: Any = None) -> None:
        """The CPU allocator has no limit to set."""

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(new_state)


DEVICE_MODULE = CPUDeviceModule("verl_logra.cpu.device_module.cpu", doc="torch.cpu as verl wants a device module")
