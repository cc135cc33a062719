"""What a repository holds: its commit, its manifest, and which of the manifest's files are there. Changes nothing."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import BundleError
from moepack.pack.manifest import CARD as CARD
from moepack.pack.manifest import MANIFEST, MAX_BYTES, Manifest
from moepack.pack.manifest.parser import parse_manifest
from moepack.pack.spec import expert_file

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

PUSHING = "manifest.partial.json"  # stands for the manifest while a push is under way
_AT_ONCE = 500  # names in one request


@dataclass(frozen=True, slots=True)
class Remote:
    """A bundle in a repository, at one commit.

    Attributes:
        repo: OWNER/NAME.
        commit: 40 hexadecimal digits.
        data: the manifest's bytes.
        manifest: the manifest.
        sizes: bytes of those of its files that are there, and of the card's.
    """

    repo: str
    commit: str
    data: bytes
    manifest: Manifest
    sizes: Mapping[str, int]

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of which all files are there, the most precise first."""
        return tuple(
            v.name
            for v in self.manifest.versions
            if all(expert_file(v.name, layer.index) in self.sizes for layer in self.manifest.layers)
        )

    @property
    def dense(self) -> tuple[str, ...]:
        """The same of the dense matrices."""
        return tuple(
            v.name
            for v in self.manifest.dense_versions
            if all(name in self.sizes for name in self.manifest.dense_files(v.name))
        )

    def listed(self, names: Iterable[str]) -> dict[str, int]:
        """Files of the manifest with the bytes that it gives."""
        files, experts = self.manifest.files, self.manifest.expert_files
        return {name: files[name].size if name in files else experts[name].size for name in names}

    def experts(self, version: str) -> list[str]:
        """The files of a version."""
        return [expert_file(version, layer.index) for layer in self.manifest.layers]


def files_of(api: HfApi, repo: str, names: Iterable[str], revision: str | None) -> dict[str, RepoFile]:
    """Those of `names` that are there. Asks for names: listing a repository takes as long as it is large."""
    from huggingface_hub import RepoFile

    wanted, files = list(names), dict[str, RepoFile]()
    for at in range(0, len(wanted), _AT_ONCE):
        found = api.get_paths_info(repo, wanted[at : at + _AT_ONCE], revision=revision)
        files.update({f.path: f for f in found if isinstance(f, RepoFile)})
    return files


def sizes_of(api: HfApi, repo: str, names: Iterable[str], revision: str | None) -> dict[str, int]:
    """Bytes of those of `names` that are there."""
    return {name: file.size for name, file in files_of(api, repo, names, revision).items()}


def is_same(file: RepoFile | None, local: Path | bytes) -> bool:
    """Whether a repository's file has these bytes, by its digest: SHA-256 of a large one, git's of a small one."""
    if file is None or file.size != (len(local) if isinstance(local, bytes) else local.stat().st_size):
        return False
    with io.BytesIO(local) if isinstance(local, bytes) else local.open("rb") as f:
        if file.lfs is not None:
            return hashlib.file_digest(f, "sha256").hexdigest() == file.lfs.sha256
        return hashlib.sha1(b"blob %d\0" % file.size + f.read()).hexdigest() == file.blob_id


def read_small(api: HfApi, repo: str, name: str, revision: str | None) -> tuple[bytes, str] | None:
    """A small file and the commit that it was read at; None where there is none.

    Raises:
        BundleError: for one of more bytes than a manifest may have: nothing of it is fetched.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        facts = get_hf_file_metadata(hf_hub_url(repo, name, revision=revision, endpoint=api.endpoint), api.token)
    except EntryNotFoundError:
        return None
    commit = str(facts.commit_hash)
    if facts.size is not None and facts.size > MAX_BYTES:
        raise BundleError.single(f"{repo}/{name}", "size", f"{facts.size} bytes, more than {MAX_BYTES}")
    with open(hf_hub_download(repo, name, revision=commit, token=api.token), "rb") as f:  # noqa: PTH123
        return f.read(MAX_BYTES + 1), commit


def read_remote(api: HfApi, repo: str, revision: str | None) -> Remote | None:
    """The bundle in a repository; None where it has no manifest.

    Raises:
        BundleError: for a manifest that is not one.
    """
    found = read_small(api, repo, MANIFEST, revision)
    if found is None:
        return None
    data, commit = found
    manifest = parse_manifest(data)
    names = {*manifest.files, *manifest.expert_files, *CARD}
    return Remote(repo, commit, data, manifest, sizes_of(api, repo, sorted(names), commit))
