"""The dense matrices of one part of the model at every version, as files of the work directory.

One matrix after another, and of each some rows at a time: what is in memory beside the part itself is the BF16 matrix,
its extents and a slice in float32. Which matrices there are, and what they read, is moepack.calibrate's to say.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moepack.pack.affine import Bf16Bits, Buffer, encode_affine_rows, section_array
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.lossless import LosslessMatrix, encode_lossless
from moepack.pack.spec import (
    DenseLayer,
    DenseMatrix,
    Matrix,
    Version,
    affine_extent_size,
    affine_payload,
    affine_sections,
)
from moepack.quantize import methods

from .artifacts import save

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseMoments

LOSSES = "dense-losses.safetensors"
_COLUMNS = ("relative", "mse", "method")


def file_name(version: str) -> str:
    """A version's file in a part's folder of the work directory."""
    return f"dense-{version}.safetensors"


def quantise_dense(
    layer: DenseLayer,
    tensors: Mapping[str, torch.Tensor],
    moments: DenseMoments,
    versions: Sequence[Version],
    method: str,
    device: torch.device,
    piece: Callable[[str], Path],
    advance: Callable[[int], None] = lambda matrices: None,
) -> dict[str, Any]:
    """Write the files of every version, and the losses.

    Args:
        layer: the matrices, all of them in `moments`.
        tensors: the part's tensors by their names in the model.
        moments: what calibration brought to them.
        versions: the lossless one among them.
        method: how to quantise, by its name.
        device: where to compute.
        piece: where a file of this part is, by its name.
        advance: told of finished matrices.

    Returns:
        What the work directory notes: the matrices, and the files' entries by version.
    """
    import torch

    affine = [v for v in versions if not v.is_lossless]
    table: dict[str, list[list[float]]] = {k: [] for k in _COLUMNS}
    with contextlib.ExitStack() as stack:
        writers = {v: stack.enter_context(LayerFileWriter(piece(file_name(v.name)), v.name, layer)) for v in versions}
        for described in layer.matrices:
            weight, bias = (tensors.get(f"{described.module}.{k}") for k in ("weight", "bias"))
            assert weight is not None
            group = moments.group[described.module]
            made, losses = _affine(
                described, weight, bias, moments.learn[group].to(device), moments.held[group].to(device), method, affine
            )
            for version, writer in writers.items():
                if version.is_lossless:
                    writer.add(*lossless_matrix(described.matrix, weight, bias))
                else:
                    writer.add(made.pop(version), affine_payload((described.matrix,), version))
            for name in _COLUMNS:
                table[name].append([losses[v][name] if v in losses else 0.0 for v in versions])
            advance(1)
    dtypes = {"relative": torch.float32, "mse": torch.float32, "method": torch.uint8}
    facts = {k: torch.tensor(table[k], dtype=dtypes[k]) for k in _COLUMNS}
    facts["signal"] = torch.tensor([moments.signal[m.module] for m in layer.matrices], dtype=torch.float32)
    facts["tokens"] = torch.full((layer.extents,), moments.tokens, dtype=torch.int64)
    save(piece(LOSSES), facts)
    return {
        "matrices": [asdict(m) for m in layer.matrices],
        "entries": {v.name: asdict(w.entry) for v, w in writers.items() if w.entry},
    }


def lossless_matrix(matrix: Matrix, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[Buffer, int]:
    """A matrix' lossless extent, and its bytes without padding."""
    return encode_lossless((matrix,), [LosslessMatrix(_bits(weight), None if bias is None else _bits(bias))])


def read_note(note: Mapping[str, Any]) -> tuple[DenseMatrix, ...]:
    """The matrices that `quantise_dense` noted."""
    return tuple(DenseMatrix(m["layer"], m["module"], Matrix(**m["matrix"])) for m in note["matrices"])


def join_losses(parts: Sequence[Path], out: Path) -> None:
    """The losses of all parts as one file, in their order."""
    import torch
    from safetensors.torch import load_file

    loaded = [load_file(part) for part in parts]
    save(out, {k: torch.cat([part[k] for part in loaded]) for k in loaded[0]})


def _affine(
    described: DenseMatrix,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    learn: torch.Tensor,
    held: torch.Tensor,
    method: str,
    versions: Sequence[Version],
) -> tuple[dict[Version, Buffer], dict[Version, dict[str, float]]]:
    """A matrix' extents, and its losses by their names in the tables."""
    import torch

    from moepack.quantize.dense_matrix import DenseLoss, quantise_rows

    matrix = described.matrix
    extents = {v: np.zeros(affine_extent_size((matrix,), v), np.uint8) for v in versions}
    losses: dict[Version, DenseLoss] = {}

    def rows(first: int, last: int) -> torch.Tensor:
        return weight[first:last].to(torch.bfloat16).to(learn.device, torch.float32)

    for first, made in quantise_rows(rows, (matrix.rows, matrix.cols), learn, held, method, versions, losses):
        for version, q in made.items():
            encode_affine_rows(matrix, version, first, q.matrix(0), extents[version])
    for version, extent in extents.items():
        for section in affine_sections((matrix,), version):
            if section.kind == "bias" and bias is not None:
                section_array(extent, section)[:] = _bits(bias)
    numbers = methods.numbered()
    return extents, {
        v: {"relative": x.relative, "mse": x.error / matrix.rows, "method": numbers.index(x.method)}
        for v, x in losses.items()
    }


def _bits(tensor: torch.Tensor) -> Bf16Bits:
    import torch

    from moepack.calibrate.experts import bits_of

    return bits_of(tensor.to(torch.bfloat16))
