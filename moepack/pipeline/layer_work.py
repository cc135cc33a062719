"""A layer's expert batches, and what becomes of them: the layer's files, and its losses.

Says what is to be made and puts it together. Where batches are made, and in which order, is executors.py's.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.spec import ExpertLayer
from moepack.pack.tables import metadata
from moepack.quantize import methods

from .artifacts import save
from .expert_batch import ExpertBatchTask, load_batch

Note = tuple[int, dict[str, Any]]  # a layer, and what the work directory notes of it
Advance = Callable[[int], None]  # told of experts that are done


@dataclass(frozen=True)
class LayerWork:
    """What quantising a layer takes, but for its weights and tokens. Travels to another machine as it is.

    Attributes:
        layer: the descriptor.
        tasks: its batches, in the order of their experts.
        kept: by batch, where it is once it is made.
        folder: where the layer's files are to be.
    """

    layer: ExpertLayer
    tasks: tuple[ExpertBatchTask, ...]
    kept: tuple[Path, ...]
    folder: Path

    @property
    def batch_memory(self) -> int:
        """Bytes that making the largest batch takes."""
        from moepack.quantize.batch_memory import batch_memory

        return batch_memory(self.layer, self.tasks[0].settings, max(len(task.experts) for task in self.tasks))

    @property
    def missing(self) -> list[int]:
        """The batches that are not made yet."""
        # By listing the folder: NFS remembers for a while that a file was not there.
        there = {path.name for path in self.kept[0].parent.iterdir()}
        return [i for i, path in enumerate(self.kept) if path.name not in there]


def write_layer(work: LayerWork) -> dict[str, Any]:
    """Write a layer's files out of its batches; returns what the work directory notes of it.

    Files are written aside and moved to their places whole: a cluster may have two at it at once.
    """
    import torch

    from moepack.quantize.pooling import pooled

    names = [v.name for v in work.tasks[0].versions]
    losses: list[dict[str, torch.Tensor]] = []
    with tempfile.TemporaryDirectory(dir=work.kept[0].parent) as aside:
        with contextlib.ExitStack() as stack:
            writers = {
                n: stack.enter_context(LayerFileWriter(Path(aside) / f"{n}.safetensors", n, work.layer)) for n in names
            }
            for path in work.kept:
                batch = load_batch(path)
                losses.append(batch.losses)
                for name, writer in writers.items():
                    for extent, payload in zip(batch.extents[name], batch.payloads[name], strict=True):
                        writer.add(extent, payload)
        measured = {k: torch.cat([part[k] for part in losses]) for k in losses[0]}
        table = pooled(measured) | {"method": measured["method"]}
        save(Path(aside) / "losses.safetensors", table, metadata(names, methods.numbered()))
        for file in Path(aside).iterdir():
            file.replace(work.folder / file.name)
    return {"entries": {n: asdict(w.entry) for n, w in writers.items() if w.entry}}
