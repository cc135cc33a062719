"""Which kernel runs what: a table of (device, version, tokens an expert) to kernel.

Decides nothing about which version an expert has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from moepack.pack.spec import ExpertLayer, Version

if TYPE_CHECKING:
    from .kernels.affine_native import LayerForms

DIRECT_LIMIT = {torch.float32: 16, torch.bfloat16: 16}


def native_layer(layer: ExpertLayer, versions: Sequence[Version], device: torch.device) -> LayerForms | None:
    """What the compiled CPU kernels read of a layer; None elsewhere, or where they were not compiled."""
    if device.type != "cpu":
        return None
    try:
        from .kernels.affine_native import LayerForms
    except (ImportError, OSError):
        return None
    return LayerForms(layer.matrices, versions)


def direct_limit(dtype: torch.dtype) -> int:
    """The most tokens with which an expert still runs straight from its packed bytes."""
    return DIRECT_LIMIT[dtype]
