"""Rows of a dense matrix at every width: what a build's quantising of them is cut into, the same bytes wherever made.

Of a matrix that is one slice all versions are one task; of a larger one the lossless version is a task, which is coded
whole, and each slice of rows is another. A task's weights and moments are the maker's to bring. How slices become a
file is dense_part.py's to say.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from moepack.pack.codec.bits import Bf16Bits, Buffer
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.spec import DenseMatrix, Matrix, Version, lossy
from moepack.quantize import methods
from moepack.version import __version__

from .piece import THREADS, Piece, fixed_threads

if TYPE_CHECKING:
    import torch

    from .recipe import Recipe


@dataclass(frozen=True)
class DenseTask:
    """What a piece of a dense matrix is made of, but for the moments of what the matrix reads.

    Attributes:
        checkpoint: SHA-256 over its files' digests.
        matrix: whose rows they are.
        rows: which.
        versions: what they are wanted at.
        method: how to quantise, by its name.
        device: the kind of device that computes, as torch names it.
    """

    checkpoint: str
    matrix: DenseMatrix
    rows: range
    versions: tuple[Version, ...]
    method: str
    device: str

    count = 1  # of what a build's progress counts

    @property
    def part(self) -> Matrix:
        """The rows as a matrix of their own."""
        return replace(self.matrix.matrix, rows=len(self.rows))

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that the rows are of."""
        return tuple(f"{self.matrix.module}.{name}" for name in ("weight", "bias")[: 1 + self.matrix.matrix.bias])

    @property
    def memory(self) -> int:
        """The most bytes that making them takes, on the device that computes."""
        from moepack.quantize.batch_memory import dense_memory

        return dense_memory(self.part, self.versions, self.method)

    def address(self, moments: str) -> str:
        """SHA-256 of all that the result follows from; `moments` is `moments_digest` of what the matrix reads."""
        facts = {
            "moepack": __version__,
            "checkpoint": self.checkpoint,
            "moments": moments,
            "matrix": asdict(self.matrix),
            "rows": [self.rows.start, self.rows.stop],
            "versions": [v.record() for v in self.versions],
            "method": self.method,
            "threads": THREADS,
            "device": self.device,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def dense_tasks(matrices: Sequence[DenseMatrix], recipe: Recipe, checkpoint: str, device: str) -> list[DenseTask]:
    """The tasks of dense matrices at the recipe's versions, matrix by matrix and in the order of rows."""
    from moepack.quantize.dense_matrix import slices

    versions, method = recipe.dense_specs(), recipe.quantize.method
    cut_up = lossy(versions)
    whole = tuple(v for v in versions if v not in cut_up)
    out = []
    for m in matrices:
        every, parts = range(m.matrix.rows), slices(m.matrix.rows, m.matrix.cols)
        one = len(parts) == 1 or not cut_up
        cut = [(every, versions)] if one else [(every, whole), *((r, cut_up) for r in parts)]
        out += [DenseTask(checkpoint, m, rows, wanted, method, device) for rows, wanted in cut]
    return out


def moments_digest(learn: torch.Tensor, held: torch.Tensor) -> str:
    """SHA-256 of the moments of what a matrix reads, float32 on the CPU."""
    digest = hashlib.sha256()
    for moments in (learn, held):
        digest.update(moments.contiguous().numpy().data)
    return digest.hexdigest()


def make_slice(
    task: DenseTask, tensors: Mapping[str, torch.Tensor], learn: torch.Tensor, held: torch.Tensor, device: torch.device
) -> Piece:
    """Quantise, measure and encode rows of a dense matrix, on THREADS of torch's threads.

    Args:
        task: which rows, and how.
        tensors: the whole weight and bias, by their names in the model.
        learn, held: the moments that it learns from and is measured on.
        device: where to compute.
    """
    import torch

    from moepack.quantize.dense_matrix import quantise_rows

    weight, bias = (tensors.get(f"{task.matrix.module}.{name}") for name in ("weight", "bias"))
    assert weight is not None
    own = (task.part,)
    rows = weight[task.rows.start : task.rows.stop].to(torch.bfloat16)
    bits = None if bias is None else bits_of(bias[task.rows.start : task.rows.stop])
    made = Piece({}, {}, {k: torch.zeros(1, len(task.versions), dtype=torch.float64) for k in ("error", "power")})
    made.losses["method"] = torch.zeros(1, len(task.versions), dtype=torch.uint8)
    wanted = lossy(task.versions)
    with fixed_threads():
        for version in task.versions:
            if version not in wanted:
                extent, payload = exact_matrix(
                    version, task.part, rows, bits, THREADS if device.type == "cpu" else None
                )
                made.extents[version.name], made.payloads[version.name] = [extent], [payload]
        if wanted:
            done = quantise_rows(rows.to(device, torch.float32), learn.to(device), held.to(device), task.method, wanted)
            for version, (q, loss) in done.items():
                extent, payload = version.encode(own, [q.matrix(0, bits)])
                made.extents[version.name], made.payloads[version.name] = [extent], [payload]
                column = task.versions.index(version)
                made.losses["error"][0, column], made.losses["power"][0, column] = loss.error, loss.power
                made.losses["method"][0, column] = methods.numbered().index(loss.method)
    return made


def exact_matrix(
    version: Version, matrix: Matrix, weight: torch.Tensor, bias: Bf16Bits | None, threads: int | None = None
) -> tuple[Buffer, int]:
    """A matrix' extent in a version that holds the checkpoint's bits, and its payload; all cores without `threads`."""
    return version.encode((matrix,), [LosslessMatrix(bits_of(weight), bias)], threads)


def bits_of(tensor: torch.Tensor) -> Bf16Bits:
    """The bits of a tensor as BF16."""
    import torch

    from moepack.calibrate import experts

    return experts.bits_of(tensor.to(torch.bfloat16))
