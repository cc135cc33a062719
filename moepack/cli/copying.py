"""The commands that copy a bundle, or some of its versions: to another directory, to the Hub, from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moepack.runtime.planning.options import LoadOptions

from .options import Bundle, Dense, Fitted, Json, Names, Output, Quiet, loading, names_of
from .output import print_json, progress

_fit = loading("policy", "device", "kv_tokens", device_memory=(Fitted, None))  # --fit is the budget


def _budgeted(options: LoadOptions) -> LoadOptions | None:
    return None if options.budget is None else options


@_fit
def shrink(
    bundle: Bundle,
    output: Output,
    options: LoadOptions,
    versions: Names = "",
    allocation: Annotated[
        bool,
        typer.Option(
            "--allocation",
            help="Only what one map names, and the map, for static:allocation: the manifest's, with --fit the plan's.",
        ),
    ] = False,
    dense: Dense = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a bundle with fewer versions."""
    from moepack.pipeline.shrink import shrink as run

    with progress(quiet) as reporter:
        result = run(bundle, output, names_of(versions), _budgeted(options), allocation, reporter, names_of(dense))
    if as_json:
        from dataclasses import asdict

        print_json(asdict(result))
    else:
        kept = ", ".join((*result.versions, *(f"dense {name}" for name in result.dense)))
        kept = f"{kept}{f' and the map {result.allocation!r}' if result.allocation else ''}"
        typer.echo(f"{result.bundle}: keeps {kept}: {result.bytes_after:,} of {result.bytes_before:,} bytes")


def push(
    bundle: Bundle,
    repo: Annotated[str, typer.Argument(help="The Hub repository, as owner/name.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Create it private.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="The branch to push to.")] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="The checkpoint's Hub id, for the model card.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify a bundle and upload it to the Hub; run again, it goes on."""
    from moepack.hub import push as run

    with progress(quiet) as reporter:
        address = run(bundle, repo, private, revision, reporter, base_model)
    if as_json:
        print_json({"repo": repo, "commit": address})
    else:
        typer.echo(f"pushed to {repo}: {address}")


@_fit
def pull(
    repo: Annotated[str, typer.Argument(help="The Hub repository, as owner/name.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the bundle goes.", show_default=False)],
    options: LoadOptions,
    versions: Names = "",
    add: Annotated[str, typer.Option("--add", help="Add these to a bundle that was pulled before.")] = "",
    dense: Dense = "",
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Download a bundle, or some versions of it; run again, it goes on."""
    from moepack.hub import pull as run

    with progress(quiet) as reporter:
        fit = _budgeted(options)
        path = run(repo, output, names_of(versions), revision, reporter, names_of(add), fit, names_of(dense))
    if as_json:
        from moepack.pack.reader import open_bundle

        print_json({"bundle": str(path), "versions": [v.name for v in open_bundle(path).versions]})
    else:
        typer.echo(f"{path}: complete and verified")
