"""Publishing bundles to a Hugging Face Hub and fetching them, whole or by version.

Works with any endpoint that huggingface_hub speaks to (HF_ENDPOINT). A pulled bundle is checked against its manifest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moepack.pack.errors import BundleError, InputError, MoepackError, TargetError
from moepack.pack.hub_name import on_hub
from moepack.pack.manifest import MANIFEST, parse_manifest
from moepack.pack.reader import open_bundle
from moepack.pack.spec import version_names
from moepack.reports.verify import verify

from .progress import Reporter


class HubError(MoepackError):
    """The Hub refused, or could not be reached."""


def push(
    path: str | Path, repo: str, private: bool = False, revision: str | None = None, reporter: Reporter | None = None
) -> str:
    """Upload a bundle, verified first; returns the address of the commit.

    Raises:
        BundleError: when the bundle is damaged: nothing is uploaded then.
        HubError: when the Hub refuses or cannot be reached.
    """
    from huggingface_hub import HfApi

    reporter = reporter or Reporter()
    problems = verify(path, reporter=reporter)
    if problems:
        raise BundleError(problems)
    bundle = open_bundle(path)
    names = [*bundle.manifest.files, MANIFEST, *(f"experts/{v.name}/*" for v in bundle.versions)]
    with _hub_errors(repo), reporter.hub_bars():
        api = HfApi()
        api.create_repo(repo, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo,
            folder_path=str(path),
            allow_patterns=names,
            revision=revision,
            commit_message="Upload a moepack bundle",
        )
    return str(commit.commit_url)


def pull(
    repo: str,
    target: str | Path,
    versions: Sequence[str] = (),
    revision: str | None = None,
    reporter: Reporter | None = None,
) -> Path:
    """Download a bundle, or only some of its versions, and verify it.

    An existing target is completed if it is the same bundle: further versions can be pulled into it later.

    Raises:
        InputError: for a version that the bundle does not have.
        TargetError: when the target holds something else.
        BundleError: when what arrived is damaged.
        HubError: when the Hub refuses or cannot be reached.
    """
    from huggingface_hub import hf_hub_download, snapshot_download

    reporter = reporter or Reporter()
    target = Path(target)
    for name in versions:
        if name not in version_names():
            raise InputError(f"version {name!r} is unknown: there are {', '.join(version_names())}")
    with _hub_errors(repo), reporter.hub_bars():
        if on_hub(repo, MANIFEST, instead="", revision=revision) is None:
            raise HubError(f"{repo}: is not a moepack bundle: it has no {MANIFEST}")
        remote = Path(hf_hub_download(repo, MANIFEST, revision=revision))
        data = remote.read_bytes()
        manifest = parse_manifest(data)
        commit = remote.parent.name if len(remote.parent.name) == 40 else revision
        have = [v.name for v in manifest.versions]
        for name in versions:
            if name not in have:
                raise InputError(f"{repo}: has no version {name}: it has {', '.join(have)}")
        if target.exists() and any(target.iterdir()):
            mine = target / MANIFEST
            if not mine.is_file() or mine.read_bytes() != data:
                raise TargetError(f"{target}: is not empty, and not this bundle: name a new directory")
        wanted = [*manifest.files, *(f"experts/{name}/*" for name in (versions or have))]
        snapshot_download(repo, revision=commit, local_dir=target, allow_patterns=wanted)
        (target / MANIFEST).write_bytes(data)  # last: without it the directory is not a bundle
    problems = verify(target, reporter=reporter)
    if problems:
        for name in {p.location.partition(":")[0] for p in problems}:
            if name in manifest.files or name in manifest.expert_files:
                (target / name).unlink(missing_ok=True)
        raise BundleError([replace(p, message=f"{p.message}; pull again to fetch it anew") for p in problems])
    return target


class _hub_errors:
    """Turns the Hub library's errors into one line."""

    def __init__(self, repo: str) -> None:
        self._repo = repo

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: object) -> None:
        if error is None or isinstance(error, MoepackError | KeyboardInterrupt):
            return
        from huggingface_hub.errors import RepositoryNotFoundError

        if isinstance(error, RepositoryNotFoundError):
            raise HubError(f"{self._repo}: no such repository, or no access to it: log in with hf auth login") from None
        if isinstance(error, Exception):  # the library's own, the operating system's, and those of its HTTP library
            text = str(error).strip().splitlines()
            raise HubError(f"{self._repo}: {text[0] if text else type(error).__name__}") from None
