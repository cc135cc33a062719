"""Publish a bundle in several commits, the manifest last. A second run continues a stopped push.

A repository without a manifest is not a bundle. The first commit removes the old manifest and the files absent from the
new one, and adds the new manifest under another name. Further commits add groups of missing files. The last commit adds
the manifest and the card. Bytes that the Hub has received are not sent again, committed or not. huggingface_hub's own
upload of large folders chooses the order of the files, so a partial bundle could look complete.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from moepack.pack.errors import BundleError, MissingExtraError
from moepack.pack.hub_errors import patiently
from moepack.pack.manifest import CARD, MANIFEST, Manifest
from moepack.pack.manifest.parser import parse_manifest
from moepack.pack.reader import Bundle, open_bundle
from moepack.pipeline.model_card import MeasuredKl, model_card
from moepack.reports.inspect import plot
from moepack.reports.verify import verify
from moepack.shared.progress import SILENT, Reporter
from moepack.shared.progress import size as size_text

from .errors import HubError, hub_errors
from .measured import read_divergences
from .remote import PUSHING, files_of, is_same, read_small

if TYPE_CHECKING:
    from huggingface_hub import HfApi

FILES = 32  # the most files of a commit
_NO_XET = (404, 405, 501)  # statuses of Hubs without Xet storage
BYTES = 16 << 30  # the most bytes of a commit with several files
# Files that a new repository on the Hub may hold.
_EMPTY = (".gitattributes", ".gitignore", "readme.md", "license", "license.txt", "license.md", "notice", "notice.txt")


def push(
    path: str | Path,
    repo: str,
    private: bool = False,
    revision: str | None = None,
    reporter: Reporter = SILENT,
    base_model: str | None = None,
    measured: Sequence[Path] = (),
) -> str:
    """Verify and upload a bundle; return the web address of the last commit.

    A second run continues a stopped push, and writes the repository's card again.

    Args:
        path: the bundle.
        repo: OWNER/NAME; created if missing.
        private: whether a new repository is private.
        revision: the branch to push to; created if missing.
        reporter: receives progress.
        base_model: the checkpoint's Hub id for the card; by default the id that the bundle was built from, if any.
        measured: files that `moepack eval --kl --json` printed of versions, for the card.

    Raises:
        BundleError: if the bundle is damaged; nothing is uploaded then.
        HubError: if the repository holds something else, the Hub refuses, or it cannot be reached.
    """
    from huggingface_hub import HfApi

    bundle = open_bundle(path)
    kl = read_divergences(measured, [v.name for v in bundle.versions])
    if problems := verify(path, reporter=reporter):
        raise BundleError(problems)
    manifest = replace(bundle.manifest, files={n: e for n, e in bundle.manifest.files.items() if n not in CARD})
    with hub_errors(repo, reporter, "write"), reporter.hub_bars():
        api = HfApi()
        patiently(lambda: api.create_repo(repo, private=private, exist_ok=True), reporter.note)
        if revision is not None:
            patiently(lambda: api.create_branch(repo, branch=revision, exist_ok=True), reporter.note)
        there = _look(api, repo, revision, manifest)
        card = _card(bundle, repo, base_model, kl, reporter)
        with _uploads(api, there, reporter):
            return _push(api, bundle, manifest.to_json(), there, card, reporter)


@contextmanager
def _uploads(api: HfApi, there: _There, reporter: Reporter) -> Iterator[None]:
    """Upload large files as LFS objects where the Hub has no Xet storage, which huggingface_hub takes for granted."""
    from huggingface_hub import constants

    disabled = constants.HF_HUB_DISABLE_XET
    if not disabled and not _has_xet(api, there):
        reporter.note(f"{api.endpoint} has no Xet storage: large files are sent as LFS objects")
        constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    finally:
        constants.HF_HUB_DISABLE_XET = disabled


def _has_xet(api: HfApi, there: _There) -> bool:
    """Ask the Hub for a token of its Xet storage. Raises HfHubHTTPError if the Hub refuses it."""
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff  # type: ignore[attr-defined]

    branch = quote(there.revision or "main", safe="")
    url = f"{api.endpoint}/api/models/{there.repo}/xet-write-token/{branch}"
    answer = http_backoff("GET", url, headers=build_hf_headers(token=api.token))
    if answer.status_code in _NO_XET:
        return False
    hf_raise_for_status(answer)
    return "X-Xet-Cas-Url" in answer.headers


@dataclass(frozen=True, slots=True)
class _There:
    repo: str
    revision: str | None  # the branch
    commit: str  # the head of the branch
    manifest: bytes | None  # the repository's manifest; None without one
    pushing: bytes | None  # the manifest that a stopped push left under another name; None without one
    listed: frozenset[str]  # files that either manifest names


def _look(api: HfApi, repo: str, revision: str | None, ours: Manifest) -> _There:
    """Read a repository; raise HubError unless it is empty, or holds a whole or partial bundle of this model."""
    info = patiently(lambda: api.model_info(repo, revision=revision))
    commit = str(info.sha)
    found = dict[str, bytes]()
    listed = set[str]()
    for name in (MANIFEST, PUSHING):
        if (read := read_small(api, repo, name, commit)) is not None:
            try:
                manifest = parse_manifest(read[0])
            except BundleError:
                raise HubError(f"{repo}: holds a {name} that is not a bundle's: name another repository") from None
            (model, files), (our_model, our_files) = _origin(manifest), _origin(ours)
            if (dict(manifest.model), manifest.layers, files) != (dict(ours.model), ours.layers, our_files):
                what = f"{model}, this bundle is {our_model}"
                raise HubError(f"{repo}: holds a bundle of another model ({what}): name another repository")
            found[name] = read[0]
            listed |= {*manifest.files, *manifest.expert_files}
    if not found:
        others = [s.rfilename for s in info.siblings or () if s.rfilename.lower() not in _EMPTY]
        if others:
            raise HubError(f"{repo}: contains {others[0]} and is not a bundle: name another repository")
    return _There(repo, revision, commit, found.get(MANIFEST), found.get(PUSHING), frozenset(listed))


def _origin(manifest: Manifest) -> tuple[str, object]:
    given = manifest.provenance.get("checkpoint")
    checkpoint = given if isinstance(given, Mapping) else {}
    name = checkpoint.get("name") or manifest.model.get("model_type")
    return f"{str(name)[:80]!r}", checkpoint.get("files")


def _push(
    api: HfApi, bundle: Bundle, manifest: bytes, there: _There, card: Mapping[str, bytes], reporter: Reporter
) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    commit = there.commit

    def send(what: str, add: Mapping[str, Path | bytes], remove: Sequence[str] = ()) -> str:
        nonlocal commit
        operations: list[CommitOperationAdd | CommitOperationDelete] = [
            CommitOperationAdd(n, v if isinstance(v, bytes) else str(v)) for n, v in add.items()
        ]
        operations += [CommitOperationDelete(name) for name in remove]
        made = patiently(
            lambda: api.create_commit(
                there.repo, operations, commit_message=what, revision=there.revision, parent_commit=commit
            ),
            reporter.note,
        )
        commit = str(made.oid)
        return f"{api.endpoint}/{there.repo}/commit/{commit}"  # some Hubs answer a relative address

    ours = {n: size for n, size in bundle.files.items() if n not in CARD}
    names = bundle.manifest.layer_files(bundle.versions, bundle.dense_versions)
    ours |= {n: bundle.manifest.expert_files[n].size for n in names}
    if there.manifest != manifest and (there.manifest is not None or there.pushing != manifest):
        old = files_of(api, there.repo, [MANIFEST, *sorted(there.listed - ours.keys() - {*CARD})], commit)
        send("Begin to upload a moepack bundle", {PUSHING: manifest}, list(old))
    held = files_of(api, there.repo, ours, commit)
    groups = list(_groups(ours))
    reporter.stage("upload", len(groups))
    for group in groups:
        reporter.step(f"{len(group)} files, {size_text(sum(ours[name] for name in group))}, from {group[0]} on")
        paths = {name: (bundle.path / name).resolve() for name in group}
        if new := {name: path for name, path in paths.items() if not is_same(held.get(name), path)}:
            send(f"Upload {len(new)} files: {next(iter(new))} ...", new)
    arrived = files_of(api, there.repo, ours, commit)
    for name, size in ours.items():
        if name not in arrived or arrived[name].size != size:  # a .gitignore there silently excludes files
            raise HubError(f"{there.repo}: {name} did not arrive: does the repository's .gitignore exclude it?")
    last = {**card, MANIFEST: manifest}
    held = files_of(api, there.repo, [*last, PUSHING], commit)
    gone = [PUSHING] if PUSHING in held else []
    last = {name: data for name, data in last.items() if not is_same(held.get(name), data)}
    if last or gone:
        return send("Upload a moepack bundle", last, gone)
    return f"{api.endpoint}/{there.repo}/commit/{commit}"


def _groups(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    group: list[str] = []
    for name, size in sizes.items():
        if group and (len(group) == FILES or sum(sizes[n] for n in group) + size > BYTES):
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def _card(
    bundle: Bundle, repo: str, base_model: str | None, kl: Mapping[str, MeasuredKl], reporter: Reporter
) -> dict[str, bytes]:
    out: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            plot(bundle.path, Path(folder, CARD[1]))
            out[CARD[1]] = Path(folder, CARD[1]).read_bytes()
        except MissingExtraError:
            reporter.note("the card has no picture: matplotlib is not installed")
    versions = [v.name for v in bundle.versions]
    manifest = replace(bundle.manifest, dense_versions=bundle.dense_versions)  # those that are pushed
    picture = CARD[1] if out else None
    text = model_card(manifest, bundle.calibration(), versions, repo, picture, base_model, kl)
    return {CARD[0]: text.encode(), **out}
