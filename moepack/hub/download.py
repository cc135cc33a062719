"""Fetch bundles: whole, some versions, or the versions that a budget serves. A stopped pull can be continued.

Only files that the manifest lists are fetched, if their sizes are as listed. Files enter the target after their digests
are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import BundleError, InputError, Problem, TargetError
from moepack.pack.hub_files import fetch_files
from moepack.pack.hub_name import on_hub
from moepack.pack.manifest import CARD, LEFTOVERS, MANIFEST
from moepack.pack.reader import Bundle, verify
from moepack.pack.spec import version_names
from moepack.pack.tables import TABLES
from moepack.pack.writer import check_room
from moepack.reports.fitting import Described, fitting
from moepack.runtime.planning.options import LoadOptions
from moepack.shared.progress import SILENT, Reporter

from .errors import HubError, hub_errors
from .remote import PUSHING, Remote, read_remote
from .staging import Staging, read_record

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_CARD_BYTES = 16 << 20
# Fetches these files of the manifest and checks them; returns the bundle as far as it is here.
Fetch = Callable[[Sequence[str]], Described]
Chooser = Callable[[Remote, Fetch], Sequence[str]]  # chooses versions of a repository's bundle before weights are here


def pull(
    repo: str,
    target: str | Path,
    versions: Sequence[str] = (),
    revision: str | None = None,
    reporter: Reporter = SILENT,
    add: Sequence[str] = (),
    fit: LoadOptions | None = None,
    dense: Sequence[str] = (),
    chooser: Chooser | None = None,
) -> Path:
    """Download a bundle, or only some of its versions, and verify it.

    A second run continues a stopped pull. A bundle in the target is completed from the commit that it came from.

    Args:
        repo: OWNER/NAME.
        target: the bundle's directory.
        versions: the versions to fetch; by default all.
        revision: a branch, tag or commit.
        reporter: receives progress.
        add: versions to add to the bundle in the target.
        fit: fetch the versions that a plan for this budget serves.
        dense: versions of the dense matrices; by default the target's, or else the most precise.
        chooser: fetch the versions that it chooses.

    Raises:
        InputError: for a version that the bundle lacks, or a budget too small for any version.
        TargetError: if the target holds something else, or the disk has no room.
        BundleError: if the repository's manifest is invalid, or a file arrived damaged.
        HubError: if the Hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    target = Path(target)
    wanted = tuple(versions) or tuple(add)
    _check(target, versions, add, fit, dense)
    api = HfApi()
    if on_hub(repo, MANIFEST, PUSHING, instead="", revision=revision) is None:
        raise HubError(f"{repo}: is not a moepack bundle: it has no {MANIFEST}")
    with hub_errors(repo, reporter):
        newest = read_remote(api, repo, revision)
        if newest is None:
            raise HubError(f"{repo}: a push to it has not ended: try again later, or name an earlier --revision")
        remote = _same(api, newest, target, revision, reporter)
        for name in wanted:
            if name not in remote.versions:
                here = ", ".join(remote.versions) or "none"
                raise InputError(f"{remote.repo}: has no version {name}: it has {here}")
        if not remote.versions:
            raise HubError(f"{repo}: holds no version as a whole: a push to it has not ended, or lost its files")
        # A chooser's target may hold dense matrices that an earlier run asked for by name.
        of_dense = _dense(remote, None if chooser else target, dense)
        chooser = chooser or (_fitting(fit, reporter) if fit else None)
        with Staging(target) as staging:
            chosen = wanted or (chooser(remote, _fetcher(api, remote, staging)) if chooser else remote.versions)
            _pull(api, remote, staging, chosen, of_dense, reporter)
    return target


def _dense(remote: Remote, target: Path | None, wanted: Sequence[str]) -> tuple[str, ...]:
    manifest = remote.manifest
    here = ", ".join(remote.dense)
    for name in wanted:
        if name not in remote.dense:
            what = f"it has {here or 'none'}" if manifest.dense else "these have no versions in it"
            raise InputError(f"{remote.repo}: has no version {name} of dense matrices: {what}")
    if wanted or not manifest.dense:
        return tuple(wanted)
    if not remote.dense:
        raise HubError(f"{remote.repo}: holds no version of its dense matrices as a whole: a push to it has not ended")
    if target is None:
        return remote.dense[:1]
    sizes = {v.name: remote.listed(manifest.dense_files(v.name)) for v in manifest.dense_versions}
    has = [v for v, files in sizes.items() if all(_has(target / name, size) for name, size in files.items())]
    return () if has else remote.dense[:1]


def _check(
    target: Path, versions: Sequence[str], add: Sequence[str], fit: LoadOptions | None, dense: Sequence[str]
) -> None:
    if sum(map(bool, (versions, add, fit))) > 1:
        raise InputError("--versions, --add and --fit each say which versions to fetch: give one of them")
    for name in (*versions, *add, *dense):
        if name not in version_names():
            raise InputError(f"version {name!r} is unknown: there are {', '.join(version_names())}")
    if add and not (target / MANIFEST).is_file():
        raise TargetError(f"{target}: not a bundle to add a version to: pull one with --versions")


def _same(api: HfApi, remote: Remote, target: Path, revision: str | None, reporter: Reporter) -> Remote:
    """Choose the commit to pull from: the newest, or the one that the bundle in the target came from."""
    mine = target / MANIFEST
    if not mine.is_file() or mine.read_bytes() == remote.data:
        return remote
    record = read_record(target)
    if revision is None and record.get("repo") == remote.repo and record.get("commit") not in (None, remote.commit):
        earlier = read_remote(api, remote.repo, record["commit"])
        if earlier is not None and earlier.data == mine.read_bytes():
            reporter.note(f"{remote.repo} has changed since: pulling from commit {earlier.commit}, as before")
            return earlier
    raise TargetError(f"{target}: is not empty, and not this bundle: name a new directory")


def _pull(
    api: HfApi, remote: Remote, staging: Staging, versions: Sequence[str], dense: Sequence[str], reporter: Reporter
) -> None:
    exports = any(v.holds for v in remote.manifest.versions if v.name in versions)
    names = [n for n in remote.manifest.files if n != LEFTOVERS or (exports and n in remote.sizes)]
    names += [f for v in versions for f in remote.experts(v)]
    sizes = remote.listed([*names, *(f for v in dense for f in remote.manifest.dense_files(v))])
    missing = {name: size for name, size in sizes.items() if not _has(staging.target / name, size)}
    _check_room(staging, missing)
    _fetch(api, remote, staging.files, missing, reporter)
    _verify(remote, staging.files, set(missing), reporter)
    _verify(remote, staging.target, sizes.keys() - missing.keys(), reporter)
    card = {n: remote.sizes[n] for n in CARD if n in remote.sizes and n not in sizes}
    card = {n: size for n, size in card.items() if size <= _CARD_BYTES and not (staging.target / n).exists()}
    with SILENT.hub_bars():
        fetch_files(remote.repo, list(card), remote.commit, local_dir=staging.files, token=api.token)
    staging.publish([*missing, *card], remote.data, {"repo": remote.repo, "commit": remote.commit})


def _has(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _check_room(staging: Staging, missing: Mapping[str, int]) -> None:
    needed = sum(size for name, size in missing.items() if not _has(staging.files / name, size))
    partly = sum(f.stat().st_size for f in staging.files.rglob("*.incomplete"))
    check_room(staging.target, staging.target, needed - partly)


def _fetch(api: HfApi, remote: Remote, folder: Path, sizes: Mapping[str, int], reporter: Reporter) -> None:
    problems = []
    for name, size in sizes.items():
        if (found := remote.sizes.get(name)) != size:
            said = "is not there" if found is None else f"has {found} bytes"
            problems.append(Problem(f"{remote.repo}/{name}", "size", f"{said}, the manifest says {size} bytes"))
    if problems:
        raise BundleError(problems)
    reporter.stage("fetch", 1)
    reporter.step(remote.repo)
    reporter.inner("bytes", sum(sizes.values()))
    with SILENT.hub_bars():  # which hides them: the reporter's own are shown
        fetch_files(remote.repo, list(sizes), remote.commit, reporter.advance, local_dir=folder, token=api.token)


def _verify(remote: Remote, root: Path, names: set[str], reporter: Reporter) -> None:
    """Check the digests of files under `root`; delete files that do not match, and raise BundleError for them."""
    versions = tuple(v for v in remote.manifest.versions if any(n in names for n in remote.experts(v.name)))
    problems: list[Problem] = []
    reporter.stage("verify digests", len(names))
    for name, found in verify(Bundle(root, remote.manifest, versions), only=names):
        reporter.step(name)
        if found:
            (root / name).unlink(missing_ok=True)
        problems += [replace(p, message=f"{p.message}; pull again to fetch it anew") for p in found]
    if problems:
        raise BundleError(problems)


def _fetcher(api: HfApi, remote: Remote, staging: Staging) -> Fetch:
    """What fetches files for a chooser."""
    versions = tuple(v for v in remote.manifest.versions if v.name in remote.versions)
    dense = tuple(v for v in remote.manifest.dense_versions if v.name in remote.dense)

    def fetch(names: Sequence[str]) -> Described:
        sizes = remote.listed(names)
        root = staging.target
        if not all(_has(root / name, size) for name, size in sizes.items()):
            root = staging.files
            _fetch(api, remote, root, sizes, SILENT)
        _verify(remote, root, set(names), SILENT)
        return Described(root, remote.manifest, versions, dense)

    return fetch


def _fitting(fit: LoadOptions, reporter: Reporter) -> Chooser:
    def chosen(remote: Remote, fetch: Fetch) -> Sequence[str]:
        names = ["config.json", TABLES]
        for name in names:
            if name not in remote.manifest.files:
                raise BundleError.single(f"{remote.repo}/{name}", "missing", "not in the manifest")
        described = fetch(names)
        try:
            found = fitting(described, fit)
        except InputError as error:  # its message begins with the folder of the fetched files
            raise InputError(str(error).replace(str(described.path), remote.repo)) from None
        reporter.note(f"{fit.budget:,} bytes hold {found.text}: fetching {', '.join(found.versions)}")
        return found.versions

    return chosen
