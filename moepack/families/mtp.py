"""Which tensors of a checkpoint are its layers for multi-token prediction (MTP), which guess tokens ahead.

They stand behind the decoder layers under the numbers that follow (DeepSeek-V3, GLM-4.5), or under a name of their own
(Qwen3-Next, Ernie-4.5). Knows names alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

CHOICES = ("drop", "keep")  # what a recipe may say of them
_OWN = r"(?:^|\.)mtp(?:_[a-z0-9_]+)?\."
_NAME = re.compile(rf"{_OWN}|(?:^|\.)layers\.(\d+)\.")


def mtp_tensors(names: Iterable[str], decoder_layers: int) -> list[str]:
    """Of tensors that have no place in a model with so many decoder layers, those of MTP layers."""
    found = ((name, _NAME.search(name)) for name in names)
    return [name for name, m in found if m and (m[1] is None or int(m[1]) >= decoder_layers)]


def mtp_patterns(names: Iterable[str], decoder_layers: int) -> set[str]:
    """Regular expressions for the MTP layers that these tensors are of: a model that has none skips them by those."""
    out = set()
    for name in mtp_tensors(names, decoder_layers):
        m = _NAME.search(name)
        assert m is not None
        out.add("^" + re.escape(name[: m.end()]))
    return out
