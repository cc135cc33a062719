"""Typed errors of the whole package. Standard library only; decides nothing about how they are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong.

    Attributes:
        location: where: a path, and after it whatever narrows it down (layer, expert, version, field).
        kind: a stable word for programs and tests; the message may change, the kind may not.
        message: what is wrong, in one line of lower case.
    """

    location: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


class MoepackError(Exception):
    """An error that the user can act on. Its text is one line: where, what, and what to do."""


class InputError(MoepackError):
    """An argument, a recipe, a checkpoint or a data file that cannot be used as given."""


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
    def single(cls, location: str, kind: str, message: str) -> BundleError:
        """The error for one problem."""
        return cls([Problem(location, kind, message)])


class CodecError(MoepackError):
    """A coded byte stream that does not decode. The caller knows where it stood and says so."""
