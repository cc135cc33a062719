"""The pipeline: make a bundle of a checkpoint in one streaming pass, or in stages over a work directory."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from moepack.pack.errors import InputError, TargetError
from moepack.pack.writer import LOCK, check_target, remove_empty, remove_left
from moepack.runtime.load import check_device
from moepack.shared.progress import SILENT, Reporter

from .assemble import BuildReport, assemble
from .executors.engine import check_engine, open_executor
from .recipe import Recipe, load_recipe
from .start import resume, start
from .work import WorkDirectory, check_work


def build(
    checkpoint: str | Path,
    output: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    work: str | Path | None = None,
    fresh: bool = False,
    device: str = "cpu",
    engine: str = "local",
    address: str | None = None,
    reporter: Reporter = SILENT,
    revision: str | None = None,
    keep: bool = False,
    memory: int | None = None,
) -> BuildReport:
    """Make a bundle of a checkpoint.

    Args:
        checkpoint: a model directory or a Hub id.
        output: the bundle's directory; must be new or empty.
        recipe: a shipped recipe's name, a file, or a Recipe.
        calibration: files or Hub data sets in place of the recipe's.
        work: a directory for finished pieces, from which a killed build resumes; by default a temporary one.
        fresh: discard the contents of `work`.
        device: where to compute, as torch names it.
        engine: "local", or "ray" to quantise on a Ray cluster; the bytes are the same.
        address: the Ray cluster's address; by default a cluster is started on this machine.
        revision: a branch, tag or commit of a Hub checkpoint.
        keep: keep each layer's observation (the experts' inputs) in `work`, so that `add` can add versions later.
        memory: the most bytes of host memory that the process takes; what does not fit goes to disk in `work`.

    Raises:
        MoepackError: one line with the problem and the remedy; nothing is left at `output`.
    """
    check_engine(engine, address)
    check_device(device)
    target = Path(output)
    check_target(target)
    check_wanted(work, target, fresh, keep)
    recipe = load_recipe(recipe)
    above = target.absolute().parent
    first_made = next((p for p in reversed((above, *above.parents)) if not p.exists()), None)
    with_work = Path(work) if work is not None else _temporary_work(target)
    directory = WorkDirectory(with_work, reporter)
    try:
        run = start(
            directory, checkpoint, recipe, calibration, fresh, device, reporter, revision, memory, work is not None
        )
        with contextlib.closing(open_executor(engine, address)) as executor:
            run.layers(calibrate=True, quantize=True, executor=executor, keep=keep)
        return assemble(directory, target, reporter)
    finally:
        directory.close()
        if work is None:
            shutil.rmtree(with_work, ignore_errors=True)
            if first_made is not None:
                remove_empty(above, first_made)


def _temporary_work(target: Path) -> Path:
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        remove_left(parent, f".{target.name}.work-", LOCK)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.work-", dir=parent))
    except OSError as error:
        raise TargetError(f"{target}: cannot be written: {error.strerror}") from None


def check_wanted(work: str | Path | None, target: Path, fresh: bool, keep: bool) -> None:
    """Raise MoepackError for a work directory that cannot be one, and for options that need one."""
    if work is not None:
        check_work(Path(work), target)
    elif keep or fresh:
        flag = "--keep keeps observations in" if keep else "--fresh discards the contents of"
        raise InputError(f"{flag} the work directory: name one with --work")


def calibrate(
    checkpoint: str | Path,
    work: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    fresh: bool = False,
    device: str = "cpu",
    reporter: Reporter = SILENT,
    revision: str | None = None,
    memory: int | None = None,
) -> None:
    """Run the first stage: collect routing statistics and observations in a work directory. See `build`."""
    check_device(device)
    recipe = load_recipe(recipe)
    with contextlib.closing(WorkDirectory(Path(work), reporter)) as directory:
        run = start(directory, checkpoint, recipe, calibration, fresh, device, reporter, revision, memory)
        run.layers(calibrate=True, quantize=False)


def quantize(
    work: str | Path,
    recipe: str | Recipe | None = None,
    fresh: bool = False,
    device: str = "cpu",
    engine: str = "local",
    address: str | None = None,
    reporter: Reporter = SILENT,
    memory: int | None = None,
) -> None:
    """Run the second stage: quantise every expert at every width, in a calibrated work directory. See `build`."""
    check_engine(engine, address)
    check_device(device)
    with contextlib.closing(WorkDirectory(Path(work), reporter)) as directory:
        recipe = None if recipe is None else load_recipe(recipe)
        run = resume(directory, recipe, fresh, device, reporter, memory=memory)
        with contextlib.closing(open_executor(engine, address)) as executor:
            run.layers(calibrate=False, quantize=True, executor=executor)


def pack(work: str | Path, output: str | Path, reporter: Reporter = SILENT) -> BuildReport:
    """Run the last stage: make a bundle from a quantised work directory. See `build`."""
    target = Path(output)
    check_target(target)
    check_work(Path(work), target)
    with contextlib.closing(WorkDirectory(Path(work), reporter)) as directory:
        return assemble(directory, target, reporter)
