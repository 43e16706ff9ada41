"""Forwards in float32 activations, of a model that trains in bfloat16 or float16.

A small step's KL is a difference of two forwards. In bfloat16 each rounds its activations by 2^-9, which alone is 1e-3
to 1e-2 nats per token on a 135M model, far above a budget of 2e-4; and an injected change below half a rounding step
vanishes altogether. A tangent has a mantissa of its own and needs none of this.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

_PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
    torch.einsum,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.mm,
    Tensor.bmm,
    getattr(torch, "_grouped_mm", torch.mm),
}


def _widen(value: Any) -> Any:
    narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if narrow else value


class _WideProducts(TorchFunctionMode):
    """Matrix products widen their operands to float32, one layer's weight at a time; sums and norms then promote."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS:
            args, kwargs = tree_map(_widen, args), tree_map(_widen, kwargs)
        return func(*args, **kwargs)


def computes_in_float32(model: nn.Module) -> bool:
    """Whether a forward outside of autocast already is what ``float32_activations`` makes of it."""
    policies = [m._get_fsdp_state()._mp_policy for m in model.modules() if isinstance(m, FSDPModule)]
    dtypes = {p.dtype for p in model.parameters()} | {policy.param_dtype for policy in policies}
    return dtypes <= {torch.float32, None}


@contextmanager
def float32_activations(model: nn.Module) -> Iterator[None]:
    """No autocast, matrix products in full float32, no cast of the inputs of FSDP2 modules; all restored afterwards."""
    device_type = next(model.parameters()).device.type
    states = [m._get_fsdp_state() for m in model.modules() if isinstance(m, FSDPModule)]
    policies = [state._mp_policy for state in states]
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")  # TF32 rounds like a bfloat16 with two more bits
        # FSDP2 has no public way to change a module's policy.
        for state, policy in zip(states, policies, strict=True):
            state._mp_policy = dataclasses.replace(policy, cast_forward_inputs=False, output_dtype=None)
        with torch.autocast(device_type, enabled=False):
            if computes_in_float32(model):
                yield
            else:
                with _WideProducts():
                    yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for state, policy in zip(states, policies, strict=True):
            state._mp_policy = policy
