"""The command line: each command parses its arguments and calls one library function.

Results go to stdout: a report, generated text, or with --json only JSON. Progress and notes go to stderr. An error is
one line on stderr and exit code 2.
"""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from moepack.pack.errors import MoepackError, naming_flags

from .building import build, calibrate, pack, quantize
from .copying import export, pull, push, shrink
from .looking import doctor, inspect, plan, verify
from .output import fail
from .running import bench, chat, evaluate, generate, profile, serve

app = typer.Typer(
    name="moepack",
    help="Pack a Mixture-of-Experts model with every expert at several precisions, and serve it in a memory budget.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Interrupted(BaseException):
    """Ctrl-C ended a command, whose name is the argument. A BaseException: a model's code may catch all others."""


# What the same command does when it is typed again. Other commands keep nothing.
_GOES_ON = {
    "build": "the same command goes on behind the last finished layer",
    "build without --work": "nothing was kept; with --work DIRECTORY the next goes on where it is stopped",
    "calibrate": "the same command goes on behind the last finished layer",
    "quantize": "the same command goes on behind the last finished layer",
    "export": "the same command goes on behind the last finished file",
    "push": "the same command sends what is not there yet",
    "pull": "the same command fetches what is not here yet",
    "chat": "here Ctrl-C ends the chat, as /exit does; during an answer it ends the answer",
}


def _interruptible(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """Let Ctrl-C in a command raise Interrupted: typer itself would end the process without a word."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            without = name == "build" and kwargs.get("work") is None
            raise Interrupted(f"{name} without --work" if without else name) from None

    return run


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
    bench,
    profile,
    serve,
    push,
    pull,
    doctor,
):
    _name = "eval" if _command is evaluate else _command.__name__
    app.command(_name)(_interruptible(_name, _command))


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
    """Run a command, and print an error that a user can act on as one line, which names flags."""
    with naming_flags():
        _run()


def _run() -> None:
    from moepack.runtime.patches import leave_out, quiet_libraries, wait_briefly

    quiet_libraries()
    wait_briefly()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may show ASCII alone
    leave_out(next(iter(sys.argv[1:]), ""))
    try:
        app()
    except MoepackError as error:
        fail(str(error))
    except ModuleNotFoundError as error:  # of an incomplete installation, or a model's own code
        fail(f"{error}: install what has it (`pip install moepack` brings what moepack itself needs)")
    except Interrupted as stop:
        how = _GOES_ON.get(str(stop), "nothing was kept")
        typer.echo(f"moepack: interrupted: {how}", err=True)
        sys.exit(130)
    except KeyboardInterrupt:  # outside a command
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")
