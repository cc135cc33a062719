"""moepack: a Mixture-of-Experts model with every expert at several precisions, served inside a memory budget.

`build` makes a bundle of a checkpoint, `open` reads a bundle, `load` serves one as a transformers model. Importing this
package is light, and lets `transformers.AutoModelForCausalLM.from_pretrained` load bundles.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any


def _installed() -> list[str]:
    """Where this package's folders are, if not beside this file.

    In a clone, Python finds the folder `moepack/` before an installed package, and the others (`pack/`, `runtime/` ...)
    lie beside it, not in it. What was installed then serves, its compiled code included; an editable install finds them
    by itself.
    """
    found = (Path(entry or ".", "moepack") for entry in sys.path)
    return [str(path.resolve()) for path in found if (path / "pack" / "__init__.py").is_file()][:1]


if not Path(__file__).with_name("pack").is_dir():
    __path__ = _installed() or __path__

from . import hook  # noqa: E402
from .version import __version__  # noqa: E402

__all__ = ["BudgetExceeded", "BundleError", "InputError", "MoepackError", "__version__", "build", "load", "open"]

if TYPE_CHECKING:
    from moepack.pack.errors import BundleError, InputError, MoepackError
    from moepack.pack.reader import open_bundle as open
    from moepack.pipeline.build import build
    from moepack.runtime.load import load
    from moepack.runtime.planning.exceeded import BudgetExceeded

_LAZY = {
    "BudgetExceeded": ("moepack.runtime.planning.exceeded", "BudgetExceeded"),
    "BundleError": ("moepack.pack.errors", "BundleError"),
    "InputError": ("moepack.pack.errors", "InputError"),
    "MoepackError": ("moepack.pack.errors", "MoepackError"),
    "build": ("moepack.pipeline.build", "build"),
    "load": ("moepack.runtime.load", "load"),
    "open": ("moepack.pack.reader", "open_bundle"),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for, when it is asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module 'moepack' has no attribute {name!r}")
    import importlib

    module, attribute = _LAZY[name]
    return getattr(importlib.import_module(module), attribute)


hook.install()
