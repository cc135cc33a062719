"""Experts that transformers does not run through its experts interface, brought behind it.

`LAYOUTS` names their classes, and for each the file here that adapts it. A model with none of them stays as it is.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# A module's class, and the file whose `behind_interface(module)` gives it a class that the interface runs.
LAYOUTS = {"transformers.models.llama4.modeling_llama4.Llama4TextMoe": "llama4"}


def adapt(model: Any) -> None:
    """Bring a model's experts behind transformers' experts interface where its own code does not. Idempotent.

    Raises:
        InputError: for a configuration that is not supported.
    """
    for module in model.modules():
        kind = type(module)
        if (file := LAYOUTS.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            import_module(f".{file}", __package__).behind_interface(module)
