"""Peer optimizers for verl's ``optimizer_impl=recipes.baselines`` and for the benchmarks: the authors' own packages.

| ``optimizer`` | package | under FSDP2 |
|---|---|---|
| ``AdamW8bit`` | torchao | tried on one rank, bit-equal to plain tensors |
| ``GaLoreAdamW`` | galore-torch | any number of ranks; each SVD gathers the whole gradient |
| ``APOLLOAdamW`` | apollo-torch | one rank; refused on more, the package mixes plain tensors with sharded ones |
| ``Flora`` | flora-opt | one rank, as APOLLO |

Dense AdamW and LoRA need nothing from here: they are verl's own. Each name is imported when it is asked for, so one
package suffices for one method. All of them: ``bash recipes/setup.sh baselines``.
"""

from typing import Any

_HOME = {
    "AdamW8bit": "torchao.optim",
    "GaLoreAdamW": "recipes.baselines.galore",
    "APOLLOAdamW": "recipes.baselines.apollo",
    "Flora": "recipes.baselines.flora",
}
__all__ = ["APOLLOAdamW", "AdamW8bit", "Flora", "GaLoreAdamW"]


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOME:
        raise AttributeError(f"module {__name__} has no attribute {name}; it has {', '.join(_HOME)}")
    return getattr(importlib.import_module(_HOME[name]), name)
