"""Registers the plug-in with transformers, whichever of the two is imported first, and without importing it.

transformers looks quantisers up in `transformers.quantizers.auto`. If that module is there, the plug-in is registered
now; else an import hook registers it right after that module is executed. Likewise what `from_pretrained` is taught.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_AFTER = {  # a module of transformers, and what is imported right after it
    "transformers.quantizers.auto": "moepack.runtime.plugin",
    "transformers.modeling_utils": "moepack.runtime.from_pretrained",
}


class _Loader(Loader):
    """Runs another loader, then imports what is to come after it."""

    def __init__(self, inner: Loader, after: str, done: Callable[[], object]) -> None:
        self._inner, self._after, self._done = inner, after, done

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._done()
        importlib.import_module(self._after)


class _Finder(MetaPathFinder):
    """Finds each target module once, wrapped."""

    def __init__(self) -> None:
        self._left = dict(_AFTER)
        self._looking: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        after = self._left.get(name)
        if after is None or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, after, lambda: self._left.pop(name, None))
        return spec


def install() -> None:
    """Register now, or when transformers' modules are imported."""
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        for name, after in _AFTER.items():
            if name in sys.modules:
                finder._left.pop(name)
                importlib.import_module(after)
