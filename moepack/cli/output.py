"""Output of commands: results to stdout, one-line errors to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, is_dataclass
from typing import TYPE_CHECKING, TypeVar

import typer

from moepack.pack.errors import printable

if TYPE_CHECKING:
    from rich.console import Console


T = TypeVar("T")


def console() -> Console:
    """Make a console that wraps text at the terminal's width, or at 120 columns without a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)


def print_json(value: object) -> None:
    """Write a value as JSON to stdout; a dataclass becomes an object of its fields."""
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def show(value: T, as_json: bool, text: str | Callable[[T], object]) -> None:
    """Write a result as JSON, as a line of text, or as `text` renders it for the console."""
    if as_json:
        print_json(value)
    elif isinstance(text, str):
        typer.echo(text)
    else:
        console().print(text(value))


def fail(message: str) -> None:
    """Print a one-line error to stderr, and end the process with exit code 2."""
    typer.echo(f"moepack: {printable(message, keep=chr(10))}", err=True)
    sys.exit(2)
