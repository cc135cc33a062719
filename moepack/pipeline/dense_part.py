"""The dense matrices of one part of the model at every version, as files of the work directory.

The files are put together of finished slices, one version of one matrix at a time. Which matrices there are, and what
they read, is moepack.calibrate's to say; how slices are made, dense_slice.py's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moepack.pack.codec.affine import put_rows
from moepack.pack.codec.bits import Buffer
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.spec import DenseLayer, DenseMatrix, Matrix, Version

from .artifacts import save
from .dense_slice import DenseTask
from .piece import load_piece

LOSSES = "dense-losses.safetensors"
_COLUMNS = ("relative", "mse", "method")


@dataclass(frozen=True)
class DensePart:
    """The matrices of a part that get versions, and what of their losses is known before they are made.

    Attributes:
        layer: the matrices.
        versions: the lossless one among them.
        signal: by matrix, `moepack.calibrate.dense.DenseMoments.signal`.
        tokens: that went through the part.
    """

    layer: DenseLayer
    versions: tuple[Version, ...]
    signal: tuple[float, ...]
    tokens: int

    @property
    def note(self) -> dict[str, Any]:
        """What the work directory notes of it, but for the files."""
        return {"matrices": [asdict(m) for m in self.layer.matrices]}


def file_name(version: str) -> str:
    """A version's file in a part's folder of the work directory."""
    return f"dense-{version}.safetensors"


def write_dense(part: DensePart, made: Sequence[tuple[DenseTask, Path]], folder: Path) -> dict[str, Any]:
    """Write the files of every version, and the losses, into a folder.

    Args:
        part: the matrices.
        made: their slices, in the order of `dense_tasks`.
        folder: where to.

    Returns:
        What the work directory notes: the matrices, and the files' entries by version.
    """
    import torch

    pieces = [[(task, path) for task, path in made if task.matrix == m] for m in part.layer.matrices]
    entries = {}
    for version in part.versions:
        with LayerFileWriter(folder / file_name(version.name), version.name, part.layer) as writer:
            for described, own in zip(part.layer.matrices, pieces, strict=True):
                writer.add(*_extent(described.matrix, version, own))
        assert writer.entry is not None
        entries[version.name] = asdict(writer.entry)
    table: dict[str, list[list[float]]] = {k: [] for k in _COLUMNS}
    for described, own in zip(part.layer.matrices, pieces, strict=True):
        rows = [_losses(described.matrix, version, own) for version in part.versions]
        for name, values in zip(_COLUMNS, zip(*rows, strict=True), strict=True):
            table[name].append(list(values))
    dtypes = {"relative": torch.float32, "mse": torch.float32, "method": torch.uint8}
    facts = {k: torch.tensor(table[k], dtype=dtypes[k]) for k in _COLUMNS}
    facts["signal"] = torch.tensor(part.signal, dtype=torch.float32)
    facts["tokens"] = torch.full((part.layer.extents,), part.tokens, dtype=torch.int64)
    save(folder / LOSSES, facts)
    return part.note | {"entries": entries}


def _extent(matrix: Matrix, version: Version, pieces: Sequence[tuple[DenseTask, Path]]) -> tuple[Buffer, int]:
    """A matrix' extent at a version, and its bytes without padding."""
    own = [(task.rows, path) for task, path in pieces if version in task.versions]
    if len(own) == 1:
        piece = load_piece(own[0][1])
        return piece.extents[version.name][0], piece.payloads[version.name][0]
    out = np.zeros(version.resident_size((matrix,)), np.uint8)
    for rows, path in own:  # one after another: what was read of a file stays in memory while it is open
        put_rows(matrix, version, rows, load_piece(path).extents[version.name][0], out)
    return out, version.payload((matrix,), out)


def _losses(matrix: Matrix, version: Version, pieces: Sequence[tuple[DenseTask, Path]]) -> tuple[float, float, int]:
    """The relative squared error of a matrix' output, its mean a row, and the method's number."""
    own = [(t.versions.index(version), load_piece(path).losses) for t, path in pieces if version in t.versions]
    error, power = (sum(float(losses[k][0, column]) for column, losses in own) for k in ("error", "power"))
    column, losses = own[0]
    return error / power if power > 0 else error, error / matrix.rows, int(losses["method"][0, column])


def read_note(note: Mapping[str, Any]) -> tuple[DenseMatrix, ...]:
    """The matrices that `write_dense` noted."""
    return tuple(DenseMatrix(m["layer"], m["module"], Matrix(**m["matrix"])) for m in note["matrices"])


def join_losses(parts: Sequence[Sequence[tuple[Path, int]]], out: Path) -> None:
    """The losses of all parts as one file, in their order; of each part it is said which file, and which column of it,
    a version's are."""
    import torch
    from safetensors.torch import load_file

    loaded = []
    for columns in parts:
        found = {path: load_file(path) for path, _ in columns}
        facts = {k: t for k, t in found[columns[0][0]].items() if k not in _COLUMNS}  # of every version the same
        loaded.append(facts | {k: torch.stack([found[p][k][:, at] for p, at in columns], 1) for k in _COLUMNS})
    save(out, {k: torch.cat([part[k] for part in loaded]) for k in loaded[0]})
