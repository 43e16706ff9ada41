"""Weight-transfer sockets that two verl runs on one host do not share.

verl names the socket between a trainer and its vLLM worker ``/tmp/rl-colocate-zmq-<Ray job>-...``, and the first job of
every Ray cluster has the same number. Two runs at a time, each with a cluster of its own, would take each other's
weights. With ``VERL_LOGRA_SOCKET_DIR`` set (the recipes set it to a folder per run) both ends use that folder.
"""

import functools
import os
from types import ModuleType
from typing import Any

SOCKET_DIR = "VERL_LOGRA_SOCKET_DIR"
_SHARED = "ipc:///tmp/"


def private_handle(handle: str) -> str:
    """verl's socket address, moved into this run's folder if it has one."""
    folder = os.environ.get(SOCKET_DIR)
    return handle.replace(_SHARED, f"ipc://{folder}/", 1) if folder and handle.startswith(_SHARED) else handle


def use_private_sockets_in_trainers(vllm_rollout: ModuleType) -> None:
    """For ``verl.workers.rollout.vllm_rollout.vllm_rollout``: the sending end."""
    init = vllm_rollout.ServerAdapter.__init__

    @functools.wraps(init)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.zmq_handle = private_handle(self.zmq_handle)

    vllm_rollout.ServerAdapter.__init__ = wrapper


def use_private_sockets_in_workers(utils: ModuleType) -> None:
    """For ``verl.workers.rollout.vllm_rollout.utils``: the receiving end, inside vLLM."""
    get_handle = utils.vLLMColocateWorkerExtension._get_zmq_handle

    @functools.wraps(get_handle)
    def wrapper(self: Any) -> str:
        return private_handle(get_handle(self))

    utils.vLLMColocateWorkerExtension._get_zmq_handle = wrapper
