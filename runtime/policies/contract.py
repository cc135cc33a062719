"""What serving tells a policy, and what a policy answers. Pure: numbers in, decisions out, no torch.

A policy is one file with an `Entry`, and one line in registry.py. A policy that never changes anything answers with a
map (`versions`). A policy that changes placements is made when a model is loaded (`make`). It says what it needs to
know, and receives events.
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
    """Something that a policy is told.

    Attributes:
        time: seconds on a monotonic clock.
        capacity: [layers], bytes of device memory that each layer's experts may take beyond what they all take at the
            base placement.
    """

    time: float
    capacity: Sequence[int]


@dataclass(frozen=True, slots=True)
class Counted(Event):
    """An event with routing statistics.

    Attributes:
        counts: int64 [experts] a layer, how often the router chose each expert, without padding.
        gates: float64 [experts] a layer, the sums of its gate weights; empty unless the policy needs them.
    """

    counts: Counts
    gates: Sums = ()


@dataclass(frozen=True, slots=True)
class Interval(Counted):
    """Time has passed, or the capacity has changed. Counts cover the steps that ended since the last interval.

    The other fields cover those of the steps that read no prompt, for a policy that needs timings:

    Attributes:
        steps: their number.
        computed: seconds that they took, without waits for experts.
        loaded: [layers][placements], bytes of weights that they needed, by the placement that the weights came from.
    """

    steps: int = 0
    computed: float = 0.0
    loaded: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class SequenceBegan(Event):
    """The first step of a sequence begins. A sequence is the batch behind one KV cache, or a pass without a cache.

    Attributes:
        tokens: in its prompt, or in the prompt's first chunk, over the batch and with padding; 0 where the cache was
            filled elsewhere.
        sequence: its number, from 1, never used twice.
    """

    tokens: int
    sequence: int = 0


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

    Attributes:
        layer: its position.
        counts: how often the router chose each expert in this step.
        gates: the sums of its gate weights; None for a policy that does not need them.
        is_prompt: whether the step reads several tokens of a prompt in each sequence.
        important: the part of `counts` that comes from heavy-hitter tokens; None without `Needs.importance`, outside
            prompts, and in a compiled pass.
        predicted, predicted_gates: the next layer's counts and gates, by its router on the input of this layer's
            experts; None without `Needs.prediction`, and at the last layer.
        placed: the placement of each of the layer's experts.
        coming: the placement that is being copied, -1 where none is.
    """

    layer: int
    counts: Ints
    gates: Floats | None = None
    is_prompt: bool = False
    important: Ints | None = None
    predicted: Ints | None = None
    predicted_gates: Floats | None = None
    placed: Ints | None = None
    coming: Ints | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy is told beside `Interval`, and what it may do.

    Attributes:
        interval: seconds between two `Interval` events.
        prompts: whether it receives `SequenceBegan`, `PrefillEnded`, `DecodingBegan` and `SequenceEnded`.
        layers: whether it receives `LayerReached`, and steps wait for its answers. Such steps run one at a time, and
            there are no intervals. For experts without a resident version, and for baselines.
        gates: whether gate weights are summed.
        exact: whether an expert leaves the device at once when it is wanted on the host or absent; otherwise it stays
            until its bytes are needed.
        importance: with `layers`, the share of a prompt's tokens that count as heavy hitters, those that receive the
            most attention; 0 turns it off. A model whose attention weights cannot be read is refused.
        prediction: with `layers`, whether the next layer's routing is predicted. A model whose routers cannot be called
            is refused.
        timings: whether intervals report computing time and loaded bytes.
        pages_ahead: for paged experts, whether a prompt loads the next layer's while one runs.
    """

    interval: float = 0.1
    prompts: bool = False
    layers: bool = False
    gates: bool = False
    exact: bool = False
    importance: float = 0.0
    prediction: bool = False
    timings: bool = False
    pages_ahead: bool = True


class LivePolicy(Protocol):
    """A policy that changes placements. It receives one event at a time, on any thread."""

    needs: Needs

    def decide(self, event: Event) -> Wanted | None:
        """Return the wanted placements, or None for no change."""

    def worth(self, key: Key) -> float:
        """Rate an expert above the base placement. The one with the lower worth leaves first."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy that changes placements is made for.

    Attributes:
        experts: [layers].
        ladder: the placements, the best first; a policy answers with indices into it.
        sizes: [layers][placements], bytes of device memory of an expert.
        traffic: [layers][experts], calibration tokens routed to each, at least one.
        losses: float64 [experts, placements] a layer, squared error that a token adds to the layer's output.
        most: [layers][placements], how many experts may be at each, where placements do not share memory; None where
            they do.
        rates: [placements], measured bytes of weights a second that each placement supplies when a layer runs; infinity
            where the weights are in place. Empty where all are.
        together: whether the sources of weights work in parallel, as a bus and a GPU do; otherwise they share the
            machine's cores.
    """

    experts: Sequence[int]
    ladder: Ladder
    sizes: Sequence[Sequence[int]]
    traffic: Table
    losses: Sums
    most: Sequence[Sequence[int]] | None = None
    rates: Sequence[float] = ()
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

    Attributes:
        share: how the budget is shared among layers: "even", or "loss" by the loss tables.
        rate: megabytes a second that copies may take, to keep a link free or to emulate a slower one; 0 for no limit.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {"share": ("even", "loss")}

    share: str = "even"
    rate: float = 0.0

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
        """Whether experts are absent until a layer wants them. The budget must then hold any one layer's experts at the
        best placement."""
        return False

    @property
    def workspace(self) -> tuple[int, int]:
        """Bytes inside a pass for measuring what the policy needs to know: the least that works, and the most that
        helps."""
        return 0, 0

    @property
    def makes_up_for_absent(self) -> bool:
        """Whether the gate weights of a token's present experts are scaled to the sum with the absent ones."""
        return False


@dataclass(frozen=True, slots=True)
class DeviceOptions(LiveOptions):
    """Options of a policy whose ladder is versions on the device.

    Attributes:
        hi, lo: the ends of the ladder; an end that is not named is chosen for the least expected loss in the budget.
        between: "yes": the versions between the two are served as well; "no": those two alone.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {**LiveOptions.CHOICES, "between": ("yes", "no")}

    hi: str = ""
    lo: str = ""
    between: str = "yes"

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
    """A policy by its name.

    Attributes:
        name: the text before the colon.
        usage: how users write it.
        parse: reads the text after the colon; raises InputError, to whose text the caller adds the policy.
        needs_budget: whether it serves in a memory budget only.
        versions: for a policy that never changes: makes the map from the bundle, the parsed options, and the bytes that
            a budget leaves to experts (None without one); raises BudgetError where they do not suffice.
        make: for a policy that changes placements: makes it for a setting and the parsed options.
    """

    name: str
    usage: str
    parse: Callable[[str], Any]
    needs_budget: bool = False
    versions: Callable[[Bundle, Any, int | None], Versions] | None = None
    make: Callable[[Setting, Any], LivePolicy] | None = None


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
