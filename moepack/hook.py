"""Registers the plug-in with transformers, whichever of the two is imported first, and without importing it.

transformers looks quantisers up in `transformers.quantizers.auto`. If that module is there, the plug-in is registered
now; else an import hook registers it right after that module is executed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_TARGET = "transformers.quantizers.auto"
_PLUGIN = "moepack.runtime.plugin"


class _Loader(Loader):
    """Runs another loader, then imports the plug-in."""

    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        importlib.import_module(_PLUGIN)


class _Finder(MetaPathFinder):
    """Finds the target module once, wrapped."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


def install() -> None:
    """Register the plug-in now or when transformers' quantisers are imported."""
    if _TARGET in sys.modules:
        importlib.import_module(_PLUGIN)
    elif not any(isinstance(f, _Finder) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
