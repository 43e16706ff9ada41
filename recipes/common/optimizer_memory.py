"""Measures what an optimizer makes a trainer hold, whatever its class: gradients, state and parameters it adds.

verl imports this module in its training workers (``model.external_lib``). It watches the second step of every
optimizer, when all state exists, and writes ``optimizer_memory/<order>-<pid>.json`` into the folder of the run: bytes
of this rank's shards. Orders count the optimizers of a process by their first step; verl's critic steps before its
actor.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

RUN_FOLDER = "VERL_LOGRA_RUN_FOLDER"
"""Environment variable that recipe.sh sets; without it nothing is measured."""
WATCHED_STEP = 2

_steps: dict[int, int] = {}
_orders: dict[int, int] = {}
_gradient_bytes: dict[int, int] = {}
_open: list[int] = []
"""Identities of the optimizers whose step is in progress: one may call another, and only the outermost counts."""


def num_bytes(held: Iterable[Any]) -> int:
    """Local bytes of all tensors in ``held``, each once; looks into containers and plain objects."""
    seen: dict[int, int] = {}
    pending, visited = list(held), {}
    while pending:
        item = pending.pop()
        if id(item) in visited:
            continue
        visited[id(item)] = item  # kept alive: the local view of a DTensor would give its identity to the next one
        if isinstance(item, DTensor):
            pending.append(item.to_local())
        elif isinstance(item, Tensor) and type(item) not in (Tensor, torch.nn.Parameter):
            # A quantised state: a tensor subclass that keeps its codes and scales in inner tensors.
            names, _ = item.__tensor_flatten__()  # type: ignore[attr-defined]
            pending.extend(getattr(item, name) for name in names)
        elif isinstance(item, Tensor):
            # By address and not by storage: FSDP2's gradients are views into one buffer.
            seen[item.data_ptr()] = max(seen.get(item.data_ptr(), 0), item.numel() * item.element_size())
        elif isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, (list, tuple)):
            pending.extend(item)
        elif hasattr(item, "__dict__") and not isinstance(item, type):
            pending.extend(vars(item).values())
    return sum(seen.values())


def added_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Trainable parameters that the model file does not have: LoGRA's update factors, LoRA's adapters."""
    if type(optimizer).__name__ == "LoGRA":
        return list(optimizer.param_groups[0]["params"])
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    trained = [p for p in parameters if p.requires_grad]
    return trained if len(trained) < len(parameters) else []


def _before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _open.append(id(optimizer))
    if len(_open) == 1 and _steps.get(id(optimizer), 0) + 1 == WATCHED_STEP:
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        _gradient_bytes[id(optimizer)] = num_bytes(gradients)


def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _open.pop()
    if _open:
        return
    identity = id(optimizer)
    order = _orders.setdefault(identity, len(_orders))
    _steps[identity] = _steps.get(identity, 0) + 1
    if _steps[identity] == WATCHED_STEP:
        folder = Path(os.environ[RUN_FOLDER]) / "optimizer_memory"
        folder.mkdir(parents=True, exist_ok=True)
        measured = {
            "optimizer": type(optimizer).__name__,
            "gradient_bytes": _gradient_bytes[identity],
            "state_bytes": num_bytes(optimizer.state.values()),
            "added_parameter_bytes": num_bytes(added_parameters(optimizer)),
        }
        (folder / f"{order}-{os.getpid()}.json").write_text(json.dumps(measured) + "\n")


if RUN_FOLDER in os.environ:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
