"""Commands that make a bundle: in one pass or by stages."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepack.pack.errors import InputError
from moepack.shared.progress import progress

from . import options as flag
from .output import console, show

if TYPE_CHECKING:
    from moepack.pipeline.assemble import BuildReport


def build(
    checkpoint: flag.Checkpoint,
    output: flag.Output,
    recipe: flag.RecipeName = "default",
    calibration: flag.Texts = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Keep finished pieces in this directory, and resume from them.")
    ] = None,
    fresh: flag.Fresh = False,
    device: flag.Device = "cpu",
    engine: flag.EngineName = "local",
    address: flag.Address = None,
    revision: flag.Revision = None,
    memory: flag.Bounded = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate bytes, memory and time; write nothing.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep the experts' inputs in --work, so that --add can use them.")
    ] = False,
    added: Annotated[
        str | None,
        typer.Option("--add", help="Add these versions, such as w3,w2, to the bundle at --output, from --work."),
    ] = None,
    added_dense: Annotated[
        str | None,
        typer.Option("--add-dense", help="Add these versions, such as w8, of the matrices outside the experts."),
    ] = None,
    group_sizes: Annotated[
        list[str] | None,
        typer.Option(
            "--group-size", help="The group size of an added version, such as w4=32. An existing version is replaced."
        ),
    ] = None,
    as_json: flag.Json = False,
    quiet: flag.Quiet = False,
) -> None:
    """Make a bundle of a checkpoint, or add versions to a bundle."""
    from moepack.pipeline.build import build as run

    if added is not None or added_dense is not None or group_sizes:
        from moepack.pipeline.add import add, parse_group_sizes

        if work is None:
            raise InputError("--add and --add-dense continue a build with --keep: name its --work")
        if dry_run:
            raise InputError("--dry-run estimates a whole build, not additions: leave one of them out")
        if calibration or recipe != "default" or keep:
            raise InputError(
                "additions use the recipe and text of --work: leave out --recipe, --calibration and --keep; other "
                "zeros or another method are another build"
            )
        names = flag.names_of(added or "")
        dense = flag.names_of(added_dense or "")
        sizes = parse_group_sizes(group_sizes or ())
        with progress(quiet) as reporter:
            report = add(
                output,
                work,
                names,
                sizes,
                checkpoint,
                fresh,
                device,
                engine,
                address,
                reporter,
                revision,
                memory,
                dense,
            )
        _report(report, as_json)
        return

    if dry_run:
        from moepack.pipeline.dryrun.estimate import estimate, render

        with progress(quiet) as reporter:
            expected = estimate(
                checkpoint,
                output,
                recipe,
                calibration or (),
                device,
                reporter,
                revision=revision,
                memory=memory,
                work=work,
                engine=engine,
                address=address,
                fresh=fresh,
                keep=keep,
            )
        show(expected, as_json, render)
        if engine == "ray" and not as_json:
            console().print("Times are those of this machine alone: a cluster shares the quantising.")
        return
    with progress(quiet) as reporter:
        report = run(
            checkpoint,
            output,
            recipe,
            calibration or (),
            work,
            fresh,
            device,
            engine,
            address,
            reporter,
            revision,
            keep,
            memory,
        )
    _report(report, as_json)


def calibrate(
    checkpoint: flag.Checkpoint,
    work: flag.Work,
    recipe: flag.RecipeName = "default",
    calibration: flag.Texts = None,
    fresh: flag.Fresh = False,
    device: flag.Device = "cpu",
    revision: flag.Revision = None,
    memory: flag.Bounded = None,
    quiet: flag.Quiet = False,
) -> None:
    """Stage 1: collect the inputs of every expert."""
    from moepack.pipeline.build import calibrate as run

    with progress(quiet) as reporter:
        run(checkpoint, work, recipe, calibration or (), fresh, device, reporter, revision, memory)


def quantize(
    work: flag.Work,
    recipe: Annotated[
        str | None, typer.Option("--recipe", "-r", help="A recipe that replaces the calibrated one.")
    ] = None,
    fresh: flag.Fresh = False,
    device: flag.Device = "cpu",
    engine: flag.EngineName = "local",
    address: flag.Address = None,
    memory: flag.Bounded = None,
    quiet: flag.Quiet = False,
) -> None:
    """Stage 2: quantise every expert at every width."""
    from moepack.pipeline.build import quantize as run

    with progress(quiet) as reporter:
        run(work, recipe, fresh, device, engine, address, reporter, memory)


def pack(work: flag.Work, output: flag.Output, as_json: flag.Json = False, quiet: flag.Quiet = False) -> None:
    """Stage 3: write the bundle."""
    from moepack.pipeline.build import pack as run

    with progress(quiet) as reporter:
        report = run(work, output, reporter)
    _report(report, as_json)


def _report(report: BuildReport, as_json: bool) -> None:
    said = "holds these versions already: nothing to add; " if report.unchanged else ""
    lines = [f"bundle {report.bundle}, {said}calibrated on {report.calibration_tokens:,} tokens"]
    for version, methods in report.methods.items():
        lines.append(f"  {version}: {', '.join(f'{n} experts by {m}' for m, n in methods.items())}")
    lines += [f"  dense matrices: {', '.join(report.dense)}"] if report.dense else []
    show(report, as_json, "\n".join(lines))
