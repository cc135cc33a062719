"""Which version each dense matrix of a bundle is served in, and what that changes in bytes. Pure arithmetic over the
manifest; knows nothing of models."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import LOSSLESS, SECTION, Version, align
from moepack.runtime.kernels.forms import resident_size

ALLOCATION = "allocation"  # the versions that the manifest names


def choose_dense(text: str | None, bundle: Bundle, policy: str | None = None) -> tuple[Version, ...]:
    """A version for every entry of the manifest's `dense`; empty for a bundle whose dense matrices have none.

    Args:
        text: a version's name; "allocation"; None: those of the manifest's allocation where the policy is its map too,
            else the most precise version that is here.
        bundle: the bundle.
        policy: as of `moepack.load`.

    Raises:
        InputError: for a version that is not here, or an allocation that does not name any.
    """
    manifest, here = bundle.manifest, {v.name: v for v in bundle.dense_versions}
    if not manifest.dense:
        if text not in (None, LOSSLESS):
            raise InputError(
                f"{bundle.path}: its dense matrices have no versions, so not {text}: build it with `dense: [w8]` in "
                "its recipe"
            )
        return ()
    table = manifest.allocation.dense if manifest.allocation is not None else None
    if text is None and policy == f"static:{ALLOCATION}" and table is not None:
        text = ALLOCATION
    if text == ALLOCATION:
        if table is None:
            raise InputError(f"{bundle.path}: its allocation names no versions of dense matrices")
        names: Sequence[str] = table
    else:
        names = [text or next(iter(here))] * len(manifest.dense)
    for name in names:
        if name not in here:
            raise InputError(f"{bundle.path}: has no dense version {name!r} here: {', '.join(here)}")
    return tuple(here[name] for name in names)


def dense_size(bundle: Bundle, versions: Sequence[Version]) -> int:
    """Bytes of memory of the matrices in these versions."""
    pairs = zip(bundle.manifest.dense, versions, strict=True)
    return sum(align(resident_size((d.matrix,), v), SECTION) for d, v in pairs)


def dense_change(bundle: Bundle, versions: Sequence[Version], item: int) -> int:
    """How many bytes more, or fewer, than with weights of `item` bytes each."""
    if not versions:
        return 0
    plain = sum(d.matrix.weights + (d.matrix.rows if d.matrix.bias else 0) for d in bundle.manifest.dense)
    return dense_size(bundle, versions) - item * plain
