"""What is to be made of a part of the model, and what becomes of it: the part's files, and its losses.

A part is a decoder layer, or what lies outside them. Its pieces are slices of its dense matrices and its expert
batches. Where pieces are made, and in which order, is executors.py's.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.spec import ExpertLayer
from moepack.pack.tables import metadata
from moepack.quantize import methods

from .artifacts import save
from .dense_part import DensePart, write_dense
from .dense_slice import DenseTask
from .expert_batch import ExpertBatchTask
from .piece import load_piece

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation

Note = tuple[int | None, dict[str, Any]]  # a part, and what the work directory notes of it
Advance = Callable[[int], None]  # told of experts and slices that are done


@dataclass(frozen=True)
class LayerWork:
    """What quantising a part takes, but for what it is `Given`. Travels to another machine as it is.

    Attributes:
        part: the decoder layer's index; None for what is outside them.
        tasks: its pieces: the slices of its dense matrices, then its expert batches in the order of their experts.
        kept: by piece, where it is once it is made.
        folder: where the part's files are to be.
        experts: the layer's, where it has them.
        dense: its matrices that get versions, where there are any.
    """

    part: int | None
    tasks: tuple[DenseTask | ExpertBatchTask, ...]
    kept: tuple[Path, ...]
    folder: Path
    experts: ExpertLayer | None = None
    dense: DensePart | None = None

    def memory(self, i: int) -> int:
        """Bytes that making a piece takes."""
        from moepack.quantize.batch_memory import batch_memory

        task = self.tasks[i]
        if isinstance(task, DenseTask):
            return task.memory
        assert self.experts is not None
        return batch_memory(self.experts, task.settings, task.count)

    @property
    def missing(self) -> list[int]:
        """The pieces that are not made yet."""
        # By listing the folder: NFS remembers for a while that a file was not there.
        there = {path.name for path in self.kept[0].parent.iterdir()}
        return [i for i, path in enumerate(self.kept) if path.name not in there]


@dataclass(frozen=True)
class Given:
    """What a part's pieces are made of, as far as it is in this process.

    Attributes:
        observation: what the calibration tokens brought to its experts.
        module: the layer's experts module.
        weights: of its experts; None where the executor reads them itself.
        moments: what calibration brought to its dense matrices.
        tensors: of these, by their names in the model; none where the executor reads them itself.
    """

    observation: Observation | None = None
    module: Any = None
    weights: ExpertWeights | None = None
    moments: DenseMoments | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def write_layer(work: LayerWork) -> dict[str, Any]:
    """Write a part's files out of its pieces; returns what the work directory notes of it.

    Files are written aside and moved to their places whole: a cluster may have two at it at once.
    """
    note: dict[str, Any] = {}
    made = list(zip(work.tasks, work.kept, strict=True))
    with tempfile.TemporaryDirectory(dir=work.kept[0].parent) as aside:
        if work.dense is not None:
            slices = [(task, path) for task, path in made if isinstance(task, DenseTask)]
            note["dense"] = write_dense(work.dense, slices, Path(aside))
        if work.experts is not None:
            batches = [(task, path) for task, path in made if isinstance(task, ExpertBatchTask)]
            note["entries"] = _write_experts(work.experts, batches, Path(aside))
        for file in Path(aside).iterdir():
            file.replace(work.folder / file.name)
    return note


def _write_experts(
    layer: ExpertLayer, made: Sequence[tuple[ExpertBatchTask, Path]], folder: Path
) -> dict[str, dict[str, Any]]:
    import torch

    from moepack.quantize.pooling import pooled

    names = [v.name for v in made[0][0].versions]
    losses: list[dict[str, torch.Tensor]] = []
    with contextlib.ExitStack() as stack:
        writers = {n: stack.enter_context(LayerFileWriter(folder / f"{n}.safetensors", n, layer)) for n in names}
        for _, path in made:
            batch = load_piece(path)
            losses.append(batch.losses)
            for name, writer in writers.items():
                for extent, payload in zip(batch.extents[name], batch.payloads[name], strict=True):
                    writer.add(extent, payload)
    measured = {k: torch.cat([part[k] for part in losses]) for k in losses[0]}
    table = pooled(measured) | {"method": measured["method"]}
    save(folder / "losses.safetensors", table, metadata(names, methods.numbered()))
    return {n: asdict(w.entry) for n, w in writers.items() if w.entry}
