"""ERNIE-4.5-VL: a layer has experts for text and others for images. Those for images are kept as a tower is.

Calibration on text never reaches them, so nothing could say which precision they bear. They run by their own code, in
the checkpoint's dtype, and count as the model's dense part.
"""

from __future__ import annotations

import functools
from typing import Any


@functools.cache
def _apart(kind: Any) -> type:
    return type(kind.__name__, (kind,), {"forward": kind.forward.__wrapped__, "__module__": kind.__module__})


def behind_interface(block: Any, config: object) -> None:
    """Take the experts for images of a layer's block out of the interface, so that it knows those for text alone."""
    experts = block.vision_moe.experts
    if hasattr(experts, "has_gate"):
        kind: Any = type(experts)
        experts.__class__ = _apart(kind)
        del experts.has_gate
