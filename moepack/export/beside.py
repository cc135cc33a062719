"""What every export does beside its weights: open the bundle, write config.json, copy tokenizer and other files."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from moepack.pack.errors import TargetError
from moepack.pack.files import digest_of
from moepack.pack.manifest import DENSE_INDEX, LEFTOVERS, MANIFEST
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.writer import check_target
from moepack.pipeline.released import TENSORS
from moepack.shared.version import __version__

from .files import ExportDirectory

_NOT_COPIED = ("manifest.json", "calibration.safetensors", TENSORS, LEFTOVERS, "README.md", "config.json", DENSE_INDEX)


def open_for(path: str | Path, target: Path) -> Bundle:
    """Open a bundle that is exported into `target`. Raises TargetError if that is not new or empty, or in it."""
    check_target(target)
    bundle = open_bundle(path)
    if target.resolve().is_relative_to(bundle.path.resolve()):
        raise TargetError(f"{target}: lies in the bundle: name a directory outside it")
    return bundle


def identity(bundle: Bundle) -> str:
    """The digest of a bundle's manifest, which has the digests of all of its files."""
    return digest_of(bundle.path, MANIFEST)


def libraries(*names: str) -> dict[str, str]:
    """Return the versions of the libraries that determine an export's bytes: moepack, transformers, and `others`."""
    found = {"moepack": __version__}
    for name in ("transformers", *names):
        with contextlib.suppress(metadata.PackageNotFoundError):  # one that was not installed as a package
            found[name] = metadata.version(name)
    return found


def own_config(bundle: Bundle) -> JsonObject:
    """Return the model's config.json without moepack's entries, after checking its digest."""
    bundle.check("config.json")
    config: JsonObject = json.loads((bundle.path / "config.json").read_text())
    for part in (config, config.get("text_config")):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
    return config


def copy_others(bundle: Bundle, work: ExportDirectory, config: Mapping[str, object]) -> None:
    """Copy the bundle's other files, then write config.json last, so that a killed export is not taken for a model."""
    for name in bundle.manifest.files:
        if name not in _NOT_COPIED and not name.endswith(".safetensors"):
            shutil.copyfile(bundle.path / name, work.path(ExportDirectory.FILES, name))
    work.path(ExportDirectory.FILES, "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
