"""Make a bundle with fewer versions from another; files are linked where the file system allows it.

Nothing is quantised or decoded; digests are checked first. The format holds a version for all experts or for none
(pack/FORMAT.md). So to keep an allocation, a map that gives each expert one version, is to keep all versions it names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moepack.pack.errors import BundleError, InputError, Problem
from moepack.pack.manifest import LEFTOVERS, MANIFEST, Allocation
from moepack.pack.reader import Bundle, open_bundle, verify
from moepack.pack.spec import expert_file, lossless
from moepack.pack.writer import BundleWriter, check_target
from moepack.reports.fitting import fitting
from moepack.runtime.planning.options import LoadOptions
from moepack.shared.progress import SILENT, Reporter

from .model_card import model_card
from .released import TENSORS

_LINKED = (".safetensors",)  # other files are small, and people edit them: with a link, both bundles would change


@dataclass(frozen=True, slots=True)
class Shrunk:
    """The result of `shrink`."""

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
    reporter: Reporter = SILENT,
    dense: Sequence[str] = (),
) -> Shrunk:
    """Write a bundle that holds some of another bundle's versions.

    Args:
        path, output: the bundle, and the new bundle's directory, which must be new or empty.
        versions: the versions to keep.
        fit: keep the versions that a plan for this budget serves.
        allocation: keep a map and the versions that it names: with `fit` the plan's map, else the manifest's.
        dense: versions of dense matrices to keep; by default those of the plan or the map, else all. A plan serves the
            most precise of those that are named. If only `dense` is given, all versions of the experts stay.

    Raises:
        InputError: for contradicting or missing choices, a missing version or map, or a budget that nothing fits.
        BundleError: when a kept file is damaged; nothing is written then.
        TargetError: when the output cannot be written.
    """
    target = Path(output)
    check_target(target)
    bundle = open_bundle(path)
    _check_dense(bundle, dense)
    planned: Sequence[str] = ()
    if dense and not (versions or fit or allocation):
        chosen = [v.name for v in bundle.versions]
        table = bundle.manifest.allocation
    else:
        chosen, planned, table = _choose(bundle, versions, fit, allocation, dense)
    kept, table = _choose_dense(bundle, dense or planned, table)
    names = [expert_file(v, layer.index) for v in chosen for layer in bundle.layers]
    names += [name for v in kept for name in bundle.manifest.dense_files(v)]
    _check(bundle, {*bundle.files, *names}, reporter)
    manifest = replace(
        bundle.manifest,
        versions=tuple(v for v in bundle.manifest.versions if v.name in chosen),
        dense_versions=tuple(v for v in bundle.manifest.dense_versions if v.name in kept),
        allocation=table,
        provenance={**bundle.manifest.provenance, "shrunk": _history(bundle, versions or dense, fit, chosen, kept)},
    )
    export = lossless(manifest.versions) is not None and bundle.files.keys() == bundle.manifest.files.keys()
    reporter.stage("shrink", len(bundle.files) + len(names))
    taken = [n for n in bundle.files if n != "README.md" and (export or n not in (TENSORS, LEFTOVERS))]
    linked = [bundle.path / n for n in (*taken, *names) if n.endswith(_LINKED)]
    with BundleWriter(target) as writer:
        writer.check_room(linked, sum(bundle.files[n] for n in taken if not n.endswith(_LINKED)))
        for name in taken:
            reporter.step(name)
            writer.take(name, bundle.path / name, bundle.manifest.files[name], link=name.endswith(_LINKED))
        for name in names:
            reporter.step(name)
            writer.adopt(name, bundle.path / name, bundle.manifest.expert_files[name])
        card = model_card(writer.with_files(manifest), bundle.calibration(), chosen)
        writer.path("README.md").write_text(card, encoding="utf-8")
        written = writer.finish(manifest)
    sizes = _bytes(bundle), _bytes(Bundle(target, written, written.versions))
    return Shrunk(target, tuple(chosen), tuple(kept), *sizes, None if table is None else table.name)


def _choose(
    bundle: Bundle, versions: Sequence[str], fit: LoadOptions | None, allocation: bool, dense: Sequence[str]
) -> tuple[list[str], Sequence[str], Allocation | None]:
    """The experts' versions to keep, in the bundle's order; the wanted map's of dense matrices; the map that stays.

    A map does not stay if it names another version of experts.
    """
    if versions and (fit or allocation):
        raise InputError("--versions says what to keep: give it alone, or --fit and --allocation")
    here = [v.name for v in bundle.versions]
    table = bundle.manifest.allocation
    planned: Sequence[str] = ()
    if fit is not None:
        precise = next((v.name for v in bundle.dense_versions if v.name in dense), fit.dense)
        found = fitting(bundle, replace(fit, dense=precise))
        planned = found.dense
        kept = set(found.versions)
        if allocation:
            if found.table is None:
                raise InputError(f"policy {fit.policy} places experts while it serves: no map says what it needs")
            table = Allocation(f"plan for {fit.budget} bytes", found.table, found.dense or None)
    elif allocation:
        if table is None:
            raise InputError(f"{bundle.path}: its manifest holds no allocation: give --fit as well, for the plan's")
        kept = {name for row in table.versions for name in row}
        planned = table.dense or ()
    elif versions:
        kept = set(versions)
    else:
        raise InputError("nothing says what to keep: give --versions, --fit or --allocation")
    for name in sorted(kept - set(here)):
        raise InputError(f"{bundle.path}: has no version {name!r}: here are {', '.join(here)}")
    if table is not None and not {name for row in table.versions for name in row} <= kept:
        table = None  # it names a removed version
    return [name for name in here if name in kept], planned, table


def _check_dense(bundle: Bundle, dense: Sequence[str]) -> None:
    here = [v.name for v in bundle.dense_versions]
    for name in sorted(set(dense) - set(here)):
        what = f"here are {', '.join(here)}" if here else "its dense matrices have no versions"
        raise InputError(f"{bundle.path}: has no version {name!r} of dense matrices: {what}")


def _choose_dense(
    bundle: Bundle, wanted: Sequence[str], table: Allocation | None
) -> tuple[list[str], Allocation | None]:
    """The wanted versions of dense matrices, or all; and the map, without its dense versions if one is removed."""
    here = [v.name for v in bundle.dense_versions]
    named = set(wanted) or set(here)
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


def _history(
    bundle: Bundle, versions: Sequence[str], fit: LoadOptions | None, chosen: Sequence[str], dense: Sequence[str]
) -> list[object]:
    earlier = bundle.manifest.provenance.get("shrunk")
    digest = hashlib.sha256((bundle.path / MANIFEST).read_bytes()).hexdigest()
    why = "allocation"
    if versions:
        why = "versions"
    elif fit:
        why = f"fit {fit.budget}"
    here = [v.name for v in bundle.versions]
    note: dict[str, object] = {"manifest_sha256": digest, "from": here, "kept": list(chosen), "by": why}
    note |= {"dense": list(dense)} if dense else {}
    return [*(earlier if isinstance(earlier, list) else ()), note]


def _bytes(bundle: Bundle) -> int:
    packed = [bundle.version_bytes(v.name) for v in bundle.versions]
    packed += [bundle.dense_bytes(v.name) for v in bundle.dense_versions]
    return sum(bundle.files.values()) + sum(packed)
