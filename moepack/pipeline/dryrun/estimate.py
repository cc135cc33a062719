"""Estimate a build's cost before it runs, and before its checkpoint's weights are here.

The work is in dryrun/. With all weights in place every expert is encoded, and a batch runs through the first layers.
Without them, shapes and the released format are enough: of headers on the Hub, or of config.json alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.writer import check_target, existing
from moepack.reports.doctor import disk_rates
from moepack.runtime.devices.glibc import trim
from moepack.runtime.load import check_device
from moepack.shared.memory import bound_kernel_caches
from moepack.shared.progress import Reporter

from ..bound import place
from ..executors.engine import check_engine
from ..needs import needs_of
from ..recipe import Recipe, load_recipe
from ..released import announce
from ..start import calibration_text, named, window_shape
from ..work import check_work
from .ahead import OutlineRun
from .report import Estimate, render
from .walk import DryRun

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.checkpoint import Checkpoint

__all__ = ["Estimate", "estimate", "render"]


def estimate(
    checkpoint: str | Path,
    output: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    device: str = "cpu",
    reporter: Reporter | None = None,
    revision: str | None = None,
    memory: int | None = None,
    work: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
) -> Estimate:
    """Estimate `moepack.build` with these arguments. Writes and removes a probe file.

    No weight and no text is downloaded: of a Hub model, or a directory, without all its weights here, shapes are
    enough. Raises the same errors, but for those of weights that are not here.
    """
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.outline import open_outline
    from moepack.calibrate.stream import StreamedModel

    began = time.perf_counter()
    bound_kernel_caches()
    check_device(device)
    check_engine(engine, address)
    check_target(Path(output))
    if work is not None:
        check_work(Path(work))
    reporter = reporter or Reporter()
    recipe = load_recipe(recipe)
    with reporter.hub_bars():
        outline = open_outline(checkpoint, revision)
        opened = outline.checkpoint if outline is not None else open_checkpoint(checkpoint, revision)
    stream = StreamedModel(opened, device)
    native = None if outline is None else outline.native or stream.native
    recipe, dense = named(stream, recipe, reporter, native)
    carried = announce(stream, recipe, [m for part in dense.values() for m in part], reporter)
    ids = _windows(opened, recipe, calibration, outline is not None)
    needs = needs_of(stream, recipe, len(ids), ids.shape[1], dense, bounded=memory is not None)
    how = place(needs, recipe.calibration.batch_size, memory)
    arguments = stream, recipe, dense, ids, reporter, needs, how
    run = DryRun(*arguments) if outline is None or native is None else OutlineRun(outline, native, *arguments)
    run.seconds["start"] = time.perf_counter() - began
    folder = existing(Path(output).absolute().parent)
    if how.experts_on_disk:
        stream.experts_in = folder if work is None else existing(Path(work).absolute())
    reporter.stage("dry run", run.layers + 2)
    reporter.step("outside the layers")
    run.outside()
    for index in range(run.layers):
        reporter.step(f"layer {index}")
        run.layer(index)
        trim()
    reporter.step("disk")
    linked = work is None or existing(Path(work).absolute()).stat().st_dev == folder.stat().st_dev
    return replace(run.result(disk_rates(folder), work is not None, linked), carried_bytes=carried)


def _windows(opened: Checkpoint, recipe: Recipe, calibration: Sequence[str | Path], shape_only: bool) -> torch.Tensor:
    """The windows' ids; zeros of the shape that the recipe names where no text is read."""
    import torch

    if not shape_only:
        return calibration_text(opened, recipe, calibration)[1].ids
    return torch.zeros(window_shape(opened, recipe), dtype=torch.int64)
