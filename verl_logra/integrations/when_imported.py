"""Runs a callback right after a module has been imported, now if it already is.

verl loads plugins at the end of ``import verl`` in every process, vLLM workers included, and hides their errors. Its
engines take another second and 120 MB to import, so what registers with them waits until somebody needs them, and an
error then reaches the process that does.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Callback = Callable[[ModuleType], None]


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: importlib.abc.Loader, callback: Callback) -> None:
        self._loader = loader
        self._callback = callback

    def __getattr__(self, name: str) -> object:  # get_source, is_package, ... of the real loader
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, callback: Callback) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._callback)
        return spec


def when_imported(name: str, callback: Callback) -> None:
    """Calls ``callback(module)`` once module ``name`` is fully imported; its errors are those of the import."""
    module = sys.modules.get(name)
    if module is not None and not getattr(module.__spec__, "_initializing", False):
        callback(module)
    else:
        sys.meta_path.insert(0, _Finder(name, callback))
