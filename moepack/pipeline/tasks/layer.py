"""The work on one part of the model (a decoder layer, or the part outside them): its tasks, and its result files.

A part's tasks are the row shards of its dense matrices, then its expert batches. Executors run them.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moepack.pack.codec.affine import put_rows
from moepack.pack.codec.bits import Buffer
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.spec import DenseLayer, ExpertLayer, Matrix, Version
from moepack.pack.tables import metadata
from moepack.quantize import methods

from ..artifacts import save
from ..work import dense_name, expert_name
from .experts import ExpertBatchTask, NativeReader, no_codes
from .result import load_result
from .row_shards import DenseReader, RowShardTask

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation
    from moepack.families.interface import ExpertsModule


Note = tuple[int | None, JsonObject]  # a part, and the note that `WorkDirectory.mark` writes for it
Advance = Callable[[int], None]  # called with the number of experts and row shards that have just been finished
LOSSES = "dense-losses.safetensors"
_COLUMNS = ("relative", "mse", "method")


@dataclass(frozen=True)
class DenseWork:
    """The dense matrices of a part that get versions."""

    layer: DenseLayer
    versions: tuple[Version, ...]  # includes the lossless one
    signal: tuple[float, ...]  # `moepack.calibrate.dense.DenseMoments.signal` of each matrix
    tokens: int  # calibration tokens that went through the part

    @property
    def note(self) -> JsonObject:
        """The part's note for the work directory, without the entries of its files."""
        return {"matrices": [asdict(m) for m in self.layer.matrices]}


@dataclass(frozen=True)
class LayerWork:
    """A part's tasks and paths of result files, which go to other machines. `LayerInputs` holds the tensors."""

    part: int | None  # the decoder layer's index; None for the part outside the layers
    tasks: tuple[RowShardTask | ExpertBatchTask, ...]  # row shards, then expert batches, both in order
    kept: tuple[Path, ...]  # for each task, the file of its result
    folder: Path  # where the part's finished files go
    experts: ExpertLayer | None = None
    dense: DenseWork | None = None

    def memory(self, i: int) -> int:
        """Bytes of memory that task `i` takes."""
        from moepack.quantize.batch_memory import batch_memory

        task = self.tasks[i]
        if isinstance(task, RowShardTask):
            return task.memory
        assert self.experts is not None
        return batch_memory(self.experts, task.settings, task.count)

    @property
    def missing(self) -> list[int]:
        """Return the indexes of the tasks that have no result file yet."""
        # Lists the folder, because NFS caches for a while that a file does not exist.
        there = {path.name for path in self.kept[0].parent.iterdir()}
        return [i for i, path in enumerate(self.kept) if path.name not in there]


@dataclass(frozen=True)
class LayerInputs:
    """The tensors of a part's tasks in this process."""

    observation: Observation | None = None  # what the layer's experts read on the calibration tokens
    module: ExpertsModule | None = None  # the layer's experts module
    weights: ExpertWeights | None = None  # None where the executor reads weights itself
    moments: DenseMoments | None = None  # of the dense matrices' inputs
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)  # dense; empty where the executor reads them
    native: NativeReader = no_codes  # reads the codes and scales of a range of the layer's experts, from any thread
    native_dense: DenseReader = no_codes  # likewise of a dense matrix, by its module


def write_layer(work: LayerWork) -> JsonObject:
    """Write a part's files from its tasks' results; return the part's note for the work directory.

    Files are written in a temporary folder and moved whole, because two workers of a cluster may write them at once.
    """
    note: JsonObject = {}
    made = list(zip(work.tasks, work.kept, strict=True))
    with tempfile.TemporaryDirectory(dir=work.kept[0].parent) as aside:
        if work.dense is not None:
            shards = [(task, path) for task, path in made if isinstance(task, RowShardTask)]
            note["dense"] = write_dense(work.dense, shards, Path(aside))
        if work.experts is not None:
            batches = [(task, path) for task, path in made if isinstance(task, ExpertBatchTask)]
            note["entries"] = _write_experts(work.experts, batches, Path(aside))
        for file in Path(aside).iterdir():
            file.replace(work.folder / file.name)
    return note


def _write_experts(
    layer: ExpertLayer, made: Sequence[tuple[ExpertBatchTask, Path]], folder: Path
) -> dict[str, JsonObject]:
    import torch

    from moepack.quantize.pooling import pooled

    names = [v.name for v in made[0][0].versions]
    losses: list[dict[str, torch.Tensor]] = []
    with contextlib.ExitStack() as stack:
        writers = {n: stack.enter_context(LayerFileWriter(folder / expert_name(n), n, layer)) for n in names}
        for _, path in made:
            batch = load_result(path)
            losses.append(batch.losses)
            for name, writer in writers.items():
                for extent, payload in zip(batch.extents[name], batch.payloads[name], strict=True):
                    writer.add(extent, payload)
    measured = {k: torch.cat([one[k] for one in losses]) for k in losses[0]}
    table = pooled(measured) | {"method": measured["method"]}
    save(folder / "losses.safetensors", table, metadata(names, methods.numbered()))
    return {n: asdict(w.entry) for n, w in writers.items() if w.entry}


def write_dense(work: DenseWork, made: Sequence[tuple[RowShardTask, Path]], folder: Path) -> JsonObject:
    """Write a part's dense file of every version, and the losses. Return the note: the matrices, and each file's entry.

    `made` holds the row shards and their results, in the order of `row_shard_tasks`.
    """
    import torch

    shards = [[(task, path) for task, path in made if task.matrix == m] for m in work.layer.matrices]
    entries = {}
    for version in work.versions:
        with LayerFileWriter(folder / dense_name(version.name), version.name, work.layer) as writer:
            for described, own in zip(work.layer.matrices, shards, strict=True):
                writer.add(*_extent(described.matrix, version, own))
        assert writer.entry is not None
        entries[version.name] = asdict(writer.entry)
    rows = [
        [_losses(described.matrix, version, own) for version in work.versions]
        for described, own in zip(work.layer.matrices, shards, strict=True)
    ]
    facts = {}
    for i, k in enumerate(_COLUMNS):
        dtype = torch.uint8 if k == "method" else torch.float32
        facts[k] = torch.tensor([[cell[i] for cell in row] for row in rows], dtype=dtype)
    facts["signal"] = torch.tensor(work.signal, dtype=torch.float32)
    facts["tokens"] = torch.full((work.layer.extents,), work.tokens, dtype=torch.int64)
    save(folder / LOSSES, facts)
    return work.note | {"entries": entries}


def _extent(matrix: Matrix, version: Version, shards: Sequence[tuple[RowShardTask, Path]]) -> tuple[Buffer, int]:
    """Join a matrix's extent at a version from its row shards; return it, and its bytes without padding."""
    own = [(task.rows, path) for task, path in shards if version in task.versions]
    if len(own) == 1:
        made = load_result(own[0][1])
        return made.extents[version.name][0], made.payloads[version.name][0]
    out = np.zeros(version.resident_size((matrix,)), np.uint8)
    for rows, path in own:  # one by one: an open file keeps in memory what was read
        put_rows(matrix, version, rows, load_result(path).extents[version.name][0], out)
    return out, version.payload((matrix,), out)


def _losses(matrix: Matrix, version: Version, shards: Sequence[tuple[RowShardTask, Path]]) -> tuple[float, float, int]:
    """A matrix's loss at a version: relative squared error, mean squared error a row, and the method's number."""
    own = [(t.versions.index(version), load_result(path).losses) for t, path in shards if version in t.versions]
    error, power = (sum(float(losses[k][0, column]) for column, losses in own) for k in ("error", "power"))
    column, losses = own[0]
    return error / power if power > 0 else error, error / matrix.rows, int(losses["method"][0, column])


def join_losses(parts: Sequence[Sequence[tuple[Path, int]]], out: Path) -> None:
    """Join the dense losses of all parts, in order, into one file. Each part lists a file and a column per version."""
    import torch
    from safetensors.torch import load_file

    loaded = []
    for columns in parts:
        found = {path: load_file(path) for path, _ in columns}
        facts = {k: t for k, t in found[columns[0][0]].items() if k not in _COLUMNS}  # equal for every version
        loaded.append(facts | {k: torch.stack([found[p][k][:, at] for p, at in columns], 1) for k in _COLUMNS})
    save(out, {k: torch.cat([part[k] for part in loaded]) for k in loaded[0]})
