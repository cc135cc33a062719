"""What decoding a token reads, at which rate, and which versions a bound on it leaves.

Promoting an expert costs a CPU time: at BF16 a token reads four times the bytes of w4. A bound is kept for the worst
token there is, all of whose experts are at the most precise version left, so no policy can pass it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version
from moepack.runtime.kernels.forms import resident_size

from .sizes import Bound


def dense_read(dense: int, config: Any) -> int:
    """Bytes of dense tensors that a token reads: all but a table of embeddings that is not the output's too.

    Args:
        dense: bytes of all of them, as they are served.
        config: the model's.
    """
    text = config.get_text_config()
    table = text.vocab_size * text.hidden_size * (config.dtype.itemsize if config.dtype is not None else 4)
    return dense if getattr(text, "tie_word_embeddings", False) else max(0, dense - table)


def experts_read(bundle: Bundle, version: Version, chosen: int) -> int:
    """Bytes of experts that a token reads with all of them at one version; `chosen` of a layer's are a token's."""
    return sum(min(chosen, x.experts) * resident_size(x.matrices, version) for x in bundle.layers)


def within(
    bundle: Bundle, bound: Bound | None, outside: int, chosen: int, measure: Callable[[], float | None]
) -> Bundle:
    """The bundle with the versions that a bound leaves, and no others.

    Args:
        bundle: the bundle.
        bound: the bound; None leaves all.
        outside: bytes that a token reads outside the experts.
        chosen: experts of a token.
        measure: bytes a second that the device reads, or None where it is not here; asked for a bound in seconds.

    Raises:
        InputError: where it leaves none, with the least that a token takes.
    """
    if bound is None:
        return bundle
    rate = measure() if bound.seconds < math.inf else None
    if bound.seconds < math.inf and rate is None:
        raise InputError(f"max_tpot {bound.text}: the device is not here to be measured: name bytes a token")
    most = min(bound.bytes, bound.seconds * (rate or math.inf) if rate else math.inf)
    needed = {v: outside + experts_read(bundle, v, chosen) for v in bundle.versions}
    left = tuple(v for v in bundle.versions if needed[v] <= most)
    if not left:
        least = min(bundle.versions, key=lambda v: needed[v])
        takes = f"{needed[least]} bytes" + (f", {1000 * needed[least] / rate:.1f} ms" if rate else "")
        raise InputError(
            f"{bundle.path}: max_tpot {bound.text} leaves no version: with every expert at {least.name} a token reads "
            f"{takes}, {outside} bytes of them outside the experts"
        )
    return Bundle(bundle.path, bundle.manifest, left, bundle.dense_versions)
