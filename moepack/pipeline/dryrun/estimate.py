"""Estimate a build's cost before it runs, and before its checkpoint's weights are here.

Shapes and the released format are enough: of a checkpoint, of headers on the Hub, or of config.json alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from moepack.pack.writer import check_target, existing
from moepack.reports.doctor import disk_rates
from moepack.runtime.devices.glibc import trim
from moepack.runtime.load import check_device
from moepack.shared.memory import bound_kernel_caches
from moepack.shared.progress import SILENT, Reporter

from ..bound import place
from ..build import check_wanted
from ..executors.engine import check_engine
from ..needs import needs_of
from ..recipe import Recipe, load_recipe
from ..released import announce
from ..start import calibration_text, named, note_shorter, note_unused, window_shape
from .report import Estimate, render
from .walk import DryRun

__all__ = ["Estimate", "estimate", "render"]


def estimate(
    checkpoint: str | Path,
    output: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    device: str = "cpu",
    reporter: Reporter = SILENT,
    revision: str | None = None,
    memory: int | None = None,
    work: str | Path | None = None,
    engine: str = "local",
    address: str | None = None,
    fresh: bool = False,
    keep: bool = False,
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
    check_wanted(work, Path(output), fresh, keep)
    recipe = load_recipe(recipe)
    note_unused(recipe, reporter)
    with reporter.hub_bars():
        outline = open_outline(checkpoint, revision)
        opened = outline.checkpoint if outline is not None else open_checkpoint(checkpoint, revision)
    stream = StreamedModel(opened, device)
    native = None
    if outline is not None:
        native = outline.native or stream.native
        outline = replace(outline, native=native)
    recipe, dense = named(stream, recipe, reporter, native)
    carried = announce(stream, recipe, [m for part in dense.values() for m in part], reporter)
    note_shorter(opened, recipe, reporter)
    shape = window_shape(opened, recipe)
    if outline is None:
        windows, length = calibration_text(opened, recipe, calibration)[1].ids.shape
        shape = windows, length
    needs = needs_of(stream, recipe, *shape, dense, bounded=memory is not None)
    how = place(needs, recipe.calibration.batch_size, memory)
    run = DryRun(stream, outline, recipe, dense, shape, reporter, needs, how)
    run.seconds["start"] = time.perf_counter() - began
    folder = existing(Path(output).absolute().parent)
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
