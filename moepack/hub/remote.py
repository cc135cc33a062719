"""Read a repository on the Hub: its commit, its manifest, and which of the manifest's files it holds."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import BundleError
from moepack.pack.hub_errors import patiently
from moepack.pack.manifest import CARD, MANIFEST, MAX_BYTES, Manifest
from moepack.pack.manifest.parser import parse_manifest
from moepack.pack.spec import expert_file

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

PUSHING = "manifest.partial.json"  # the manifest's name until a push is complete
_AT_ONCE = 500  # names in one request


@dataclass(frozen=True, slots=True)
class Remote:
    """A bundle in a repository, at one commit."""

    repo: str  # OWNER/NAME
    commit: str  # 40 hexadecimal digits
    data: bytes  # the manifest's bytes
    manifest: Manifest
    sizes: Mapping[str, int]  # file name -> bytes; the files of manifest and card that the repository holds

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions of experts with all their files, the most precise first."""
        return tuple(v.name for v in self.manifest.versions if self.sizes.keys() >= {*self.experts(v.name)})

    @property
    def dense(self) -> tuple[str, ...]:
        """Versions of dense matrices with all their files, the most precise first."""
        files = self.manifest.dense_files
        return tuple(v.name for v in self.manifest.dense_versions if self.sizes.keys() >= {*files(v.name)})

    def listed(self, names: Iterable[str]) -> dict[str, int]:
        """File name -> size in bytes in the manifest, for these files."""
        files = self.manifest.files
        experts = self.manifest.expert_files
        return {name: files[name].size if name in files else experts[name].size for name in names}

    def experts(self, version: str) -> list[str]:
        """The expert files of a version."""
        return [expert_file(version, layer.index) for layer in self.manifest.layers]


def files_of(api: HfApi, repo: str, names: Iterable[str], revision: str | None) -> dict[str, RepoFile]:
    """The files of `names` that the repository has. Listing the whole repository would take longer."""
    from huggingface_hub import RepoFile

    wanted = list(names)
    files = dict[str, RepoFile]()
    for at in range(0, len(wanted), _AT_ONCE):
        asked = wanted[at : at + _AT_ONCE]
        found = patiently(functools.partial(api.get_paths_info, repo, asked, revision=revision))
        files.update({f.path: f for f in found if isinstance(f, RepoFile)})
    return files


def is_same(file: RepoFile | None, local: Path | bytes) -> bool:
    """Compare a repository's file with local bytes by digest: SHA-256 for LFS files, git's for others."""
    if file is None or file.size != (len(local) if isinstance(local, bytes) else local.stat().st_size):
        return False
    with io.BytesIO(local) if isinstance(local, bytes) else local.open("rb") as f:
        if file.lfs is not None:
            return hashlib.file_digest(f, "sha256").hexdigest() == file.lfs.sha256
        return hashlib.sha1(b"blob %d\0" % file.size + f.read()).hexdigest() == file.blob_id


def read_small(api: HfApi, repo: str, name: str, revision: str | None) -> tuple[bytes, str] | None:
    """Read a small file and its commit; None if the file is missing.

    Raises:
        BundleError: for a file larger than a manifest may be; it is not fetched.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError

    try:
        url = hf_hub_url(repo, name, revision=revision, endpoint=api.endpoint)
        facts = patiently(lambda: get_hf_file_metadata(url, api.token))
    except EntryNotFoundError:
        return None
    commit = str(facts.commit_hash)
    if facts.size is not None and facts.size > MAX_BYTES:
        raise BundleError.single(f"{repo}/{name}", "size", f"{facts.size} bytes, more than {MAX_BYTES}")
    path = patiently(lambda: hf_hub_download(repo, name, revision=commit, token=api.token))
    with open(path, "rb") as f:  # noqa: PTH123
        return f.read(MAX_BYTES + 1), commit


def read_remote(api: HfApi, repo: str, revision: str | None) -> Remote | None:
    """Read the bundle in a repository; None without a manifest. Raises BundleError for an invalid manifest."""
    found = read_small(api, repo, MANIFEST, revision)
    if found is None:
        return None
    data, commit = found
    manifest = parse_manifest(data)
    files = files_of(api, repo, sorted({*manifest.files, *manifest.expert_files, *CARD}), commit)
    return Remote(repo, commit, data, manifest, {name: file.size for name, file in files.items()})
