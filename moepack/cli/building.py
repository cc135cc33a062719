"""The commands that make a bundle: in one pass or by stages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from moepack.pack.errors import InputError
from moepack.runtime.planning.sizes import parse_size

from .options import (
    Address,
    Bounded,
    Checkpoint,
    Device,
    EngineName,
    Fresh,
    Json,
    Output,
    Quiet,
    RecipeName,
    Revision,
    Texts,
    Work,
    names_of,
)
from .output import console, print_json, progress


def build(
    checkpoint: Checkpoint,
    output: Output,
    recipe: RecipeName = "default",
    calibration: Texts = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Keep finished pieces here, and resume from them.")
    ] = None,
    fresh: Fresh = False,
    device: Device = "cpu",
    engine: EngineName = "local",
    address: Address = None,
    revision: Revision = None,
    memory: Bounded = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make nothing: say what bytes, memory and time it would take.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep in --work what experts saw, for --add: see docs for what it takes.")
    ] = False,
    added: Annotated[
        str | None, typer.Option("--add", help="Add these versions, as w3,w2, to the bundle at --output, from --work.")
    ] = None,
    added_dense: Annotated[
        str | None, typer.Option("--add-dense", help="Add versions, as w8, of the matrices that are no expert's.")
    ] = None,
    group_sizes: Annotated[
        list[str] | None,
        typer.Option("--group-size", help="Of a version to add, as w4=32; one that the bundle has is replaced."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a bundle of a checkpoint, in one pass; or add versions to one."""
    from moepack.pipeline.build import build as run

    bound = parse_size(memory)
    if added is not None or added_dense is not None or group_sizes:
        from moepack.pipeline.add import add, parse_group_sizes

        if work is None:
            raise InputError("--add and --add-dense go on from what a build with --keep left: name its --work")
        if dry_run:
            raise InputError("--dry-run says what a whole build takes, and nothing of adding: leave one of them out")
        if calibration or recipe != "default" or keep:
            raise InputError(
                "adding goes by the recipe, the text and what is kept of --work: leave --recipe, --calibration and "
                "--keep out"
            )
        names, sizes = names_of(added or ""), parse_group_sizes(group_sizes or ())
        with progress(quiet) as reporter:
            report = add(
                output, work, names, sizes, checkpoint, fresh, device, engine, address, reporter, revision, bound,
                names_of(added_dense or ""),
            )  # fmt: skip
        _report(report, as_json)
        return

    if dry_run:
        from dataclasses import asdict

        from moepack.pipeline.estimate import estimate, render

        with progress(quiet) as reporter:
            expected = estimate(
                checkpoint, output, recipe, calibration or (), device, reporter, revision, bound, work, engine, address
            )
        print_json(asdict(expected)) if as_json else console().print(render(expected))
        if engine == "ray" and not as_json:
            console().print("Times are of this machine alone: a cluster shares out what quantising takes.")
        return
    with progress(quiet) as reporter:
        report = run(
            checkpoint, output, recipe, calibration or (), work, fresh, device, engine, address, reporter, revision,
            keep, bound,
        )  # fmt: skip
    _report(report, as_json)


def calibrate(
    checkpoint: Checkpoint,
    work: Work,
    recipe: RecipeName = "default",
    calibration: Texts = None,
    fresh: Fresh = False,
    device: Device = "cpu",
    revision: Revision = None,
    memory: Bounded = None,
    quiet: Quiet = False,
) -> None:
    """Stage 1: what reaches every expert."""
    from moepack.pipeline.build import calibrate as run

    bound = parse_size(memory)
    with progress(quiet) as reporter:
        run(checkpoint, work, recipe, calibration or (), fresh, device, reporter, revision, bound)


def quantize(
    work: Work,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="In place of the calibrated one's.")] = None,
    fresh: Fresh = False,
    device: Device = "cpu",
    engine: EngineName = "local",
    address: Address = None,
    memory: Bounded = None,
    quiet: Quiet = False,
) -> None:
    """Stage 2: every expert at every width."""
    from moepack.pipeline.build import quantize as run

    bound = parse_size(memory)
    with progress(quiet) as reporter:
        run(work, recipe, fresh, device, engine, address, reporter, bound)


def pack(
    work: Work,
    output: Output,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Stage 3: the bundle."""
    from moepack.pipeline.build import pack as run

    with progress(quiet) as reporter:
        report = run(work, output, reporter)
    _report(report, as_json)


def _report(report: Any, as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        print_json(asdict(report))
        return
    typer.echo(f"bundle {report.bundle}, calibrated on {report.calibration_tokens:,} tokens")
    for version, methods in report.methods.items():
        typer.echo(f"  {version}: {', '.join(f'{n} experts by {m}' for m, n in methods.items())}")
    if report.dense:
        typer.echo(f"  dense matrices: {', '.join(report.dense)}")
