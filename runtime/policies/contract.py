"""What serving tells a policy, and what it asks of one. Pure: numbers in, decisions out, no torch.

A policy is one file with an `Entry` and one line in registry.py. One that never changes anything answers with a map
(`versions`); one that changes versions while the model is served is made when it is loaded (`make`). Decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from moepack.pack.errors import InputError
from moepack.runtime.allocation.knapsack import Table

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle

Key = tuple[int, int]  # layer position, expert
Wanted = Mapping[Key, int]  # the version of every expert that is to be above the base one, the most wanted first
Versions = tuple[tuple[str, ...], ...]  # a version's name by layer position and expert


@dataclass(frozen=True, slots=True)
class Observation:
    """What a policy sees.

    Attributes:
        time: seconds on a clock that never goes back.
        counts: [layers][experts], how often the router chose each since the last observation.
        room: [layers], how many experts of each may be above the base version.
    """

    time: float
    counts: Sequence[Sequence[int]]
    room: Sequence[int]


class LivePolicy(Protocol):
    """A policy that changes versions.

    Attributes:
        blocking: whether the forward pass waits until what is wanted is there; it then observes each layer before its
            experts run, and otherwise never waits.
        patience: seconds between two observations of a policy that does not block.
    """

    blocking: bool
    patience: float

    def observe(self, seen: Observation) -> Wanted | None:
        """What is wanted now; None where it is what was wanted before."""

    def worth(self, key: Key) -> float:
        """How much better an expert is off at the high version, wanted or not; of any two, the lesser goes first."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy that changes versions is made for.

    Attributes:
        experts: [layers].
        high: the number of the high version.
        traffic: [layers][experts], calibration tokens routed to each, at least one.
        gains: [layers][experts], squared error that a token saves at the high version.
    """

    experts: Sequence[int]
    high: int
    traffic: Table
    gains: Table


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What a policy that changes versions lets its user choose; subclasses add to it.

    A field's type says how its text is read; `CHOICES` names the words it may be.

    Attributes:
        hi, lo: the two versions that are served; what is not named is chosen for the least loss that the bundle's
            calibration foretells in the budget.
        share: how the budget is shared among layers: "even", or "loss" by the loss tables.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"share": ("even", "loss")}

    hi: str = ""
    lo: str = ""
    share: str = "even"

    @property
    def keeps_low(self) -> bool:
        """Whether an expert that is promoted keeps its low version; else it gives it back."""
        return True

    @property
    def spare_blocks(self) -> int:
        """Low blocks of each size that are kept for demotions, where low versions are given back."""
        return 0

    @property
    def bytes_per_second(self) -> float | None:
        """What copies may take; None without a limit."""
        return None


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy by its name.

    Attributes:
        name: what stands before the colon.
        usage: how users write it.
        parse: reads what stands after the colon; raises InputError, whose text the caller puts the policy before.
        needs_budget: whether it serves in a memory budget only.
        versions: of a policy that never changes: the map, from the bundle, what was parsed, and the bytes that a
            budget leaves to experts (None without one); raises BudgetError where they do not suffice.
        make: of one that changes versions: the policy, for a setting and what was parsed.
    """

    name: str
    usage: str
    parse: Callable[[str], Any]
    needs_budget: bool = False
    versions: Callable[[Bundle, Any, int | None], Versions] | None = None
    make: Callable[[Setting, Any], LivePolicy] | None = None


Item = TypeVar("Item")
Options = TypeVar("Options", bound=LiveOptions)


def in_turns(items: Iterable[Item], every: int = 1) -> Iterator[Item]:
    """The items; after so many of them other threads run. A decision over thousands of experts takes milliseconds, and
    forward passes would wait for the interpreter's lock."""
    for n, item in enumerate(items):
        if n % every == 0:
            time.sleep(0)
        yield item


def read_options(kind: type[Options], text: str) -> Options:
    """Options written as key=value with commas between.

    Raises:
        InputError: for an option that does not exist, or a value that it cannot have.
    """
    known: dict[str, Any] = {f.name: type(f.default) for f in fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            raise InputError(f"option {key!r} is unknown: there are {', '.join(known)}")
        try:
            values[key] = known[key](value)
        except ValueError:
            raise InputError(f"{key} is a {'whole ' * (known[key] is int)}number, not {value!r}") from None
        if key in kind.CHOICES and value not in kind.CHOICES[key]:
            raise InputError(f"{key} is {' or '.join(kind.CHOICES[key])}, not {value!r}")
    try:
        return kind(**values)
    except ValueError as error:
        raise InputError(str(error)) from None
