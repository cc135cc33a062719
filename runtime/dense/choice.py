"""The version in which each dense matrix of a bundle is served."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import LOSSLESS, Version

ALLOCATION = "allocation"  # the versions that the manifest names


def choose_dense(text: str | None, bundle: Bundle, policy: str | None = None) -> tuple[Version, ...]:
    """Choose a version for every entry of the manifest's `dense`; empty if the bundle has no dense versions.

    Args:
        text: a version's name, or "allocation" for the versions in the manifest's allocation. `None` means "allocation"
            if the policy serves the allocation too, else the most precise version present.

    Raises InputError for a version that is not present, or an allocation without dense versions.
    """
    manifest = bundle.manifest
    here = {v.name: v for v in bundle.dense_versions}
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
