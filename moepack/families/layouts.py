"""Adapt experts that transformers does not run through its experts interface.

`LAYOUTS` maps their classes to the files here that adapt them. Other models stay unchanged.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Class of a module -> file here; its `behind_interface(module)` changes the class to one that the interface runs.
LAYOUTS = {"transformers.models.llama4.modeling_llama4.Llama4TextMoe": "llama4"}


def adapt(model: Any) -> None:
    """Make a model's experts run through transformers' experts interface. Idempotent.

    Raises:
        InputError: for a configuration that is not supported.
    """
    for module in model.modules():
        kind = type(module)
        if (file := LAYOUTS.get(f"{kind.__module__}.{kind.__qualname__}")) is not None:
            import_module(f".{file}", __package__).behind_interface(module)
