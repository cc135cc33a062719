"""The calibration tables of a bundle: the one reader and writer of calibration.safetensors (FORMAT.md)."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BundleError, Kind
from .files import opened
from .manifest import TABLES as TABLES
from .safetensors_file import DTYPES, TensorEntry, merge, read_header, read_open_header
from .spec import ExpertLayer, version_names

# Name -> dtype and shape; E experts, V versions, N windows of the layer's calibration.
_TENSORS = {
    "mse": ("F32", "EV"), "relative": ("F32", "EV"), "gated": ("F32", "EV"), "method": ("U8", "EV"),
    "mse_error": ("F32", "EV"), "relative_error": ("F32", "EV"), "gated_error": ("F32", "EV"),
    "tokens": ("I64", "E"), "gate_sum": ("F32", "E"),
    "prefill_counts": ("I32", "NE"), "decode_counts": ("I32", "NE"), "prefill_gates": ("F32", "NE"),
    "coactivation": ("I64", "EE"), "reuse": ("F32", ""),
}  # fmt: skip
_LOGITS = {"logits": ("F32", "V")}  # in every layer, or in none
# The same for the dense matrices, with names under "dense.": M matrices, D dense versions.
_DENSE = {
    "relative": ("F32", "MD"), "mse": ("F32", "MD"), "method": ("U8", "MD"),
    "signal": ("F32", "M"), "tokens": ("I64", "M"),
}  # fmt: skip
FEW_TOKENS = 256  # with fewer, an expert's losses lean on its layer's, and methods cannot be told apart
_EAGER = ("tokens", "relative", "gated", "relative_error", "method")
_METHOD = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")

Array = NDArray[Any]


@dataclass(frozen=True)
class LayerTables:
    """The tables of one decoder layer that readers need (FORMAT.md): [experts] for tokens, else [experts, versions]."""

    index: int
    tokens: Array
    relative: Array
    gated: Array
    relative_error: Array  # standard errors of `relative`
    method: Array
    logits: Array | None = None
    # float64 [versions], what `gated` is multiplied by where layers are compared: the divergence in `logits` over the
    # layer's expected losses, in units in which both have one sum over all layers and versions. None without `logits`.
    reach: Array | None = None

    @property
    def weighed(self) -> Array:
        """Float64 [experts, versions]: `gated`, as far as it reaches the logits where that is known."""
        gated = self.gated.astype(np.float64)
        return gated if self.reach is None else gated * self.reach

    @property
    def expected(self) -> Array:
        """Float64 [versions]: the squared error that the layer's experts add to its output over calibration.

        One token is added to each expert's count: in use, tokens may reach one that calibration did not reach.
        """
        total: Array = ((self.tokens[:, None] + 1) * self.gated.astype(np.float64)).sum(0)
        return total


@dataclass(frozen=True)
class DenseTables:
    """The tables of the dense matrices (FORMAT.md): [matrices] for signal and tokens, else [matrices, versions]."""

    versions: tuple[str, ...]  # names of the columns
    relative: Array
    mse: Array
    method: Array
    signal: Array
    tokens: Array


@dataclass(frozen=True)
class CalibrationTables:
    """The routing statistics and loss tables of a bundle."""

    path: Path
    versions: tuple[str, ...]  # names of the columns; some of these versions may be absent
    methods: tuple[str, ...]  # the quantisers' names, by their numbers in the `method` tables
    layers: tuple[LayerTables, ...]  # one entry a layer that has experts
    dense: DenseTables | None = None  # tables of the dense matrices; None where these have no versions

    def columns(self, versions: Sequence[str]) -> list[int]:
        """The column numbers of these versions."""
        return [self.versions.index(name) for name in versions]

    def routed_as(self, counts: Sequence[Array]) -> CalibrationTables:
        """The tables of other traffic: `counts` [layers] of [experts], and FEW_TOKENS choices a layer as in these."""
        shares = [layer.tokens / max(1, int(layer.tokens.sum())) for layer in self.layers]
        mixed = [n + FEW_TOKENS * share for n, share in zip(counts, shares, strict=True)]
        return replace(self, layers=tuple(replace(x, tokens=n) for x, n in zip(self.layers, mixed, strict=True)))

    def few(self) -> dict[int, int]:
        """Map layer index to the number of experts below FEW_TOKENS calibration tokens, of layers with such experts."""
        counts = {layer.index: int((layer.tokens < FEW_TOKENS).sum()) for layer in self.layers}
        return {index: n for index, n in counts.items() if n}

    def made_by(self, version: str) -> dict[str, int]:
        """Count a version's experts by the method that quantised them; "none" stands for experts as they were."""
        column = self.versions.index(version)
        numbers = (number for layer in self.layers for number in layer.method[:, column].tolist())
        return dict(Counter(self.methods[number] for number in numbers))

    def mean_loss(self, version: str) -> tuple[float, float]:
        """The mean relative loss of a version over all experts, and its standard error.

        The experts' errors are taken as independent, although errors within a layer correlate a little.
        """
        column = self.versions.index(version)
        experts = sum(len(layer.tokens) for layer in self.layers)
        mean = float(sum(layer.relative[:, column].sum() for layer in self.layers) / experts)
        errors = [layer.relative_error[:, column] for layer in self.layers]
        return mean, math.sqrt(sum(float(np.square(e, dtype=np.float64).sum()) for e in errors)) / experts

    def statistic(self, position: int, name: str) -> Array:
        """Read a table that `read_tables` leaves unread, for the layer at `position`.

        Raises BundleError when it breaks FORMAT.md.
        """
        layer = self.layers[position]
        with opened(self.path.parent, self.path.name) as f:
            file = _File(self.path, f)
            return file.read(*file.of_layer(layer.index, name, len(layer.tokens), len(self.versions)))

    def check(self) -> None:
        """Read every table of every layer; raises BundleError for one that breaks FORMAT.md."""
        for position, name in itertools.product(range(len(self.layers)), _TENSORS.keys() - _EAGER):
            self.statistic(position, name)


def shown_loss(loss: float, error: float | None) -> str:
    """A relative loss as text, with two standard errors where they are known and not zero."""
    return f"{loss:.5f}" + (f" ± {2 * error:.5f}" if error else "")


class _File:
    def __init__(self, path: Path, file: BufferedReader, sha256: str | None = None) -> None:
        self._path = path
        self._file = file
        if sha256 is not None and hashlib.file_digest(file, "sha256").hexdigest() != sha256:
            raise self.bad("digest", "its bytes do not match their digest")
        self.header = read_open_header(file, str(path))

    def bad(self, kind: Kind, message: str) -> BundleError:
        return BundleError.single(str(self._path), kind, message)

    def methods(self) -> tuple[str, ...]:
        methods = tuple(self.header.metadata.get("methods", "").split(","))
        if not all(map(_METHOD.fullmatch, methods)) or len(set(methods)) != len(methods) or len(methods) > 256:
            raise self.bad("tables", f"its methods are not names, each once: {','.join(methods)}")
        return methods

    def check_methods(self, where: str, numbers: Array, methods: Sequence[str]) -> None:
        if int(numbers.max(initial=0)) >= len(methods):
            raise self.bad("tables", f"{where} has a method that metadata do not name")

    def versions(self, key: str) -> tuple[str, ...]:
        versions = tuple(self.header.metadata.get(key, "").split(","))
        if versions != tuple(n for n in version_names() if n in versions):
            words = ",".join(versions)
            raise self.bad("tables", f"its columns are not versions, from most to least precise: {words}")
        return versions

    def of_layer(self, layer: int, name: str, experts: int, versions: int) -> tuple[str, TensorEntry]:
        """Find a layer's table and check its dtype and shape, as `place` does."""
        counts = self.header.tensors.get(f"layers.{layer}.prefill_counts")
        windows = counts.shape[0] if counts is not None and counts.shape else 0
        sizes = {"E": experts, "V": versions, "N": windows}
        return self.place(f"layers.{layer}.{name}", *(_TENSORS | _LOGITS)[name], sizes)

    def place(self, name: str, dtype: str, shape: str, sizes: Mapping[str, int]) -> tuple[str, TensorEntry]:
        """Find a table and check its dtype and shape; `sizes` gives the number for each letter of `shape`."""
        entry = self.header.tensors.get(name)
        if entry is None:
            raise self.bad("tables", f"has no tensor {name}")
        if entry.dtype != dtype or entry.shape != tuple(sizes[d] for d in shape):
            wanted = f"{dtype} [{', '.join(shape)}] with {', '.join(f'{k} = {n}' for k, n in sizes.items())}"
            raise self.bad("tables", f"{name} is {entry.dtype} {list(entry.shape)}, not {wanted}")
        return name, entry

    def read(self, name: str, entry: TensorEntry) -> Array:
        """Read one table, and check that every number is finite and at least 0."""
        self._file.seek(entry.begin)
        data = bytearray(entry.end - entry.begin)
        if self._file.readinto(data) != len(data):
            raise self.bad("truncated", f"ends inside {name}")
        array = np.frombuffer(data, DTYPES[entry.dtype][2], math.prod(entry.shape)).reshape(entry.shape)
        if array.size and not (np.isfinite(array).all() and array.min() >= 0):
            raise self.bad("number", f"{name} holds a number that is not finite, or below 0")
        return array


def read_tables(
    path: Path, layers: Sequence[ExpertLayer], sha256: str | None = None, matrices: int = 0
) -> CalibrationTables:
    """Read the tables of these layers.

    Checks names, dtypes and shapes of all tables, but reads and checks the numbers only of some; `statistic` reads the
    others. `matrices` counts the dense matrices that have versions. Raises BundleError when the file is incomplete, or
    breaks FORMAT.md.
    """
    with opened(path.parent, path.name) as f:
        file = _File(path, f, sha256)
        versions = file.versions("versions")
        methods = file.methods()
        reaches = any(f"layers.{layer.index}.logits" in file.header.tensors for layer in layers)
        names = (*_TENSORS, *_LOGITS) if reaches else (*_TENSORS,)
        tables = []
        for layer in layers:
            places = {n: file.of_layer(layer.index, n, layer.experts, len(versions)) for n in names}
            arrays = {n: file.read(*places[n]) for n in names if n in _EAGER or n not in _TENSORS}
            file.check_methods(f"layer {layer.index}", arrays["method"], methods)
            tables.append(LayerTables(layer.index, **arrays))
        dense = None
        if matrices:
            columns = file.versions("dense_versions")
            sizes = {"M": matrices, "D": len(columns)}
            dense = DenseTables(columns, **{n: file.read(*file.place(f"dense.{n}", *_DENSE[n], sizes)) for n in _DENSE})
            file.check_methods("dense", dense.method, methods)
    return CalibrationTables(path, versions, methods, _with_reach(tables), dense)


def _with_reach(layers: Sequence[LayerTables]) -> tuple[LayerTables, ...]:
    if any(layer.logits is None for layer in layers):
        return tuple(layers)
    moved, expected = (np.array([getattr(x, k) for x in layers], np.float64) for k in ("logits", "expected"))
    unit = expected.sum() / moved.sum() if moved.sum() > 0 else 0.0
    reach = np.divide(unit * moved, expected, out=np.zeros_like(moved), where=expected > 0)
    return tuple(replace(layer, reach=row) for layer, row in zip(layers, reach, strict=True))


def metadata(versions: Sequence[str], methods: Sequence[str]) -> dict[str, str]:
    """The metadata of a file of tables: its columns' versions, and its methods by number."""
    return {"versions": ",".join(versions), "methods": ",".join(methods)}


def write_tables(
    path: Path, layers: Mapping[int, Sequence[Path]], dense: tuple[Path, Sequence[str]] | None = None
) -> None:
    """Merge the tables into one file.

    `layers` maps a layer's index to safetensors files: its routing statistics, its losses, and other tables if it has
    any. Their tables are named as in FORMAT.md. The loss files of all layers carry the same `metadata`. `dense` is the
    file of the dense matrices' tables, and the versions of its columns.
    """
    parts = [(part, f"layers.{index}.") for index, files in layers.items() for part in files]
    found = read_header(next(iter(layers.values()))[1]).metadata
    columns = {name: found[name] for name in metadata((), ())}
    if dense is not None:
        parts.append((dense[0], "dense."))
        columns["dense_versions"] = ",".join(dense[1])
    merge(parts, path, columns)
