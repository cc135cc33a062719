"""The calibration tables of a bundle: the one reader and writer of calibration.safetensors (FORMAT.md).

What the numbers are good for is for those who read them.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BundleError, Kind
from .files import open_file
from .manifest import TABLES as TABLES
from .safetensors_file import Header, TensorEntry, merge, read_header, read_open_header
from .spec import ExpertLayer, version_names

# Name -> dtype and shape; E experts, V versions, N windows of the layer's calibration.
_TENSORS = {
    "mse": ("F32", "EV"), "relative": ("F32", "EV"), "gated": ("F32", "EV"), "method": ("U8", "EV"),
    "tokens": ("I64", "E"), "gate_sum": ("F32", "E"),
    "prefill_counts": ("I32", "NE"), "decode_counts": ("I32", "NE"), "prefill_gates": ("F32", "NE"),
    "coactivation": ("I64", "EE"), "reuse": ("F32", ""),
}  # fmt: skip
# Standard errors of the losses: all of them in every layer, or none in any.
_ERRORS = {"mse_error": ("F32", "EV"), "relative_error": ("F32", "EV"), "gated_error": ("F32", "EV")}
# The same for the dense matrices, under "dense.": M matrices, D versions of theirs.
_DENSE = {
    "relative": ("F32", "MD"), "mse": ("F32", "MD"), "method": ("U8", "MD"),
    "signal": ("F32", "M"), "tokens": ("I64", "M"),
}  # fmt: skip
_EAGER = ("tokens", "gate_sum", "mse", "relative", "gated", "method")
_METHOD = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")
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
class DenseTables:
    """The tables of the dense matrices, each as FORMAT.md has it.

    Attributes:
        versions: names of the columns.
        relative, mse: [matrices, versions].
        method: [matrices, versions], numbers.
        signal, tokens: [matrices].
    """

    versions: tuple[str, ...]
    relative: Array
    mse: Array
    method: Array
    signal: Array
    tokens: Array


@dataclass(frozen=True)
class CalibrationTables:
    """The tables of a bundle.

    Attributes:
        path: the file.
        versions: names of the columns, whether or not the versions are here.
        methods: what the method numbers mean.
        layers: one entry a layer that has experts.
        dense: those of the dense matrices; None where these have no versions.
    """

    path: Path
    versions: tuple[str, ...]
    methods: tuple[str, ...]
    layers: tuple[LayerTables, ...]
    dense: DenseTables | None = None

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
        """A table that is read on request: how calibration's windows went through the layer at `position`.

        Raises:
            BundleError: when it is not what FORMAT.md says.
        """
        layer = self.layers[position]
        with _open(self.path) as f:
            header = read_open_header(f, str(self.path))
            place = _of_layer(self.path, header, layer.index, name, len(layer.tokens), len(self.versions))
            return _read(f, self.path, *place)

    def check(self, position: int) -> None:
        """Read every table of the layer at `position`; raises BundleError for what is not as FORMAT.md says."""
        for name in _TENSORS.keys() - _EAGER:
            self.statistic(position, name)


def shown_loss(loss: float, error: float | None) -> str:
    """A relative loss for people: with two standard errors, where they are known and not zero."""
    return f"{loss:.5f}" + (f" ± {2 * error:.5f}" if error else "")


def _open(path: Path) -> BufferedReader:
    return os.fdopen(open_file(path.parent, path.name), "rb")


def read_tables(
    path: Path, layers: Sequence[ExpertLayer], sha256: str | None = None, matrices: int = 0
) -> CalibrationTables:
    """Read the tables of these layers. All that FORMAT.md asks of names, dtypes and shapes is checked, and every number
    of the tables that are read here; those of others when they are asked for.

    Args:
        path: calibration.safetensors.
        layers: those of the manifest.
        sha256: the file's digest, where it is to be checked.
        matrices: dense matrices that have versions.

    Raises:
        BundleError: when the file is not whole, or not what FORMAT.md says.
    """
    with _open(path) as f:
        if sha256 is not None and hashlib.file_digest(f, "sha256").hexdigest() != sha256:
            raise BundleError.single(str(path), "digest", "its bytes do not match their digest")
        header = read_open_header(f, str(path))
        versions, methods = _columns(path, header)
        errors = any(f"layers.{layer.index}.{name}" in header.tensors for layer in layers for name in _ERRORS)
        tables = []
        for layer in layers:
            names = (*_TENSORS, *(_ERRORS if errors else ()))
            places = {n: _of_layer(path, header, layer.index, n, layer.experts, len(versions)) for n in names}
            arrays = {n: _read(f, path, *places[n]) for n in names if n in _EAGER or n in _ERRORS}
            _check_methods(path, f"layer {layer.index}", arrays["method"], methods)
            tables.append(LayerTables(layer.index, **arrays))
        dense = None
        if matrices:
            columns = _versions(path, header, "dense_versions")
            sizes = {"M": matrices, "D": len(columns)}
            found = {n: _read(f, path, *_place(path, header, "dense", n, _DENSE, sizes)) for n in _DENSE}
            _check_methods(path, "dense", found["method"], methods)
            dense = DenseTables(columns, **found)
    return CalibrationTables(path, versions, methods, tuple(tables), dense)


def _check_methods(path: Path, where: str, numbers: Array, methods: Sequence[str]) -> None:
    if int(numbers.max(initial=0)) >= len(methods):
        raise _bad(path, "tables", f"{where} has a method that metadata do not name")


def _bad(path: Path, kind: Kind, message: str) -> BundleError:
    return BundleError.single(str(path), kind, message)


def _columns(path: Path, header: Header) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of versions and of methods."""
    versions, methods = _versions(path, header, "versions"), tuple(header.metadata.get("methods", "").split(","))
    if not all(map(_METHOD.fullmatch, methods)) or len(set(methods)) != len(methods) or len(methods) > 256:
        raise _bad(path, "tables", f"its methods are not names, each once: {','.join(methods)}")
    return versions, methods


def _versions(path: Path, header: Header, key: str) -> tuple[str, ...]:
    versions = tuple(header.metadata.get(key, "").split(","))
    if versions != tuple(n for n in version_names() if n in versions):
        raise _bad(path, "tables", f"its columns are not versions, from most to least precise: {','.join(versions)}")
    return versions


def _of_layer(
    path: Path, header: Header, layer: int, name: str, experts: int, versions: int
) -> tuple[str, TensorEntry]:
    """Where a table of a layer stands."""
    counts = header.tensors.get(f"layers.{layer}.prefill_counts")
    windows = counts.shape[0] if counts is not None and counts.shape else 0
    sizes = {"E": experts, "V": versions, "N": windows}
    return _place(path, header, f"layers.{layer}", name, _TENSORS | _ERRORS, sizes)


def _place(
    path: Path,
    header: Header,
    prefix: str,
    name: str,
    tensors: Mapping[str, tuple[str, str]],
    sizes: Mapping[str, int],
) -> tuple[str, TensorEntry]:
    """A table's name and place: of the dtype and shape that `tensors` gives it, whose letters `sizes` explains."""
    full = f"{prefix}.{name}"
    dtype, shape = tensors[name]
    entry = header.tensors.get(full)
    if entry is None:
        raise _bad(path, "tables", f"has no tensor {full}")
    if entry.dtype != dtype or entry.shape != tuple(sizes[d] for d in shape):
        wanted = f"{dtype} [{', '.join(shape)}] with {', '.join(f'{k} = {n}' for k, n in sizes.items())}"
        raise _bad(path, "tables", f"{full} is {entry.dtype} {list(entry.shape)}, not {wanted}")
    return full, entry


def _read(file: BufferedReader, path: Path, name: str, entry: TensorEntry) -> Array:
    """One table, every number of it finite and at least 0."""
    file.seek(entry.begin)
    data = bytearray(entry.end - entry.begin)
    if file.readinto(data) != len(data):
        raise _bad(path, "truncated", f"ends inside {name}")
    array = np.frombuffer(data, _NUMPY[entry.dtype], math.prod(entry.shape)).reshape(entry.shape)
    if array.size and not (np.isfinite(array).all() and array.min() >= 0):
        raise _bad(path, "number", f"{name} holds a number that is not finite, or below 0")
    return array


def metadata(versions: Sequence[str], methods: Sequence[str]) -> dict[str, str]:
    """The metadata of tables with these columns and method numbers."""
    return {"versions": ",".join(versions), "methods": ",".join(methods)}


def write_tables(
    path: Path, layers: Mapping[int, tuple[Path, Path]], dense: tuple[Path, Sequence[str]] | None = None
) -> None:
    """Put the tables together.

    Args:
        path: the file to write.
        layers: layer index -> the safetensors files of its routing statistics and of its losses, tables by their names
            in FORMAT.md; those of losses have `metadata`, the same in all layers.
        dense: a file of the dense matrices' tables, and the versions that are their columns.
    """
    parts = [(part, f"layers.{index}.") for index, pair in layers.items() for part in pair]
    columns = dict(read_header(next(iter(layers.values()))[1]).metadata)
    if dense is not None:
        parts.append((dense[0], "dense."))
        columns["dense_versions"] = ",".join(dense[1])
    merge(parts, path, columns)
