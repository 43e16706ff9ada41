"""LoGRA for verl: low-rank gradient sketches, a predicted-KL step controller and exact low-rank weight sync.

The public names are loaded on first use, so that ``import verl_logra`` imports neither torch nor verl.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["KLConfig", "LoGRA", "LoGRAConfig", "install"]

if TYPE_CHECKING:
    from verl_logra.config import KLConfig, LoGRAConfig
    from verl_logra.optimizer import LoGRA
    from verl_logra.sketch import install

_HOME = {
    "LoGRA": "verl_logra.optimizer",
    "LoGRAConfig": "verl_logra.config",
    "KLConfig": "verl_logra.config",
    "install": "verl_logra.sketch",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'verl_logra' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOME[name]), name)
