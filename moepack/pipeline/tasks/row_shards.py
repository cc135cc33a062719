"""The tasks that quantise row shards of dense matrices at every version, the same bytes on any machine.

A matrix of one shard is one task. A larger matrix has a task for its lossless version, which is coded whole, and a task
for each shard of its rows. tasks/layer.py joins the shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from moepack.pack.spec import DenseMatrix, Matrix, lossy
from moepack.quantize import methods

from .experts import Task, no_codes
from .result import TaskResult, check_numbers, fixed_threads, threads_on

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.native import NativeWeight

    from ..recipe import Recipe

DenseReader = Callable[[str], "NativeWeight | None"]  # reads a matrix's codes and scales, by the name of its module


@dataclass(frozen=True)
class RowShardTask(Task):
    """A row shard to quantise. The second moments of the matrix's inputs are passed apart."""

    matrix: DenseMatrix
    rows: range
    method: str  # the quantiser's name
    zeros: str  # which zero points, one of `methods.ZEROS`

    count = 1  # units that the task adds to a build's progress

    @property
    def shard(self) -> Matrix:
        """The rows as a matrix of their own."""
        return replace(self.matrix.matrix, rows=len(self.rows))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the matrix's tensors: its weight, and its bias if it has one."""
        return tuple(f"{self.matrix.module}.{name}" for name in ("weight", "bias")[: 1 + self.matrix.matrix.bias])

    @property
    def memory(self) -> int:
        """Upper bound of the task's bytes on the device that computes."""
        from moepack.quantize.batch_memory import dense_memory

        return dense_memory(self.shard, self.versions, self.method)

    def address(self, moments: str) -> str:
        """The SHA-256 of all that determines the result. `moments` comes from `moments_digest`."""
        facts = {
            "moments": moments,
            "matrix": asdict(self.matrix),
            "rows": [self.rows.start, self.rows.stop],
            "method": self.method,
            "zeros": self.zeros,
        }
        return self.digest(facts)


def row_shard_tasks(
    matrices: Sequence[DenseMatrix], recipe: Recipe, checkpoint: str, device: str
) -> list[RowShardTask]:
    """The tasks of dense matrices at the recipe's versions, matrix by matrix and in the order of rows."""
    from moepack.quantize.dense_matrix import row_shards

    versions = recipe.dense_specs()
    how = recipe.quantize
    cut_up = lossy(versions)
    exact = tuple(v for v in versions if v not in cut_up)
    out = []
    for m in matrices:
        every = range(m.matrix.rows)
        shards = row_shards(m.matrix.rows, m.matrix.cols)
        whole = len(shards) == 1 or not cut_up
        cut = [(every, versions)] if whole else [(every, exact), *((rows, cut_up) for rows in shards)]
        out += [RowShardTask(checkpoint, wanted, device, m, rows, how.method, how.zeros) for rows, wanted in cut]
    return out


def moments_digest(learn: torch.Tensor, held: torch.Tensor) -> str:
    """The SHA-256 of the moments of a matrix's inputs; the moments are float32, on the CPU."""
    digest = hashlib.sha256()
    for moments in (learn, held):
        digest.update(moments.contiguous().numpy().data)
    return digest.hexdigest()


def make_row_shard(
    task: RowShardTask,
    tensors: Mapping[str, torch.Tensor],
    learn: torch.Tensor,
    held: torch.Tensor,
    device: torch.device,
    native: DenseReader = no_codes,
) -> TaskResult:
    """Quantise a row shard, measure its loss and encode it, with torch on THREADS threads.

    `tensors`: the whole weight and bias, by name. `learn`, `held`: the moments to fit codes by, and to measure by.
    `native` reads the codes and scales of a whole matrix.
    """
    import torch

    from moepack.calibrate.experts import bits_of
    from moepack.calibrate.native import dense_extent
    from moepack.quantize.dense_matrix import quantise_rows

    weight, bias = (tensors.get(f"{task.matrix.module}.{name}") for name in ("weight", "bias"))
    assert weight is not None
    own = (task.shard,)
    at = slice(task.rows.start, task.rows.stop)
    rows = weight[at].to(torch.bfloat16)
    bias = None if bias is None else bias[at].to(torch.bfloat16)
    bits = None if bias is None else bits_of(bias)
    made = TaskResult({}, {}, {k: torch.zeros(1, len(task.versions), dtype=torch.float64) for k in ("error", "power")})
    made.losses["method"] = torch.zeros(1, len(task.versions), dtype=torch.uint8)
    wanted = lossy(task.versions)
    threads = threads_on(device)
    with fixed_threads():
        for version in task.versions:
            if version not in wanted:
                codes = native(task.matrix.module) if version.released else None
                made.add(version.name, *dense_extent(version, task.shard, rows, bias, codes, threads))
        if wanted:
            moments = learn.to(device), held.to(device)
            done = quantise_rows(rows.to(device, torch.float32), *moments, task.method, wanted, task.zeros)
            for version, (q, loss) in done.items():
                check_numbers(f"{task.matrix.module} at {version.name}", [q.scale], (loss.error, loss.power))
                made.add(version.name, *version.encode(own, [q.matrix(0, bits)]))
                column = task.versions.index(version)
                made.losses["error"][0, column], made.losses["power"][0, column] = loss.error, loss.power
                made.losses["method"][0, column] = methods.numbered().index(loss.method)
    return made
