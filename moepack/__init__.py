"""moepack: Mixture-of-Experts models with every expert at several precisions, served inside a memory budget.

`build` makes a bundle of a checkpoint, `open` reads a bundle, and `load` serves it as a transformers model. Importing
this package is light, and lets `transformers.AutoModelForCausalLM.from_pretrained` load bundles.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .pack.errors import BundleError, InputError, MoepackError
from .runtime.patches import install
from .shared.version import __version__

__all__ = ["BudgetExceeded", "BundleError", "InputError", "MoepackError", "__version__", "build", "load", "open"]

if TYPE_CHECKING:
    from moepack.pack.reader import open_bundle as open
    from moepack.pipeline.build import build
    from moepack.runtime.load import load
    from moepack.runtime.planning.exceeded import BudgetExceeded

_LAZY = {
    "BudgetExceeded": ("moepack.runtime.planning.exceeded", "BudgetExceeded"),
    "build": ("moepack.pipeline.build", "build"),
    "load": ("moepack.runtime.load", "load"),
    "open": ("moepack.pack.reader", "open_bundle"),
}


if not TYPE_CHECKING:  # to which every name would exist

    def __getattr__(name: str) -> object:
        """Import a name on first use."""
        if name not in _LAZY:
            raise AttributeError(f"module 'moepack' has no attribute {name!r}")
        module, attribute = _LAZY[name]
        return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    """List the public names, those that are imported on first use among them."""
    return sorted({*globals(), *__all__})


install()
