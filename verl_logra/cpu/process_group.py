"""A backend string that ``torch.distributed`` accepts on a CPU.

verl asks for ``f"cpu:gloo,{device}:{backend}"``. With the device "cpu" that names the CPU twice, which torch refuses.
Both of verl's functions that create the default process group are wrapped, and nothing else is touched.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed

CPU_BACKEND = "cpu:gloo"
"""What both functions shall use: the CPU, named once."""

_WRAPPED_NAMES = ("initialize_global_process_group", "initialize_global_process_group_ray")


def use_valid_cpu_backend(verl_utils_distributed: ModuleType) -> None:
    """Wrap the two functions of ``verl.utils.distributed``; a second call changes nothing.

    Must run before other modules take the functions by name, which is why the plugin calls it as soon as that module
    has been imported. Delete this module when verl names the CPU once: a test notices.
    """
    for name in _WRAPPED_NAMES:
        function = getattr(verl_utils_distributed, name)
        if not hasattr(function, "uses_valid_cpu_backend"):
            setattr(verl_utils_distributed, name, _with_cpu_backend(function))


def _with_cpu_backend(initialize: Callable[..., Any]) -> Callable[..., Any]:
    """``initialize`` with the backend of its ``init_process_group`` call replaced.

    The call is replaced, not the argument: one of the two functions builds the string itself and takes none.
    """

    @functools.wraps(initialize)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        init_process_group = torch.distributed.init_process_group

        def on_cpu(backend: str | None = None, **options: Any) -> None:
            init_process_group(backend=CPU_BACKEND, **options)

        torch.distributed.init_process_group = on_cpu  # type: ignore[assignment]
        try:
            return initialize(*args, **kwargs)
        finally:
            torch.distributed.init_process_group = init_process_group

    wrapper.uses_valid_cpu_backend = True  # type: ignore[attr-defined]
    return wrapper
