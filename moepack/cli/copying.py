"""Commands that copy a bundle or some versions: to another directory, to the Hub, from the Hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moepack.pack.errors import InputError
from moepack.runtime.planning.options import LoadOptions
from moepack.shared.progress import progress

from .options import Bundle, Dense, Fitted, Json, Names, Output, Quiet, loading, names_of
from .output import show

if TYPE_CHECKING:
    from moepack.export.report import Exported

_PLANNED = ("policy", "device", "kv_tokens")  # options of a plan
_fit = loading(*_PLANNED, device_memory=(Fitted, None))  # here --fit names the budget

_Repository = Annotated[str, typer.Argument(help="The Hub repository, as owner/name.", show_default=False)]


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
            help="Keep one map and its versions, for static:allocation: the manifest's map, or with --fit the plan's.",
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
    kept = ", ".join((*result.versions, *(f"dense {name}" for name in result.dense)))
    kept += f" and the map {result.allocation!r}" if result.allocation else ""
    show(result, as_json, f"{result.bundle}: keeps {kept}: {result.bytes_after:,} of {result.bytes_before:,} bytes")


def export(
    bundle: Bundle,
    output: Output,
    to: Annotated[
        str,
        typer.Option("--to", help="checkpoint, compressed-tensors, gptq or gguf (docs/export.md)."),
    ] = "checkpoint",
    bits: Annotated[
        str | None,
        typer.Option("--bits", help="Export every expert at one width (4: w4 or w4d5) or version (such as mxfp4)."),
    ] = None,
    map_file: Annotated[
        str | None,
        typer.Option(
            "--map", help="Take each expert's version from a map: FILE.json, or allocation for the manifest's."
        ),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option("--fit", help="Choose one width for each layer, the best that fits in this size, such as 24GiB."),
    ] = None,
    dense: Annotated[
        str | None, typer.Option("--dense", help="The version of other matrices: w8; by default the most precise.")
    ] = None,
    scales: Annotated[
        str, typer.Option("--scales", help="The dtype of compressed-tensors' scales: bf16 or fp32.")
    ] = "bf16",
    shard: Annotated[
        str | None, typer.Option("--shard-size", help="The largest size of a file, such as 2GB; by default 5GB.")
    ] = None,
    lossy: Annotated[
        str | None,
        typer.Option("--lossy", help="With --to gguf: let llama.cpp quantise the version's values: Q4_K_M, Q6_K ..."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; only print the size and the loss.")
    ] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a bundle's weights in another program's format.

    To continue a stopped export, run the same command again.
    """
    from moepack.export import Wanted
    from moepack.export import export as run

    wanted = Wanted(bits, map_file, fit, dense, scales, shard, lossy)
    with progress(quiet) as reporter:
        made = run(bundle, output, to, wanted, dry_run, reporter)
    _tell(made, as_json)


def _tell(made: Exported, as_json: bool) -> None:
    """Print what was exported."""
    takes = f"{made.bytes:,} bytes, {made.bits:.3f} bits a weight of experts, relative loss {made.loss:.5f}"
    if not made.tensors:
        widths = ", ".join(f"{count:,} {name}" for name, count in made.versions.items())
        as_is = "every value as in the bundle" if made.exact else "values rounded where they are read"
        if made.lost is not None:
            kinds = (f"{kind} {error:.5f} ({made.lost.types[kind]})" for kind, error in made.lost.error.items())
            as_is = f"quantised to {made.lost.mix}, with a relative squared error of {', '.join(kinds)}"
        show(made, as_json, f"{made.path}: {made.target}: {takes}; experts: {widths}; {as_is}")
        return
    left = f"; left out, as the bundle does not hold them as released: {', '.join(made.left_out[:5])}"
    left = left if made.left_out else ""
    left += f" and {len(made.left_out) - 5} more" if len(made.left_out) > 5 else ""
    show(made, as_json, f"{made.path}: {made.tensors} tensors as they were released, {made.bytes:,} bytes{left}")


def push(
    bundle: Bundle,
    repo: _Repository,
    private: Annotated[bool, typer.Option("--private", help="Create a private repository.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="The branch to push to.")] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="The checkpoint's Hub id, for the model card.")
    ] = None,
    measured: Annotated[
        list[Path] | None,
        typer.Option(
            "--measured",
            help="A file with the output of eval --kl --policy static:w4 --json, for the card; repeatable.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify and upload a bundle to the Hub; run again to continue."""
    from moepack.hub import push as run

    with progress(quiet) as reporter:
        address = run(bundle, repo, private, revision, reporter, base_model, measured or ())
    show({"repo": repo, "commit": address}, as_json, f"pushed to {repo}: {address}")


@_fit
def pull(
    repo: _Repository,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The bundle's directory, or the export's.", show_default=False)
    ],
    options: LoadOptions,
    program: Annotated[
        str | None,
        typer.Option("--for", help="Export for vllm, transformers or llama.cpp, of --bits or within --fit bytes."),
    ] = None,
    bits: Annotated[
        str | None,
        typer.Option("--bits", help="With --for: export every expert at one width (4: w4 or w4d5) or version."),
    ] = None,
    versions: Names = "",
    add: Annotated[str, typer.Option("--add", help="Add these versions to a pulled bundle.")] = "",
    dense: Dense = "",
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Download a bundle or some versions, or export some for another program; run again to continue."""
    from moepack.hub import pull as run
    from moepack.pack.reader import open_bundle

    if program is not None:
        from moepack.export import Wanted
        from moepack.hub import pull_for

        plain = LoadOptions()
        given = {"--versions": versions, "--add": add}
        given |= {f"--{n.replace('_', '-')}": getattr(options, n) != getattr(plain, n) for n in _PLANNED}
        if left := [name for name, value in given.items() if value]:
            raise InputError(f"--for {program} chooses what it needs: leave {' and '.join(left)} out")
        size = None if options.device_memory is None else str(options.device_memory)
        wanted = Wanted(bits, fit=size, dense=dense or None)
        with progress(quiet) as reporter:
            made = pull_for(repo, output, program, wanted, revision, reporter)
        _tell(made, as_json)
        return
    if bits is not None:
        raise InputError("--bits needs --for; to choose versions without --for, use --versions")
    with progress(quiet) as reporter:
        fit = _budgeted(options)
        path = run(repo, output, names_of(versions), revision, reporter, names_of(add), fit, names_of(dense))
    versions_here = [v.name for v in open_bundle(path).versions]
    show({"bundle": str(path), "versions": versions_here}, as_json, f"{path}: complete and verified")
