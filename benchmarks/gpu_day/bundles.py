"""Generated bundles that stages share, and that a later run with the same `--work` finds again."""

import contextlib
import hashlib
import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import moepack.calibrate
import moepack.pack
import moepack.quantize
from benchmarks import limited
from benchmarks.limited.shapes import Shape
from moepack.pack.errors import BundleError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Version

from .rows import Setting

FEW = Shape("few", 2, 8, 2, 128, 128, 4, 2, 32, 2400)  # without a GPU, and with --quick
GROUPS = {"bf16": 0, "w8": 128, "w4": 128, "w3": 128, "w2": 64, "w1": 64, "nvfp4": 16, "mxfp4": 32}  # as recipes have
VERSIONS = {name: Version.of(name, group) for name, group in GROUPS.items()}
DIGITS = 16  # of a digest in a folder's name


def sized(setting: Setting, shape: Shape) -> Shape:
    """Return the shape that is measured in place of this one: where sizes are small, FEW in the same versions."""
    return replace(FEW, groups=shape.groups) if setting.small else shape


def made_bundle(setting: Setting, shape: Shape) -> Path:
    """Return the generated bundle of a shape as `sized`, which is written unless a whole one is there.

    Its folder is named by a digest of the shape and of the sources that write it. Opening a found bundle checks its
    manifest and the size of every file, and loading it the digest of each extent. A bundle that cannot be opened, or
    that other sources wrote, is removed before a new one is written.
    """
    shape = sized(setting, shape)
    versions = "-".join(name for name, _ in shape.groups)
    path = setting.work / f"{shape.name}-{versions}-{_made_from(shape)}"
    try:
        open_bundle(path)
        return path
    except BundleError:
        for old in setting.work.glob(f"{shape.name}-{versions}-{'[0-9a-f]' * DIGITS}"):
            shutil.rmtree(old)
    from benchmarks.limited.bundle import write_bundle

    with contextlib.redirect_stdout(None):
        write_bundle(shape, path)
    return path


@lru_cache
def _made_from(shape: Shape) -> str:
    digest = hashlib.sha256(repr(shape).encode())
    for package in (limited, moepack.calibrate, moepack.pack, moepack.quantize):
        for source in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:DIGITS]
