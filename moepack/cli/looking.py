"""Commands that report: on a bundle, on what a budget would hold of it, and on this machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from moepack.runtime.planning.options import GENERATION, LoadOptions
from moepack.shared.progress import progress

from .options import Bundle, Json, Quiet, loading
from .output import console, fail, print_json, show


def inspect(
    bundle: Bundle,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the loss tables into this .png, .svg or .pdf.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Write a report into this single .html file.")] = None,
    as_json: Json = False,
) -> None:
    """Show versions, bytes, bits per weight and losses."""
    from moepack.reports import inspect as report

    if plot is not None:
        report.check_picture(plot)
    if page is not None:
        from moepack.reports.page import check_page, write_page

        check_page(page)
    facts = report.inspect(bundle)
    if plot is not None:
        report.plot(bundle, plot)
    if page is not None:
        write_page(bundle, facts, page)
    show(facts, as_json, report.render)


def verify(
    bundle: Bundle,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", help="Compare with this checkpoint, bit for bit.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check digests, and bits against a checkpoint."""
    from moepack.reports.verify import agreement
    from moepack.reports.verify import verify as run

    with progress(quiet) as reporter:
        problems = run(bundle, checkpoint, reporter)
    if as_json:
        print_json({"ok": not problems, "problems": [asdict(problem) for problem in problems]})
    else:
        for problem in problems:
            typer.echo(problem)
        if not problems:
            typer.echo(f"{bundle}: good{f', {agreement(bundle)} {checkpoint}' if checkpoint else ''}")
    if problems:
        fail(f"{bundle}: {len(problems)} problem{'s' * (len(problems) > 1)}")


_PLANNED = ("policy", "device_memory", "memory", "dense", "max_tpot", "profile", "kv", "dtype")
_ANYWHERE = typer.Option("--device", help="cpu, cuda ...; not necessarily on this machine.")


@loading(*_PLANNED, **GENERATION, device=(Annotated[str, _ANYWHERE], "cpu"))
def plan(bundle: Bundle, options: LoadOptions, as_json: Json = False) -> None:
    """Plan a memory budget: versions, loss and speed. By default for generate with a prompt of 512 tokens."""
    from moepack.reports import plan as planning

    planned = planning.plan(bundle, options)
    if as_json:
        print_json(planning.as_json(planned))
    if planned.message is not None:
        fail(planned.message)
    if not as_json:
        console().print(planning.render(planned))


def doctor(
    directory: Annotated[Path | None, typer.Option("--directory", help="Where to measure disk rates.")] = None,
    kernels: Annotated[
        bool, typer.Option("--kernels", help="Measure and show the kernel for each version and device.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show this machine's build methods, devices, memory and rates."""
    from moepack.reports import doctor as reports

    if kernels:
        rows = reports.kernels()
        line = "{device:<16} {version:<16} {tokens:>6} tokens an expert: {kernel}"
        show({"kernels": rows}, as_json, "\n".join(line.format(**row) for row in rows))
        return
    facts = reports.doctor(directory)
    show(facts, as_json, reports.render)
    if facts["problems"]:
        raise typer.Exit(1)
