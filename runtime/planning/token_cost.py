"""The bytes that decoding a token reads, and the versions that remain under a bound on these bytes.

Promoting an expert makes tokens slower: at BF16 a token reads four times the bytes of w4. A bound holds for the worst
token, with all its experts at the most precise remaining version, and so under every policy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle, variant
from moepack.pack.spec import Version

from .sizes import Bound

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def looked_up(config: PreTrainedConfig) -> int:
    """Return the dense bytes that a token does not read: an embedding table that is not tied to the output."""
    text = config.get_text_config()
    table: int = text.vocab_size * text.hidden_size * getattr(config.dtype, "itemsize", 4)
    return 0 if getattr(config, "tie_word_embeddings", False) else table


def experts_read(bundle: Bundle, version: Version, chosen: int) -> int:
    """Return the bytes of experts that a token reads if all are at one version, with `chosen` experts in each layer."""
    return sum(min(chosen, x.experts) * version.resident_size(x.matrices) for x in bundle.layers)


def within(
    bundle: Bundle, bound: Bound | None, outside: int, chosen: int, measure: Callable[[], float | None]
) -> Bundle:
    """Return the bundle with only the versions that keep every token within a bound.

    A token reads `outside` bytes outside the experts, and `chosen` experts in a layer. `measure` is called for a bound
    in seconds: it returns the bytes a second that the device reads, or `None` if the device is not on this machine.

    Raises:
        InputError: when no version is left, with the least that a token takes.
    """
    if bound is None:
        return bundle
    rate = measure() if bound.seconds < math.inf else None
    if bound.seconds < math.inf and rate is None:
        raise InputError(f"max_tpot {bound.text}: the device is not here to be measured: name bytes a token")
    most = min(bound.bytes, bound.seconds * rate if rate else math.inf)
    needed = {v: outside + experts_read(bundle, v, chosen) for v in bundle.versions}
    left = tuple(v for v in bundle.versions if needed[v] <= most)
    if not left:
        least = min(bundle.versions, key=lambda v: needed[v])
        takes = f"{needed[least]} bytes" + (f", {1000 * needed[least] / rate:.1f} ms" if rate else "")
        raise InputError(
            f"{bundle.path}: max_tpot {bound.text} leaves no version: with every expert at {least.name} a token reads "
            f"{takes}, {outside} bytes of them outside the experts"
        )
    return variant(bundle, left)
