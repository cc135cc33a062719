"""The command line: each command parses its arguments and calls one library function.

Results go to stdout: a report, generated text, or with --json only JSON. Progress and notes go to stderr. An error is
one line on stderr and exit code 2.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moepack.pack.errors import MoepackError

from .building import build, calibrate, pack, quantize
from .copying import export, pull, push, shrink
from .looking import doctor, inspect, plan, verify
from .output import fail
from .running import chat, evaluate, generate, profile, serve

app = typer.Typer(
    name="moepack",
    help="Pack a Mixture-of-Experts model with every expert at several precisions, and serve it in a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for _command in (  # as --help lists them
    build,
    calibrate,
    quantize,
    pack,
    inspect,
    shrink,
    export,
    verify,
    evaluate,
    generate,
    chat,
    plan,
    profile,
    serve,
    push,
    pull,
    doctor,
):
    app.command("eval" if _command is evaluate else None)(_command)


def _version(show: bool) -> None:
    if show:
        from moepack import __version__

        typer.echo(f"moepack {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run a command, and print an error that a user can act on as one line."""
    from moepack.runtime.patches import leave_out, quiet_libraries

    quiet_libraries()
    leave_out(next(iter(sys.argv[1:]), ""))
    try:
        app()
    except MoepackError as error:
        fail(str(error))
    except ModuleNotFoundError as error:  # of an incomplete installation, or a model's own code
        fail(f"{error}: install what has it (`pip install moepack` brings what moepack itself needs)")
    except KeyboardInterrupt:
        typer.echo("moepack: interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")
