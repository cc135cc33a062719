"""Typed errors of the whole package. Standard library only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

# Kinds of problems of a bundle; docs/reading.md explains each.
Kind = Literal[
    "alignment",
    "bits",
    "canonical",
    "codec",
    "config",
    "count",
    "digest",
    "encoding",
    "file-type",
    "format",
    "format-version",
    "header",
    "json",
    "keys",
    "layers",
    "link",
    "missing",
    "number",
    "offsets",
    "order",
    "overflow",
    "padding",
    "path",
    "range",
    "read",
    "shape",
    "size",
    "tables",
    "text",
    "trailing",
    "truncated",
    "type",
    "unexpected",
    "value",
]
KINDS: tuple[str, ...] = get_args(Kind)
LONGEST = 1000  # characters of a message that are shown; a message may quote a long file

# Errors from a model's code or transformers on unexpected input: no weights, layers that do nothing, an impossible
# config. torch.OutOfMemoryError is a RuntimeError too: callers re-raise it before they catch these.
CODE_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def printable(text: str, keep: str = "") -> str:
    """Text that is safe in a terminal: unprintable characters, except those in `keep`, become escapes."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def in_a_line(error: BaseException) -> str:
    """Another library's error as one `printable` line; a message of at most one word follows its class's name."""
    words = printable(" ".join(str(error).split())[:300])
    name = type(error).__name__
    return words if " " in words else f"{name} {words}".rstrip()


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its place, its kind and a message."""

    location: str  # the bundle's directory, the file in it, then layer, expert, version or field; made `printable`
    kind: Kind  # one of KINDS, for programs and tests. The message may change, the kind may not
    message: str  # one line in lower case; made `printable`

    def __post_init__(self) -> None:
        for name in ("location", "message"):
            text = printable(getattr(self, name)[: LONGEST + 1])
            object.__setattr__(self, name, text if len(text) <= LONGEST else text[: LONGEST - 3] + "...")

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


# A command with its flags, which stays as it is, or a flag.
_FLAG = re.compile(r"(moepack [a-z]+(?: --[a-z-]+)+)|(?<![\w-])--([a-z][a-z-]*)")
_command_lines = 0  # that are running in this process


@contextlib.contextmanager
def naming_flags() -> Iterator[None]:
    """Let errors name flags, as `--device-memory`, while a command line runs: Python's users give `device_memory`."""
    global _command_lines
    _command_lines += 1
    try:
        yield
    finally:
        _command_lines -= 1


class MoepackError(Exception):
    """An error that the user can act on. Its text is one line: where, what, and what to do.

    The text is written with flags; outside the command line `str` has the names of Python's arguments instead.
    """

    def __str__(self) -> str:
        text = super().__str__()
        return text if _command_lines else _FLAG.sub(lambda m: m[1] or m[2].replace("-", "_"), text)


class InputError(MoepackError):
    """An argument, a recipe, a checkpoint or a data file that cannot be used as given."""


class NotFiniteError(InputError):
    """A NaN or an infinity where only numbers serve: in a checkpoint, in calibration, or in what a build makes."""

    def __init__(self, location: str, message: str, index: Sequence[int] = ()) -> None:
        """`location`: a tensor, layer or expert. `message`: from a verb on. `index`: of the number in the tensor."""
        self.location = location
        self.message = message
        self.index = tuple(index)
        super().__init__(f"{location}{list(index) if index else ''} {message}")

    def __reduce__(self) -> tuple[type, tuple[str, str, tuple[int, ...]]]:  # for errors of other processes
        return type(self), (self.location, self.message, self.index)

    def within(self, outer: str, experts: range | None = None) -> NotFiniteError:
        """The same error in an outer location. `experts`: those along the tensor's first axis, if it has experts."""
        location = f"{outer}: {self.location}"
        if experts is None or not self.index:
            return NotFiniteError(location, self.message, self.index)
        first, *rest = self.index
        return NotFiniteError(location, f"(expert {experts[first]}) {self.message}", (experts[first], *rest))


class TargetError(MoepackError):
    """An output that cannot be written."""


class MissingExtraError(MoepackError):
    """A library of an optional extra is needed and absent."""

    def __init__(self, library: str, extra: str) -> None:
        super().__init__(f"{library} is not installed: this needs it. Run: pip install 'moepack[{extra}]'")


class BundleError(MoepackError):
    """A bundle that breaks the format. Carries every problem that was found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        if not problems:
            raise ValueError("a BundleError needs at least one problem")
        self.problems = tuple(problems)
        more = f" (and {len(problems) - 1} more: moepack verify lists them)" if len(problems) > 1 else ""
        super().__init__(f"{problems[0]}{more}")

    @classmethod
    def single(cls, location: str, kind: Kind, message: str) -> BundleError:
        """The error for one problem."""
        return cls([Problem(location, kind, message)])


class CodecError(MoepackError):
    """A coded byte stream that does not decode. The caller adds which extent it is in."""
