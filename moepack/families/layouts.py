"""Experts that transformers does not run through its experts interface, brought behind it.

Finds the modules by their class; what becomes of them is in a module for each family. A model without any stays as
it is.
"""

from __future__ import annotations

from typing import Any


def adapt(model: Any) -> None:
    """Bring a model's experts behind transformers' experts interface, where its own code does not; twice is once.

    Raises:
        InputError: for a configuration that is not supported.
    """
    for module in model.modules():
        if type(module).__name__ == "Llama4TextMoe" and type(module).__module__.startswith("transformers."):
            from .llama4 import behind_interface

            behind_interface(module)
