"""Measure how far each layer's finished versions move the logits (`moepack.calibrate.logits`), for the allocation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.layer_file import LayerFile
from moepack.pack.manifest import ExpertFileEntry
from moepack.pack.spec import ExpertLayer, Version, lossy
from moepack.pack.values import Expert
from moepack.shared.progress import Reporter

from ..artifacts import PROBE, RunRecord, finished, save
from ..work import WorkDirectory, expert_name

if TYPE_CHECKING:
    import torch


def logits_tables(
    work: WorkDirectory,
    record: RunRecord,
    layers: Sequence[ExpertLayer],
    stages: Mapping[Version, str],
    folder: str,
    reporter: Reporter,
) -> dict[int, Path]:
    """Measure, and write each layer's table `logits` (FORMAT.md) into the stage `folder`; return the files by layer.

    `record` is that of the run, `stages` maps the tables' versions to the stages that made them. Computes on the CPU.
    """
    import torch
    from safetensors.torch import load_file

    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.logits import divergences
    from moepack.calibrate.stream import StreamedModel

    stream = StreamedModel(open_checkpoint(record["checkpoint"]))
    described = {x.index: x for x in layers}
    measured = lossy(tuple(stages))
    reporter.stage("weigh layers by the logits", len(stream.layers))

    def values(layer: int, version: int) -> list[torch.Tensor]:
        return version_values(work, described[layer], measured[version], stages[measured[version]])

    ids = load_file(work.piece("calibrate", None, PROBE))["ids"]
    found = divergences(stream, ids, len(measured), values, lambda _: reporter.step("layer"))
    out = {}
    for layer, row in found.items():
        own = dict(zip(measured, row, strict=True))
        table = torch.tensor([own.get(v, 0.0) for v in stages], dtype=torch.float32)
        out[layer] = work.piece(folder, layer, "logits.safetensors")
        save(out[layer], {"logits": table})
    return out


def version_values(work: WorkDirectory, layer: ExpertLayer, version: Version, stage: str) -> list[torch.Tensor]:
    """The values of a layer's matrices at a finished version, float32 [experts, rows, cols] each."""
    import torch

    entry = ExpertFileEntry(**finished(work, stage, layer.index)["entries"][version.name])
    folder = work.piece(stage, layer.index, "")
    file = LayerFile(folder, expert_name(version.name), entry, version, layer)
    out = [torch.empty(layer.experts, m.rows, m.cols) for m in layer.matrices]
    for e in range(layer.experts):
        found = Expert(version, layer.matrices, file.extent(e), file.place(e)).torch()
        for matrix, whole in zip(layer.matrices, out, strict=True):
            whole[e] = found[matrix.name]
    return out
