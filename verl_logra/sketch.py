"""Gradient sketches: a target ``nn.Linear`` gets an update parameter ``U [out, rank]`` whose gradient is the sketch.

The weight is frozen. A pre-hook saves ``X A^T [tokens, rank]`` of the layer's input, and a hook taps the output ``Y
[tokens, out]`` with a function that adds nothing to it and whose gradient for ``U`` is ``dY^T (X A^T)``. So ``U.grad``
is ``S = G A^T`` without ``G`` ever being formed, and whatever shards, reduces, accumulates or offloads parameters
(FSDP2 above all) does the same to sketches. ``U.data`` is zero at rest and holds the proposed update between
``LoGRA.propose`` and ``LoGRA.commit``; then the same hooks can show the model what the update would do, without
touching a weight (``Taps.tangent``, ``Taps.inject``).
"""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.autograd.forward_ad as forward_ad
from jaxtyping import Float, Float32
from torch import Tensor, nn

from verl_logra.config import LoGRAConfig
from verl_logra.core.projection import (
    canonical_name,
    gaussian_elements,
    projection_key,
    sign_words,
    unpack_signs,
)

logger = logging.getLogger(__name__)

UPDATE = "logra_update"
"""Name of the update parameter on a target module. It appears in no state dict."""

_CHECKPOINT_PACK = "_checkpoint_hook.__init__.<locals>.pack_hook"
"""Qualified name of the function that torch.utils.checkpoint gives saved tensors to in the first pass."""

TOWERS = ("visual", "vision_tower", "vision_model", "audio_tower", "multi_modal_projector")
"""Sub-modules whose leaves are targets only when a pattern of a qualified name says so."""


class Target:
    """One ``nn.Linear`` whose weight LoGRA trains. ``name`` is its qualified name without wrappers."""

    def __init__(self, name: str, module: nn.Linear, taps: Taps) -> None:
        self.name = name
        self.module = module
        self.taps = taps
        self._words: Tensor | None = None
        self._words_refresh = -1

    @property
    def update(self) -> nn.Parameter:
        """``U [out, rank]``: ``.grad`` is the gradient sketch, ``.data`` the proposed update; zero at rest."""
        return getattr(self.module, UPDATE)

    @property
    def in_features(self) -> int:
        return self.module.in_features

    def unscaled_projection(self, dtype: torch.dtype, device: torch.device) -> Float[Tensor, "rank in"]:
        """``sqrt(rank) A``: +1 and -1 for a Rademacher projection, exact in every dtype."""
        config, refresh = self.taps.config, self.taps.refresh
        if config.projection == "gaussian":
            key = projection_key(config.seed, refresh, self.name)
            return gaussian_elements(key, config.rank, self.in_features, dtype, device)
        if self._words is None or self._words_refresh != refresh or self._words.device != device:
            key = projection_key(config.seed, refresh, self.name)
            self._words = sign_words(key, config.rank, self.in_features, device)
            self._words_refresh = refresh
        return unpack_signs(self._words, self.in_features, dtype)

    def projection(self) -> Float32[Tensor, "rank in"]:
        """The current ``A``, built anew at each call."""
        signs = self.unscaled_projection(torch.float32, self.update.device)
        return signs / math.sqrt(self.taps.config.rank)


class Taps:
    """All targets of one model and what their hooks do at the moment."""

    def __init__(self, config: LoGRAConfig) -> None:
        self.config = config
        self.targets: dict[str, Target] = {}
        self.refresh = 0
        """How many times the projections were drawn anew; part of their key."""
        self.mode: Literal["train", "off", "tangent", "inject"] = "train"
        self.scale = 1.0
        self.decay = 0.0

    @contextmanager
    def off(self) -> Iterator[None]:
        """Forwards see the weights alone."""
        with self._as("off", 0.0, 0.0):
            yield

    @contextmanager
    def tangent(self, decay: float = 0.0) -> Iterator[None]:
        """Forwards under ``forward_ad.dual_level`` carry the tangent of ``delta W = -U A - decay W``."""
        with self._as("tangent", 1.0, decay):
            yield

    @contextmanager
    def inject(self, scale: float, decay: float = 0.0) -> Iterator[None]:
        """Forwards see ``W - scale (U A + decay W)``; the weights themselves are not touched."""
        with self._as("inject", scale, decay):
            yield

    @contextmanager
    def _as(self, mode: Literal["off", "tangent", "inject"], scale: float, decay: float) -> Iterator[None]:
        before = self.mode, self.scale, self.decay
        self.mode, self.scale, self.decay = mode, scale, decay
        try:
            yield
        finally:
            self.mode, self.scale, self.decay = before


class _Projected(torch.autograd.Function):
    """Saves ``X A^T`` before the layer runs; returns a handle whose ``grad_fn`` gives it back.

    Saving it after the layer would make checkpointing recompute the output of a decoder block's last layer, which
    nothing else needs: a recomputation stops at the last saved tensor.
    """

    @staticmethod
    def forward(ctx: Any, update: Tensor, features: Tensor, target: Target) -> Tensor:
        dtype = _output_dtype(features)
        if _is_to_be_recomputed():
            projected = features.new_empty(*features.shape[:-1], update.shape[1], dtype=dtype)
        else:
            projected = _project(target, features, dtype)
        ctx.save_for_backward(projected)
        return update.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad_handle: Tensor) -> tuple[None, None, None]:
        return None, None, None


class _Tap(torch.autograd.Function):
    """Identity on the output; the gradient for ``U`` is ``dY^T (X A^T)`` (design: U.grad is the sketch)."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, update: Tensor, handle: Tensor) -> Tensor:
        ctx.update_dtype = update.dtype
        ctx.projected = handle.grad_fn
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        (projected,) = ctx.projected.saved_tensors
        return grad_output, _sketch(grad_output, projected).to(ctx.update_dtype), None


class _CompiledTap(torch.autograd.Function):
    """``_Tap`` for torch.compile, which cannot trace a handle and decides by itself what to recompute."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, update: Tensor, projected: Tensor) -> Tensor:
        ctx.update_dtype = update.dtype
        ctx.save_for_backward(projected)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        (projected,) = ctx.saved_tensors
        return grad_output, _sketch(grad_output, projected).to(ctx.update_dtype), None


def _sketch(
    grad_output: Float[Tensor, "*batch out"], projected: Float[Tensor, "*batch rank"]
) -> Float[Tensor, "out rank"]:
    """``dY^T (X A^T)``."""
    return grad_output.flatten(0, -2).T @ projected.flatten(0, -2).to(grad_output.dtype)


def _is_to_be_recomputed() -> bool:
    """Whether tensors saved now are thrown away: the first pass of non-reentrant checkpointing, which looks at their
    shape, dtype and device alone. There is no public way to ask; where this one is gone, every pass computes."""
    top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top_hooks(False) if top_hooks is not None else None
    return hooks is not None and getattr(hooks[0], "__qualname__", "") == _CHECKPOINT_PACK


def _output_dtype(features: Tensor) -> torch.dtype:
    """What a linear layer computes in."""
    device = features.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else features.dtype


def _project(target: Target, features: Float[Tensor, "*batch in"], dtype: torch.dtype) -> Float[Tensor, "*batch rank"]:
    """``X A^T`` in the dtype the layer computes in."""
    signs = target.unscaled_projection(dtype, features.device)
    with torch.autocast(features.device.type, enabled=False):
        return (features.to(dtype) @ signs.T).mul_(1 / math.sqrt(target.taps.config.rank))


def _pre_hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    target: Target = module.logra_target  # type: ignore[assignment]
    if target.taps.mode == "train" and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        features = args[0] if args else kwargs["input"]
        # On the input, not on the target: a recomputation may stop between the two hooks, and nothing must be left.
        features.logra_projected = _Projected.apply(target.update, features.detach(), target)


def _hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Tensor | None:
    target: Target = module.logra_target  # type: ignore[assignment]
    taps = target.taps
    features = args[0] if args else kwargs["input"]
    if taps.mode == "train":
        if not torch.is_grad_enabled():
            return None
        if torch.compiler.is_compiling():
            return _CompiledTap.apply(output, target.update, _project(target, features.detach(), output.dtype))
        handle = features.logra_projected
        del features.logra_projected
        return _Tap.apply(output, target.update, handle)
    if taps.mode == "off":
        return None

    # What the proposed update adds to the output: -(X A^T) U^T - decay (Y - bias), at the unperturbed input for a
    # tangent (the input's own tangent goes through the layer as through any other), at the perturbed one otherwise.
    primal = forward_ad.unpack_dual(output).primal
    features = forward_ad.unpack_dual(features).primal
    with torch.autocast(features.device.type, enabled=False):
        projected = _project(target, features, torch.float32)
        change = projected @ target.update.float().T
        if taps.decay:
            bias = 0.0 if target.module.bias is None else target.module.bias
            change = change + taps.decay * (primal - bias)
        change = change.mul_(-taps.scale).to(primal.dtype)
    if taps.mode == "inject":
        return output + change
    tangent = forward_ad.unpack_dual(output).tangent
    return forward_ad.make_dual(primal, change if tangent is None else tangent + change)


def _matches(name: str, pattern: str) -> bool:
    """A pattern with a dot is about the whole name (or its end); one without is about the leaf."""
    if "." in pattern:
        return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")
    return fnmatch.fnmatchcase(name.rpartition(".")[2], pattern)


def _is_target(name: str, config: LoGRAConfig) -> bool:
    if any(_matches(name, pattern) for pattern in config.exclude_modules):
        return False
    in_tower = any(part in TOWERS for part in name.split("."))
    return any(_matches(name, pattern) for pattern in config.target_modules if "." in pattern or not in_tower)


def taps_of(model: nn.Module) -> Taps | None:
    """What ``install`` left on the model; None before."""
    return getattr(model, "logra_taps", None)


def install(model: nn.Module, config: LoGRAConfig) -> dict[str, Target]:
    """Gives every target module its update parameter and tap, and freezes its weight.

    Call it before ``fully_shard``, so that the update parameters are sharded with their layers. A second call with the
    same settings changes nothing. With ``non_target="frozen"`` every other parameter is frozen as well. A target whose
    weight is already frozen stays frozen and is left out.

    Returns:
        Qualified module name -> target.

    Raises:
        ValueError: nothing matches, the rank exceeds a target's ``in_features``, two targets share a weight, or the
            model was installed with other settings or is already sharded.
    """
    taps = taps_of(model)
    if taps is not None:
        if taps.config != config:
            raise ValueError(f"the model already carries LoGRA with other settings: {taps.config}, now {config}")
        return taps.targets
    taps = Taps(config)
    matched = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and _is_target(n, config)]
    modules = [(n, m) for n, m in matched if m.weight.requires_grad]
    _check_modules(model, config, matched, modules)
    if len(modules) < len(matched):
        frozen = [n for n, m in matched if not m.weight.requires_grad]
        logger.warning("LoGRA leaves out %d modules whose weights are frozen: %s", len(frozen), _names(frozen))

    for name, module in modules:
        weight = module.weight
        weight.requires_grad_(False)
        update = torch.zeros(module.out_features, config.rank, dtype=weight.dtype, device=weight.device)
        module.register_parameter(UPDATE, nn.Parameter(update))
        target = Target(canonical_name(name), module, taps)
        module.logra_target = target  # type: ignore[assignment]
        taps.targets[target.name] = target
        module.register_forward_pre_hook(_pre_hook, with_kwargs=True)
        module.register_forward_hook(_hook, with_kwargs=True)
        module.register_state_dict_post_hook(_drop_update)
        module.register_load_state_dict_post_hook(_forgive_missing_update)

    own = {id(target.update) for target in taps.targets.values()}
    rest = {n: p for n, p in model.named_parameters() if p.requires_grad and id(p) not in own}
    stacked = [n for n, p in rest.items() if p.dim() >= 3]
    if stacked:
        fate = "frozen" if config.non_target == "frozen" else "left to AdamW"
        logger.warning(
            "LoGRA sketches nn.Linear only; %d stacked parameters are %s: %s", len(stacked), fate, _names(stacked)
        )
    if config.non_target == "frozen":
        for parameter in rest.values():
            parameter.requires_grad_(False)
    model.logra_taps = taps  # type: ignore[assignment]
    return taps.targets


def _check_modules(
    model: nn.Module,
    config: LoGRAConfig,
    matched: list[tuple[str, nn.Linear]],
    modules: list[tuple[str, nn.Linear]],
) -> None:
    if any(hasattr(p, "placements") for p in model.parameters()):
        raise ValueError("the model is already sharded: call verl_logra.install(model, config) before fully_shard")
    if not modules:
        what = "only frozen modules" if matched else "no nn.Linear"
        linear = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ValueError(
            f"target_modules={list(config.target_modules)} (exclude_modules={list(config.exclude_modules)}) matched "
            f"{what}; the model's nn.Linear modules are called: {', '.join(linear) or 'none'}"
        )
    owner: dict[int, str] = {}
    for name, module in modules:
        if module.in_features < config.rank:
            raise ValueError(
                f"rank={config.rank} exceeds in_features={module.in_features} of {name}: set a smaller rank, or put "
                f"the module into exclude_modules"
            )
        if id(module.weight) in owner:
            raise ValueError(
                f"{name} and {owner[id(module.weight)]} share one weight, which one sketch each cannot train: put "
                f"both into exclude_modules"
            )
        owner[id(module.weight)] = name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in owner and name != f"{owner[id(parameter)]}.weight":
            raise ValueError(f"{owner[id(parameter)]}.weight is also {name}: put the module into exclude_modules")


def _names(names: list[str], limit: int = 6) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _drop_update(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    state_dict.pop(prefix + UPDATE, None)


def _forgive_missing_update(module: nn.Module, incompatible_keys: Any) -> None:
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if key.rpartition(".")[2] != UPDATE]
