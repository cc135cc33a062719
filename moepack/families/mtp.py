"""Find a checkpoint's tensors of layers for multi-token prediction (MTP), by name.

MTP layers are numbered after the decoder layers (DeepSeek-V3, GLM-4.5), or have a name of their own (Qwen3-Next,
Ernie-4.5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CHOICES = ("drop", "keep")  # a recipe's `mtp`
_OWN = r"(?:^|\.)mtp(?:_[a-z0-9_]+)?\."
_NAME = re.compile(rf"{_OWN}|(?:^|\.)layers\.(\d+)\.")


def mtp_tensors(names: Iterable[str], decoder_layers: int) -> list[str]:
    """The names of MTP layers' tensors among `names`, which have no place in a model of `decoder_layers` layers."""
    found = ((name, _NAME.search(name)) for name in names)
    return [name for name, m in found if m and (m[1] is None or int(m[1]) >= decoder_layers)]


def mtp_patterns(names: Iterable[str], decoder_layers: int) -> set[str]:
    """Regular expressions that match the MTP layers among `names`, for a model without MTP layers to skip."""
    out = set()
    for name in mtp_tensors(names, decoder_layers):
        m = _NAME.search(name)
        assert m is not None
        out.add("^" + re.escape(name[: m.end()]))
    return out
