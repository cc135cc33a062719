"""What commands write: tables and JSON to stdout, progress and the one line of an error to stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer

from moepack.pack.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from moepack.progress import Reporter


def console() -> Console:
    """For tables and text that is to be folded, which a terminal's width decides; elsewhere 120 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)


def progress(quiet: bool) -> Reporter:
    """Shows on stderr how far a command is, unless it is to be quiet."""
    from moepack.progress import Reporter, RichReporter

    return Reporter() if quiet else RichReporter()


def print_json(value: Any) -> None:
    """On stdout."""
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def fail(message: str) -> None:
    """End the process with one line and exit code 2."""
    typer.echo(f"moepack: {printable(message, keep=chr(10))}", err=True)
    sys.exit(2)
