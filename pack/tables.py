"""The calibration tables of a bundle: the one reader and writer of calibration.safetensors (FORMAT.md).

What the numbers are good for is for those who read them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BundleError
from .safetensors_file import Header, merge, read_header
from .spec import ExpertLayer

TABLES = "calibration.safetensors"
# Name -> dtype and shape; E experts, V versions, N windows of the layer's calibration.
_TENSORS = {
    "mse": ("F32", "EV"), "relative": ("F32", "EV"), "gated": ("F32", "EV"), "method": ("U8", "EV"),
    "tokens": ("I64", "E"), "gate_sum": ("F32", "E"),
    "prefill_counts": ("I32", "NE"), "decode_counts": ("I32", "NE"), "prefill_gates": ("F32", "NE"),
    "coactivation": ("I64", "EE"), "reuse": ("F32", ""),
}  # fmt: skip
# Not in bundles made before there were any: standard errors of the losses.
_OPTIONAL = {"mse_error": ("F32", "EV"), "relative_error": ("F32", "EV"), "gated_error": ("F32", "EV")}
_EAGER = ("tokens", "gate_sum", "mse", "relative", "gated", "method")
_NUMPY = {"F32": "<f4", "U8": "<u1", "I32": "<i4", "I64": "<i8"}

Array = NDArray[Any]


@dataclass(frozen=True)
class LayerTables:
    """One layer's tables, each as FORMAT.md has it.

    Attributes:
        index: the decoder layer's.
        tokens, gate_sum: [experts].
        mse, relative, gated: [experts, versions].
        method: [experts, versions], numbers.
        mse_error, relative_error, gated_error: [experts, versions], standard errors, or None where none were kept.
    """

    index: int
    tokens: Array
    gate_sum: Array
    mse: Array
    relative: Array
    gated: Array
    method: Array
    mse_error: Array | None = None
    relative_error: Array | None = None
    gated_error: Array | None = None


@dataclass(frozen=True)
class CalibrationTables:
    """The tables of a bundle.

    Attributes:
        path: the file.
        versions: names of the columns, whether or not the versions are here.
        methods: what the method numbers mean.
        layers: one entry a layer that has experts.
    """

    path: Path
    versions: tuple[str, ...]
    methods: tuple[str, ...]
    layers: tuple[LayerTables, ...]

    def columns(self, versions: Sequence[str]) -> list[int]:
        """Where these versions stand."""
        return [self.versions.index(name) for name in versions]

    def made_by(self, version: str) -> dict[str, int]:
        """Method -> experts that it made at a version; "none" for what is stored as it is."""
        column, counts = self.versions.index(version), dict[str, int]()
        for layer in self.layers:
            for number in layer.method[:, column].tolist():
                counts[self.methods[number]] = counts.get(self.methods[number], 0) + 1
        return counts

    def mean_loss(self, version: str) -> tuple[float, float | None]:
        """The mean relative loss of a version over all experts, and its standard error where there are any.

        The experts' errors are taken as independent: those of one layer lean on one another a little.
        """
        column, experts = self.versions.index(version), sum(len(layer.tokens) for layer in self.layers)
        mean = float(sum(layer.relative[:, column].sum() for layer in self.layers) / experts)
        errors = [layer.relative_error for layer in self.layers if layer.relative_error is not None]
        if len(errors) < len(self.layers):
            return mean, None
        return mean, math.sqrt(sum(float(np.square(e[:, column], dtype=np.float64).sum()) for e in errors)) / experts

    def statistic(self, position: int, name: str) -> Array:
        """A table that is read on request: how calibration's windows went through the layer at `position`."""
        layer = self.layers[position]
        return _read(self.path, read_header(self.path), layer.index, name, len(layer.tokens), len(self.versions))


def shown_loss(loss: float, error: float | None) -> str:
    """A relative loss for people: with two standard errors, where they are known and not zero."""
    return f"{loss:.5f}" + (f" ± {2 * error:.5f}" if error else "")


def read_tables(path: Path, layers: Sequence[ExpertLayer]) -> CalibrationTables:
    """Read the tables of these layers.

    Args:
        path: calibration.safetensors.
        layers: those of the manifest.

    Raises:
        BundleError: when the file is not whole, or not what FORMAT.md says.
        OSError: when it cannot be read.
    """
    header = read_header(path)
    versions, methods = (tuple(header.metadata.get(key, "").split(",")) for key in ("versions", "methods"))
    tables = []
    for layer in layers:
        arrays = {n: _read(path, header, layer.index, n, layer.experts, len(versions)) for n in _EAGER}
        for n in _OPTIONAL:
            if f"layers.{layer.index}.{n}" in header.tensors:
                arrays[n] = _read(path, header, layer.index, n, layer.experts, len(versions))
        if int(arrays["method"].max(initial=0)) >= len(methods):
            raise BundleError.single(str(path), "tables", f"layer {layer.index} has a method that metadata do not name")
        tables.append(LayerTables(layer.index, **arrays))
    return CalibrationTables(path, versions, methods, tuple(tables))


def _read(path: Path, header: Header, layer: int, name: str, experts: int, versions: int) -> Array:
    full = f"layers.{layer}.{name}"
    dtype, shape = (_TENSORS | _OPTIONAL)[name]
    entry = header.tensors.get(full)
    if entry is None:
        raise BundleError.single(str(path), "tables", f"has no tensor {full}")
    sizes = {"E": experts, "V": versions, "N": entry.shape[0] if entry.shape else 0}
    if entry.dtype != dtype or entry.shape != tuple(sizes[d] for d in shape):
        wanted = f"{dtype} [{', '.join(shape)}] of {experts} experts and {versions} versions"
        raise BundleError.single(str(path), "tables", f"{full} is {entry.dtype} {list(entry.shape)}, not {wanted}")
    return np.fromfile(path, _NUMPY[dtype], math.prod(entry.shape), offset=entry.begin).reshape(entry.shape)


def metadata(versions: Sequence[str], methods: Sequence[str]) -> dict[str, str]:
    """The metadata of tables with these columns and method numbers."""
    return {"versions": ",".join(versions), "methods": ",".join(methods)}


def write_tables(path: Path, layers: Mapping[int, tuple[Path, Path]]) -> None:
    """Put the tables together.

    Args:
        path: the file to write.
        layers: layer index -> the safetensors files of its routing statistics and of its losses, tables by their names
            in FORMAT.md; those of losses have `metadata`, the same in all layers.
    """
    parts = [(part, f"layers.{index}.") for index, pair in layers.items() for part in pair]
    columns = read_header(next(iter(layers.values()))[1]).metadata
    merge(parts, path, dict(columns))
