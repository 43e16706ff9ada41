"""Colocated rollouts that have no receiver for low-rank updates (sglang, trtllm): they get full syncs, and it is said.

Each entry of verl's registry that is not ours points to an attribute of this module instead, which is a subclass of the
class it pointed to, made when verl asks for it.
"""

from __future__ import annotations

import importlib
from typing import Any

from verl_logra.integrations.sync_settings import sync_settings
from verl_logra.sync.plan import empty_state
from verl_logra.sync.session import Session

_originals: dict[str, tuple[str, str]] = {}
"""Attribute of this module -> name of the rollout, path of verl's class."""


def take_over(registry: dict[tuple[str, str], str]) -> None:
    """Lets every entry of verl's ``_ROLLOUT_REGISTRY`` but vLLM's say when it falls back to full syncs."""
    for (rollout, mode), path in registry.items():
        attribute = f"{rollout}_{mode}"
        if rollout != "vllm" and not path.startswith(__name__):
            _originals[attribute] = rollout, path
            registry[rollout, mode] = f"{__name__}.{attribute}"


def __getattr__(attribute: str) -> type:
    if attribute not in _originals:
        raise AttributeError(f"module {__name__} has no attribute {attribute!r}")
    rollout, path = _originals[attribute]
    module, _, name = path.rpartition(".")
    base: Any = getattr(importlib.import_module(module), name)

    class FullSyncAdapter(base):
        async def update_weights(self, weights: Any, **kwargs: Any) -> Any:
            settings = sync_settings(self.config.checkpoint_engine)
            if settings is None or not isinstance(weights, Session):
                return await super().update_weights(weights, **kwargs)
            refusal = f"rollout.name={rollout} has no receiver for low-rank updates; vllm has one"
            bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
            weights.open("colocated", [empty_state(refusal=refusal)], settings.session(bucket_bytes))
            result = await super().update_weights(weights.items(), **kwargs)
            weights.close()
            return result

    return FullSyncAdapter
