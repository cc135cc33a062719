"""Find a checkpoint's tensors of layers for multi-token prediction (MTP), by name.

MTP layers are numbered after the decoder layers (DeepSeek-V3, GLM-4.5), or have a name of their own (Qwen3-Next,
Ernie-4.5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

CHOICES = ("drop", "keep")  # a recipe's `mtp`
_OWN = r"(?:^|\.)mtp(?:_[a-z0-9_]+)?\."
_NAME = re.compile(_OWN + r"|(?:^|\.)layers\.(\d{1,9})\.")
# What an MTP layer has beside a decoder layer: what joins the embedding and the hidden state, and their norms.
_BESIDE = re.compile(r"\.(eh_proj|e_proj|h_proj|enorm|hnorm|shared_head)\.")
_ANNOUNCED = re.compile(r"nextn.*layers|mtp.*(layers|modules)|num_mtp")


def mtp_tensors(names: Iterable[str], decoder_layers: int) -> list[str]:
    """The names of MTP layers' tensors among `names`, which have no place in a model of `decoder_layers` layers."""
    found = ((name, _NAME.search(name)) for name in names)
    return [name for name, m in found if m and (m[1] is None or int(m[1]) >= decoder_layers)]


def mtp_layers(
    names: Iterable[str], used: Iterable[str], decoder_layers: int, config: Mapping[str, object]
) -> list[str]:
    """As `mtp_tensors`, without numbered layers that are decoder layers: a configuration may give too few of them.

    A numbered layer is an MTP layer if it has what only these have; or if the configuration announces so many, and the
    layer has a tensor that no decoder layer has. `used` are the names of the decoder layers' tensors.
    """
    found = mtp_tensors(names, decoder_layers)
    announced = [n for key, n in config.items() if _ANNOUNCED.search(key) and type(n) is int]
    end = decoder_layers + max(announced, default=0)
    ordinary = {name[m.end() :] for name in used if (m := _NAME.search(name))}
    own: set[int | None] = {None}
    for name in found:
        m = _NAME.search(name)
        number = layer_of(name)
        assert m is not None
        if _BESIDE.search(name) or (number is not None and number < end and name[m.end() :] not in ordinary):
            own.add(number)
    return [name for name in found if layer_of(name) in own]


def layer_of(name: str) -> int | None:
    """The number of the decoder layer or MTP layer in a name; None for a layer with a name of its own."""
    m = _NAME.search(name)
    return None if m is None or m[1] is None else int(m[1])


def mtp_patterns(names: Iterable[str], decoder_layers: int) -> set[str]:
    """Regular expressions that match the MTP layers among `names`, for a model without MTP layers to skip."""
    out = set()
    for name in mtp_tensors(names, decoder_layers):
        m = _NAME.search(name)
        assert m is not None
        out.add("^" + re.escape(name[: m.end()]))
    return out
