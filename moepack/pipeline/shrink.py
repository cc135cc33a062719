"""A bundle with fewer versions, made of one that is there: files are linked where the file system lets them.

Nothing is quantised or decoded; digests are checked first. The format holds a version of all experts or of none
(pack/FORMAT.md), so a map of one version an expert keeps every version that it names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moepack.pack.errors import BundleError, InputError, Problem
from moepack.pack.manifest import MANIFEST, Allocation
from moepack.pack.reader import Bundle, open_bundle, verify
from moepack.pack.spec import expert_file
from moepack.pack.writer import BundleWriter, check_target
from moepack.progress import Reporter
from moepack.reports.fitting import fitting
from moepack.runtime.planning.options import LoadOptions

from .model_card import model_card

_LINKED = (".safetensors",)  # others are small, and edited by people: a link would edit both


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The new bundle."""

    bundle: Path  # the directory
    versions: tuple[str, ...]  # names, the most precise first
    dense: tuple[str, ...]  # the same for dense matrices
    bytes_before: int  # of the manifest's files that exist
    bytes_after: int
    allocation: str | None  # the name of the manifest's map


def shrink(
    path: str | Path,
    output: str | Path,
    versions: Sequence[str] = (),
    fit: LoadOptions | None = None,
    allocation: bool = False,
    reporter: Reporter | None = None,
    dense: Sequence[str] = (),
) -> Shrunk:
    """Write a bundle that holds some of another's versions.

    Args:
        path, output: the bundle, and the new one's directory, which must be new or empty.
        versions: those to keep.
        fit: keep those that a plan for this budget serves instead.
        allocation: keep the versions of a map, and the map: with `fit` the plan's, else the manifest's.
        reporter: of progress.
        dense: versions of the dense matrices to keep; without it all, or with a map those that it names. Where they
            alone are named, every version of the experts stays.

    Raises:
        InputError: for contradicting or missing choices, or a version, map or fitting budget that does not exist.
        BundleError: when a kept file is damaged: nothing is written then.
        TargetError: when the output cannot be written.
    """
    reporter, target = reporter or Reporter(), Path(output)
    check_target(target)
    bundle = open_bundle(path)
    if dense and not (versions or fit or allocation):
        chosen, table = [v.name for v in bundle.versions], bundle.manifest.allocation
    else:
        chosen, table = _choose(bundle, versions, fit, allocation)
    kept, table = _choose_dense(bundle, dense, table if allocation else None, table)
    names = [expert_file(v, layer.index) for v in chosen for layer in bundle.layers]
    names += [name for v in kept for name in bundle.manifest.dense_files(v)]
    _check(bundle, {*bundle.manifest.files, *names}, reporter)
    manifest = replace(
        bundle.manifest,
        versions=tuple(v for v in bundle.manifest.versions if v.name in chosen),
        dense_versions=tuple(v for v in bundle.manifest.dense_versions if v.name in kept),
        allocation=table,
        provenance={
            **bundle.manifest.provenance,
            "shrunk": [*_before(bundle), _record(bundle, versions or dense, fit, chosen, kept)],
        },
    )
    reporter.stage("shrink", len(bundle.manifest.files) + len(names))
    with BundleWriter(target) as writer:
        for name, entry in bundle.manifest.files.items():
            if name != "README.md":
                reporter.step(name)
                writer.take(name, bundle.path / name, entry, link=name.endswith(_LINKED))
        for name in names:
            reporter.step(name)
            writer.adopt(name, bundle.path / name, bundle.manifest.expert_files[name])
        card = model_card(writer.with_files(manifest), bundle.calibration(), chosen)
        writer.path("README.md").write_text(card, encoding="utf-8")
        written = writer.finish(manifest)
    before, after = _bytes(bundle), _bytes(Bundle(target, written, written.versions))
    return Shrunk(target, tuple(chosen), tuple(kept), before, after, None if table is None else table.name)


def _choose(
    bundle: Bundle, versions: Sequence[str], fit: LoadOptions | None, allocation: bool
) -> tuple[list[str], Allocation | None]:
    """The versions that are kept, in the bundle's order, and the map."""
    if versions and (fit or allocation):
        raise InputError("--versions says what to keep: give it alone, or --fit and --allocation")
    here = [v.name for v in bundle.versions]
    table = bundle.manifest.allocation
    if fit is not None:
        found = fitting(bundle, fit)
        kept = set(found.versions)
        if allocation:
            if found.table is None:
                raise InputError(f"policy {fit.policy} places experts while it serves: no map says what it needs")
            table = Allocation(f"plan for {fit.budget} bytes", found.table)
    elif allocation:
        if table is None:
            raise InputError(f"{bundle.path}: its manifest holds no allocation: give --fit as well, for the plan's")
        kept = {name for row in table.versions for name in row}
    elif versions:
        kept = set(versions)
    else:
        raise InputError("nothing says what to keep: give --versions, --fit or --allocation")
    for name in sorted(kept - set(here)):
        raise InputError(f"{bundle.path}: has no version {name!r}: here are {', '.join(here)}")
    if table is not None and not {name for row in table.versions for name in row} <= kept:
        table = None  # it names what goes
    return [name for name in here if name in kept], table


def _choose_dense(
    bundle: Bundle, dense: Sequence[str], wanted: Allocation | None, table: Allocation | None
) -> tuple[list[str], Allocation | None]:
    """The versions of the dense matrices that are kept, and the map without what it says of those that go."""
    here = [v.name for v in bundle.dense_versions]
    for name in sorted(set(dense) - set(here)):
        what = f"here are {', '.join(here)}" if here else "its dense matrices have no versions"
        raise InputError(f"{bundle.path}: has no version {name!r} of dense matrices: {what}")
    named = set(dense) or set(wanted.dense or () if wanted else ()) or set(here)
    if table is not None and table.dense is not None and not set(table.dense) <= named:
        table = replace(table, dense=None)
    return [name for name in here if name in named], table


def _check(bundle: Bundle, names: set[str], reporter: Reporter) -> None:
    problems: list[Problem] = []
    reporter.stage("verify digests", len(names))
    for name, found in verify(bundle, only=names):
        reporter.step(name)
        problems += found
    if problems:
        raise BundleError(problems)


def _before(bundle: Bundle) -> list[object]:
    """What the manifest says of earlier times."""
    found = bundle.manifest.provenance.get("shrunk")
    return list(found) if isinstance(found, list) else []


def _record(
    bundle: Bundle, versions: Sequence[str], fit: LoadOptions | None, chosen: Sequence[str], dense: Sequence[str]
) -> dict[str, object]:
    digest = hashlib.sha256((bundle.path / MANIFEST).read_bytes()).hexdigest()
    why = "versions" if versions else f"fit {fit.budget}" if fit else "allocation"
    note: dict[str, object] = {
        "manifest_sha256": digest,
        "from": [v.name for v in bundle.versions],
        "kept": list(chosen),
        "by": why,
    }
    if dense:
        note["dense"] = list(dense)
    return note


def _bytes(bundle: Bundle) -> int:
    packed = [bundle.version_bytes(v.name) for v in bundle.versions]
    packed += [bundle.dense_bytes(v.name) for v in bundle.dense_versions]
    return sum(e.size for e in bundle.manifest.files.values()) + sum(packed)
