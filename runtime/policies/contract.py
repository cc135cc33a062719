"""The events that serving tells a policy, and the policy's answers. Pure: numbers in, decisions out, no torch.

A policy is one file with an `Entry`, and one line in registry.py. A policy that never changes anything answers with a
map (`versions`). A policy that changes placements is made when a model is loaded (`make`). It names the events that it
needs, and receives them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.runtime.allocation.knapsack import Table

from .placements import Placement, find_version

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle

Key = tuple[int, int]  # layer position, expert
Wanted = Mapping[Key, int]  # placements of the experts that leave the base placement, the most wanted first
Versions = tuple[tuple[str, ...], ...]  # a version's name by layer position and expert
Ladder = tuple[Placement, ...]  # the best first, the base last; other code uses indices into it
Ints = npt.NDArray[np.int64]  # [experts]
Floats = npt.NDArray[np.float64]  # [experts]
Counts = Sequence[Ints]
Sums = Sequence[Floats]


class Changes(dict[Key, int]):
    """An answer to `LayerReached` that names only what changes. An expert named at the base placement leaves."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a policy is told."""

    time: float  # seconds on a monotonic clock
    capacity: Sequence[int]  # [layers], bytes on the device that a layer's experts may take beyond all at the base


@dataclass(frozen=True, slots=True)
class Counted(Event):
    """An event with routing statistics."""

    counts: Counts  # int64 [experts] a layer, how often the router chose each expert, without padding
    gates: Sums = ()  # float64 [experts] a layer, the sums of gate weights; empty unless the policy needs them


@dataclass(frozen=True, slots=True)
class Interval(Counted):
    """Time has passed, or the capacity has changed. Counts cover the steps that ended since the last interval.

    The other fields cover those of the steps that read no prompt, for a policy that needs timings.
    """

    steps: int = 0
    computed: float = 0.0  # seconds that the steps took, without waits for experts
    loaded: Sequence[Sequence[int]] = ()  # [layers][placements], bytes of weights needed, by their placement


@dataclass(frozen=True, slots=True)
class SequenceBegan(Event):
    """The first step of a sequence begins. A sequence is the batch behind one KV cache, or a pass without a cache."""

    tokens: int  # of its prompt or first chunk, over the batch and with padding; 0 for a cache filled elsewhere
    sequence: int = 0  # its number, from 1, never used twice


@dataclass(frozen=True, slots=True)
class PrefillEnded(Counted):
    """A step that read a prompt, or a chunk of one, has ended. `counts` and `gates` are of this step alone.

    Such a step fills an empty cache, or adds several tokens to each sequence that are not guesses
    (residency/sequences.py).
    """

    sequence: int = 0


@dataclass(frozen=True, slots=True)
class DecodingBegan(Event):
    """The first step that adds one token to a sequence, or verifies guesses, begins. All of its prompt was reported.

    A later prompt into the same cache causes `PrefillEnded` again, and then another `DecodingBegan`.
    """

    sequence: int


@dataclass(frozen=True, slots=True)
class SequenceEnded(Event):
    """A sequence's cache was freed or emptied, or its pass without a cache has ended. It may be reported late.

    It is the sequence's last event.
    """

    sequence: int


@dataclass(frozen=True, slots=True)
class LayerReached(Event):
    """A layer's experts are about to run.

    The step waits for the experts of this layer that the answer places above the base. Keys of other layers are
    prefetches: copied in the background, in the answer's order, behind the copies that the step waits for. A prefetch
    is cancelled when its layer is reached and the answer does not name it, or when an answer places it elsewhere.
    """

    layer: int  # its position
    counts: Ints  # how often the router chose each expert in this step
    gates: Floats | None = None  # the sums of gate weights; None for a policy that does not need them
    is_prompt: bool = False  # whether the step reads several tokens of a prompt in each sequence
    # The part of `counts` from heavy-hitter tokens. None without `Needs.importance`, outside prompts, and if compiled
    important: Ints | None = None
    # The next layer's counts and gates, by its router on the input of this layer's experts. None without
    # `Needs.prediction`, and at the last layer
    predicted: Ints | None = None
    predicted_gates: Floats | None = None
    placed: Ints | None = None  # the placement of each of the layer's experts
    coming: Ints | None = None  # the placement that is being copied, -1 where none is


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy is told beside `Interval`, and what it may do."""

    interval: float = 0.1  # seconds between two `Interval` events
    prompts: bool = False  # whether it receives `SequenceBegan`, `PrefillEnded`, `DecodingBegan` and `SequenceEnded`
    # Whether it receives `LayerReached`, and steps wait for its answers. Such steps run one at a time, and there are no
    # intervals. For experts without a resident version, and for baselines
    layers: bool = False
    gates: bool = False  # whether gate weights are summed
    # Whether an expert that is wanted on the host or absent leaves the device at once; else when its bytes are needed
    exact: bool = False
    # With `layers`, the share of a prompt's tokens that count as heavy hitters, those that receive the most attention;
    # 0 turns it off. A model whose attention weights cannot be read is refused
    importance: float = 0.0
    # With `layers`, whether the next layer's routing is predicted. A model whose routers cannot be called is refused
    prediction: bool = False
    timings: bool = False  # whether intervals report computing time and loaded bytes
    pages_ahead: bool = True  # for paged experts, whether a prompt loads the next layer's while one runs


class LivePolicy(Protocol):
    """A policy that changes placements. It receives one event at a time, on any thread."""

    needs: Needs

    def decide(self, event: Event) -> Wanted | None:
        """Return the wanted placements, or None for no change."""

    def worth(self, key: Key) -> float:
        """Rate an expert above the base placement. The one with the lower worth leaves first."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The model and the budget for which a policy that changes placements is made."""

    experts: Sequence[int]  # [layers]
    ladder: Ladder  # the placements, the best first; a policy answers with indices into it
    sizes: Sequence[Sequence[int]]  # [layers][placements], bytes of device memory of an expert
    traffic: Table  # [layers][experts], calibration tokens routed to each, at least one
    losses: Sums  # float64 [experts, placements] a layer, squared error that a token adds to the layer's output
    # [layers][placements], how many experts may be at each, where placements do not share memory; None where they do
    most: Sequence[Sequence[int]] | None = None
    # [placements], measured bytes of weights a second that each placement supplies when a layer runs; infinity where
    # the weights are in place. Empty where all are
    rates: Sequence[float] = ()
    # Whether the sources of weights work in parallel, as a bus and a GPU do, or share the machine's cores
    together: bool = False

    @property
    def base(self) -> int:
        """The placement of an expert that an answer does not name."""
        return len(self.ladder) - 1

    def number(self, name: str) -> int:
        """Return the index of a placement by its name (`w4`, `w4@host`, `absent`)."""
        return [str(placement) for placement in self.ladder].index(name)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Options of a policy that changes placements. Subclasses add fields, and name the ladders.

    A field's type says how its text is read. `CHOICES` lists the words that it accepts.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"share": ("even", "loss")}

    share: str = "even"  # how layers share the budget: "even", or "loss" by the loss tables
    rate: float = 0.0  # megabytes a second of copies, to keep a link free or to emulate a slower one; 0 for no limit

    def __post_init__(self) -> None:
        if not self.rate >= 0:
            raise ValueError("rate is from 0")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return the ladders that the plan chooses from, by the least expected loss. The most precise version is first.

        Raises:
            InputError: when a version is not there.
        """
        raise NotImplementedError

    @property
    def keeps_low(self) -> bool:
        """Whether a promoted expert keeps its base version; otherwise the version's memory is freed."""
        return False

    @property
    def spare_blocks(self) -> int:
        """Base blocks of each size that are kept for demotions, where promoted experts free their base version."""
        return 1

    @property
    def bytes_per_second(self) -> float | None:
        """Limit for copies; None for no limit."""
        return self.rate * 1e6 or None

    @property
    def on_demand(self) -> bool:
        """Whether experts are absent until a layer wants them.

        The budget must then hold any one layer's experts at the best placement.
        """
        return False

    @property
    def workspace(self) -> tuple[int, int]:
        """Bytes inside a pass for the policy's measurements: the least that works, and the most that helps."""
        return 0, 0

    @property
    def makes_up_for_absent(self) -> bool:
        """Whether the gate weights of a token's present experts are scaled to the sum with the absent ones."""
        return False


@dataclass(frozen=True, slots=True)
class DeviceOptions(LiveOptions):
    """Options of a policy whose ladder is versions on the device."""

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {**LiveOptions.CHOICES, "between": ("yes", "no")}

    # The ends of the ladder; an end that is not named is chosen for the least expected loss in the budget
    hi: str = ""
    lo: str = ""
    between: str = "yes"  # "yes": the versions between the two are served as well; "no": those two alone

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return one ladder for each pair of ends."""
        names = [v.name for v in versions]
        for name in filter(None, (self.hi, self.lo)):
            find_version(name, versions)
        highs = [names.index(self.hi)] if self.hi else list(range(len(names) - 1))
        lows = [names.index(self.lo)] if self.lo else list(range(1, len(names)))
        if not highs or highs == [len(names) - 1]:
            raise InputError(f"has no version below {names[-1]}: changing versions needs two")
        if highs[0] >= lows[-1]:
            raise InputError(f"lo={names[lows[-1]]} is not below hi={names[highs[0]]}")
        step = 1 if self.between == "yes" else len(versions)
        ends = [(high, low) for high in highs for low in lows if low > high]
        return [tuple(Placement(versions[v]) for v in (*range(high, low, step), low)) for high, low in ends]


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy by its name. A policy that never changes has `versions`, one that changes placements has `make`."""

    name: str  # the text before the colon
    usage: str  # how users write it
    parse: Callable[[str], Any]  # reads the text after the colon; raises InputError, to which callers add the policy
    needs_budget: bool = False  # whether it serves in a memory budget only
    # Makes the map from the bundle, the parsed options, and the bytes that a budget leaves to experts (None without
    # one); raises BudgetError where they do not suffice
    versions: Callable[[Bundle, Any, int | None], Versions] | None = None
    make: Callable[[Setting, Any], LivePolicy] | None = None  # makes the policy for a setting and the parsed options


def live_entry(name: str, options: type[LiveOptions], make: Callable[[Setting, Any], LivePolicy]) -> Entry:
    """Return the entry of a policy that changes placements in a budget, with options written as KEY=VALUE."""
    return Entry(name, f"{name}[:KEY=VALUE,...]", lambda text: read_options(options, text), True, make=make)


# Beside eight passes on two cores, letting others run costs this thread 10 ms and more, and a decision over six layers
# did so twenty times: it took longer than a pass, and four threads got a third of one thread's promotions.
TURN = 5e-4
Item = TypeVar("Item")
Options = TypeVar("Options", bound=LiveOptions)


def in_turns(items: Iterable[Item]) -> Iterator[Item]:
    """Iterate, and let other threads run after every TURN seconds.

    A decision over thousands of experts takes milliseconds, and forward passes would wait for the interpreter's lock.
    """
    began = time.perf_counter()
    for item in items:
        if time.perf_counter() - began > TURN:
            time.sleep(0)
            began = time.perf_counter()
        yield item


def read_options(kind: type[Options], text: str) -> Options:
    """Read options written as key=value with commas between.

    Raises:
        InputError: for an unknown option, or a value that it does not accept.
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
