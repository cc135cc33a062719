"""A bundle in the Hub's cache: only the files that a policy serves are fetched.

All files are of one commit, of which transformers has fetched its own files before.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from moepack.pack.errors import BundleError, InputError
from moepack.pack.hub_errors import in_one_line, patiently, reason
from moepack.pack.hub_files import fetch_files
from moepack.pack.manifest import LEFTOVERS, MANIFEST, MAX_BYTES
from moepack.pack.manifest.parser import parse_manifest
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import expert_file
from moepack.runtime.dense.choice import choose_dense
from moepack.runtime.planning.choice import versions_of
from moepack.runtime.planning.options import LoadOptions


def fetch(name: str, commit: str, asked: LoadOptions, options: Mapping[str, Any]) -> Bundle:
    """Fetch the files of a bundle that a policy needs into its snapshot, and open it.

    Versions whose download has not ended count as absent. Offline, only the versions in the cache count.

    Args:
        name: the repository's name.
        commit: the repository's commit.
        asked: the options for loading, completed by the environment's.
        options: token, cache_dir, local_files_only and force_download, as huggingface_hub takes them.

    Raises:
        InputError: for a repository that is not a bundle, or a policy that does not fit it; when the Hub refuses.
        BundleError: for an invalid manifest.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    with in_one_line(name):
        try:
            file = Path(patiently(partial(hf_hub_download, name, MANIFEST, revision=commit, **options)))
        except LocalEntryNotFoundError as error:
            why = "" if error.__cause__ is None else f": {reason(error)}"
            raise InputError(f"{name}: its {MANIFEST} is not in the cache, and cannot be fetched now{why}") from None
        except EntryNotFoundError:
            raise InputError(f"{name}: not a bundle: it has no {MANIFEST}; a push to it may not have ended") from None
    if file.stat().st_size > MAX_BYTES:
        raise BundleError.single(f"{name}/{MANIFEST}", "size", f"more than {MAX_BYTES} bytes")
    manifest = parse_manifest(file.read_bytes())
    root = file.parent
    if options.get("local_files_only") or constants.HF_HUB_OFFLINE:
        return open_bundle(root, skip_partial=True)
    first = {expert_file(v.name, manifest.layers[0].index) for v in manifest.versions}
    first |= {files[0] for v in manifest.dense_versions if (files := manifest.dense_files(v.name))}
    look = partial(HfApi(token=options.get("token")).get_paths_info, name, sorted(first), revision=commit)
    with in_one_line(name):
        there = {f.path for f in patiently(look)}  # a bundle may be published without some versions
    could = Bundle(
        root,
        manifest,
        tuple(v for v in manifest.versions if expert_file(v.name, manifest.layers[0].index) in there),
        tuple(v for v in manifest.dense_versions if manifest.dense_files(v.name)[0] in there),
    )
    if not could.versions:
        raise BundleError.single(name, "missing", "no version of the experts is there")
    sizes = {n: e.size for n, e in manifest.files.items() if n != LEFTOVERS}
    for version in versions_of(asked.policy, could, asked.in_budget):
        names = (expert_file(version, layer.index) for layer in manifest.layers)
        sizes |= {n: manifest.expert_files[n].size for n in names}
    for version in {v.name for v in choose_dense(asked.dense if manifest.dense else None, could, asked.policy)}:
        sizes |= {n: manifest.expert_files[n].size for n in manifest.dense_files(version)}
    missing = {n: size for n, size in sizes.items() if not (root / n).exists()}
    if missing:
        what = f"{len(missing)} files of {name}"
        bar = tqdm(desc=what, total=sum(missing.values()), unit="B", unit_scale=True)  # type: ignore[no-untyped-call]
        with bar, in_one_line(name):
            fetch_files(name, list(missing), commit, bar.update, **options)
    return open_bundle(root, skip_partial=True)
