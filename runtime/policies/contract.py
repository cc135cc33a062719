"""The events that serving reports to a policy, and the policy's answers. Pure: numbers in, decisions out, no torch.

A policy is one file with an `Entry`, and one line in registry.py. A policy that never changes anything answers with a
map (`versions`). A policy that changes placements is made when a model is loaded (`make`). Such a policy names the
events that it needs, and receives these.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar

from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.runtime.allocation.knapsack import Table

from .placements import Placement, find_version
from .reducers import Floats, Ints, Reducer

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle

Key = tuple[int, int]  # layer position (among layers with experts), expert
Wanted = Mapping[Key, int]  # placements of the experts that are not at the base placement, the most wanted expert first
Versions = tuple[tuple[str, ...], ...]  # [layer position][expert], the name of a version
Ladder = tuple[Placement, ...]  # the best placement first, the base last; an int "placement" is an index into a ladder
Counts = Sequence[Ints]
Sums = Sequence[Floats]
FLOOR = 4 << 20  # under a rate limit a smaller copy counts as this many bytes: its calls cost about 0.5 ms


class Changes(dict[Key, int]):
    """An answer to `LayerReached` that names only placements that change. The base placement evicts an expert."""

    def __init__(self, changes: Mapping[Key, int] | None = None) -> None:
        super().__init__(changes or {})
        # Versions for experts above the base, in the order of their copies: no pass waits for them, the present ones
        # serve until they have arrived, and both take memory until the passes that read the earlier one have ended.
        self.beside: dict[Key, int] = {}


@dataclass(frozen=True, slots=True)
class Event:
    """An event that is reported to a policy."""

    time: float  # seconds on a monotonic clock
    capacity: Sequence[int]  # [layers], device bytes that a layer's experts may take beyond those of all at the base


@dataclass(frozen=True, slots=True)
class Counted(Event):
    """An event with routing statistics."""

    counts: Counts  # for each layer, int64 [experts]: how often the router chose each expert, without padding
    sums: Mapping[Reducer, Sums] = field(default_factory=dict)  # of `Needs.sums`, for each layer float64 [experts]


@dataclass(frozen=True, slots=True)
class Interval(Counted):
    """Time has passed, or the capacity has changed. Counts cover the steps that ended since the last interval.

    The other fields cover only those of these steps that read no prompt, and are set if the policy needs timings.
    """

    steps: int = 0  # number of steps
    computed: float = 0.0  # seconds that the steps took, without waits for experts
    # [layers][placements], bytes of weights for which the steps waited, by the placement from which they came
    loaded: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class SequenceBegan(Event):
    """The first step of a sequence begins. A sequence is the batch behind one KV cache, or a pass without a cache."""

    # Of the whole batch's prompt or first chunk, with padding; 0 for a cache filled elsewhere. Where a server took the
    # beginning of a prompt from a cache, the rest is its first chunk.
    tokens: int
    sequence: int = 0  # the sequence's number, from 1, never used twice


@dataclass(frozen=True, slots=True)
class PrefillEnded(Counted):
    """A step that read a prompt, or a chunk of a prompt, has ended. `counts` and `sums` cover this step alone.

    Such a step fills an empty cache, or adds several tokens to each sequence, unless these are guesses to verify
    (residency/sequences.py).
    """

    sequence: int = 0


@dataclass(frozen=True, slots=True)
class DecodingBegan(Event):
    """The first step that adds one token to a sequence, or verifies guesses, begins. All of the prompt was reported.

    A later prompt into the same cache causes `PrefillEnded` again, and then another `DecodingBegan`.
    """

    sequence: int


@dataclass(frozen=True, slots=True)
class SequenceEnded(Event):
    """A sequence's cache was freed or emptied, or its pass without a cache has ended.

    This is the sequence's last event, and may be reported late.
    """

    sequence: int


@dataclass(frozen=True, slots=True)
class LayerReached(Event):
    """A layer's experts are about to run.

    The step waits for the experts of this layer that the answer places above the base. The answer's experts of other
    layers are prefetches: copied in the background, in the answer's order, behind the copies for which the step waits.
    A prefetch is cancelled when its layer is reached and the answer omits it, or when an answer places it elsewhere.
    """

    layer: int  # the layer's position
    counts: Ints  # how often the router chose each expert in this step; of experts that padding alone chose 1
    sums: Mapping[Reducer, Floats] = field(default_factory=dict)  # of `Needs.sums` in this step
    is_prompt: bool = False  # whether the step reads several tokens of a prompt in each sequence
    # The next layer's counts and sums, predicted by its router from the input of this layer's experts. `None` without
    # `Needs.prediction`, and at the last layer
    predicted: Ints | None = None
    predicted_sums: Mapping[Reducer, Floats] = field(default_factory=dict)
    placed: Sequence[int] | None = None  # the present placement of each of the layer's experts
    coming: Sequence[int] | None = None  # the placement to which each expert is being copied; -1 if it is not


@dataclass(frozen=True, slots=True)
class Needs:
    """The events that a policy receives beside `Interval`, and what it may do."""

    interval: float = 0.1  # seconds between two `Interval` events
    prompts: bool = False  # whether it receives `SequenceBegan`, `PrefillEnded`, `DecodingBegan` and `SequenceEnded`
    # Whether it receives `LayerReached`, and steps wait for its answers. Then steps run one at a time, and `Interval`
    # is sent once before any token, and between steps with `timings` (its answers are not carried out). For policies
    # whose experts have no resident version, and for baselines
    layers: bool = False
    sums: tuple[Reducer, ...] = ()  # what passes add up for the policy, beside counts; events have these sums
    # Whether an expert that is wanted on the host or absent leaves the device at once; else when its bytes are needed
    exact: bool = False
    # With `layers`, the share of a prompt's tokens that are heavy hitters (receive the most attention); 0 turns their
    # observation off. A model whose attention cannot be read is refused
    importance: float = 0.0
    # With `layers`, whether the next layer's routing is predicted. A model whose routers cannot be called is refused
    prediction: bool = False
    timings: bool = False  # whether intervals report computing time and loaded bytes


class LivePolicy(Protocol):
    """A policy that changes placements. It receives one event at a time, on any thread."""

    needs: Needs

    def decide(self, event: Event) -> Wanted | None:
        """Return the wanted placements, or `None` to change nothing."""

    def worth(self, key: Key) -> float:
        """Return the worth of an expert above the base placement. Experts with lower worth leave first."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The facts about model and budget from which a policy that changes placements is made."""

    experts: Sequence[int]  # [layers], number of experts
    ladder: Ladder  # the placements, the best first; a policy answers with indices into the ladder
    sizes: Sequence[Sequence[int]]  # [layers][placements], bytes of device memory of an expert
    traffic: Table  # [layers][experts], calibration tokens routed to each, at least one
    losses: Sums  # for each layer, float64 [experts, placements]: squared error that a token adds to the layer's output
    # [layers][placements], the most experts at each placement; `None` if placements share memory
    most: Sequence[Sequence[int]] | None = None
    # [placements], measured bytes of weights a second that come from each placement before a layer runs; infinity for
    # weights that are resident. Empty unless the options ask for it (`LiveOptions.by_rates`)
    rates: Sequence[float] = ()

    @property
    def base(self) -> int:
        """The placement of an expert that an answer does not name."""
        return len(self.ladder) - 1

    def number(self, name: str) -> int:
        """Return the index of a placement by its name (`w4`, `w4@host`, `absent`)."""
        return [str(placement) for placement in self.ladder].index(name)


@dataclass(frozen=True, slots=True)
class Decoding:
    """The facts about a policy from which a plan predicts how long decoding a token takes."""

    # Experts for which a token waits: "none"; "held": those that the first map lacks; "recent": those not used lately
    waits_for: Literal["none", "held", "recent"] = "none"
    fetches_lowest: bool = False  # whether an expert is first fetched at the lowest version, instead of the best
    moves: bool = False  # whether experts move to other versions beside passes


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Options of a policy that changes placements. Subclasses add fields, and name the ladders.

    The type of a field's default says how a user's text is read. `CHOICES` lists the words that a field accepts.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {}

    rate: float = 0.0  # limit of copies in megabytes a second, to spare a link or emulate a slower one; 0: no limit

    def __post_init__(self) -> None:
        if not self.rate >= 0:
            raise ValueError("rate must be at least 0")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """Return the ladders from which a plan chooses by the least expected loss; `versions` are most precise first.

        Raises:
            InputError: when a version is missing.
        """
        raise NotImplementedError

    def check_experts(self, most: int) -> None:
        """Raise InputError for an option that no layer has experts for; `most` are those of the largest layer."""

    @property
    def shares_by_loss(self) -> bool:
        """Whether layers share the budget by loss where losses of different layers can be compared; else evenly."""
        return False

    @property
    def keeps_low(self) -> bool:
        """Whether a promoted expert keeps its base version; otherwise the base version's memory is freed."""
        return False

    @property
    def spare_blocks(self) -> int:
        """Base blocks of each size that stay free for demotions, if promoted experts free their base version."""
        return 1

    @property
    def bytes_per_second(self) -> float | None:
        """The limit of copies in bytes a second; `None` without a limit."""
        return self.rate * 1e6 or None

    @property
    def on_demand(self) -> bool:
        """Whether experts are absent until a layer wants them.

        If so, the budget must hold all experts of any `layers_held` consecutive layers at the best placement.
        """
        return False

    @property
    def decoding(self) -> Decoding | None:
        """Return how a plan predicts the time of decoding, or None if it cannot."""
        return Decoding("held" if self.on_demand else "none")

    @property
    def layers_held(self) -> int:
        """For `on_demand`: number of consecutive layers whose experts must all fit in memory at the best placement."""
        return 1

    @property
    def by_rates(self) -> bool:
        """Whether the policy needs `Setting.rates`, which are measured while a model is loaded or planned."""
        return False

    @property
    def workspace(self) -> tuple[int, int]:
        """Bytes for measurements of the policy during a pass: the least that works, and the most that helps."""
        return 0, 0


def device_ladders(versions: Sequence[Version], hi: str, lo: str, between: bool) -> list[Ladder]:
    """Return a ladder on the device for each possible pair of a best and a lowest version.

    Args:
        versions: the bundle's, most precise first.
        hi, lo: the names of the best and the lowest version; if empty, any.
        between: whether a ladder has the versions between the two as well.

    Raises:
        InputError: for a version that is missing, or if `lo` is not below `hi`.
    """
    names = [v.name for v in versions]
    for name in filter(None, (hi, lo)):
        find_version(name, versions)
    highs = [names.index(hi)] if hi else list(range(len(names) - 1))
    lows = [names.index(lo)] if lo else list(range(1, len(names)))
    if not highs or highs == [len(names) - 1]:
        raise InputError(f"has no version below {names[-1]}: changing versions needs two")
    if highs[0] >= lows[-1]:
        raise InputError(f"lo={names[lows[-1]]} is not below hi={names[highs[0]]}")
    step = 1 if between else len(versions)
    ends = [(high, last) for high in highs for last in lows if last > high]
    return [tuple(Placement(versions[v]) for v in (*range(high, last, step), last)) for high, last in ends]


def bytes_of_layers(sizes: Sequence[Sequence[int]], experts: Sequence[int], layers: int) -> int:
    """Return the most bytes that all experts of `layers` consecutive layers take at the best placement.

    `sizes` are [layers][placements], `experts` [layers]. The first layer follows the last: the next pass begins there.
    """
    of_layer = [int(row[0]) * n for row, n in zip(sizes, experts, strict=True)]
    count = len(of_layer)
    together = range(min(layers, count))
    return max((sum(of_layer[(p + i) % count] for i in together) for p in range(count)), default=0)


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy by its name. A policy with a fixed map has `versions`; a policy that changes placements has `make`."""

    name: str  # the text before the colon
    usage: str  # how users write it
    parse: Callable[[str], Any]  # reads the text after the colon; raises InputError, to which callers add the name
    needs_budget: bool = False  # whether the policy works only in a memory budget
    # Makes the map from the bundle, the parsed options, and the bytes that a budget leaves to experts (`None` without
    # a budget); raises BudgetError if these bytes do not suffice
    versions: Callable[[Bundle, Any, int | None], Versions] | None = None
    make: Callable[[Setting, Any], LivePolicy] | None = None  # makes the policy for a setting and the parsed options
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # options, and the words that each may be


def live_entry(name: str, options: type[LiveOptions], make: Callable[[Setting, Any], LivePolicy]) -> Entry:
    """Return the entry of a policy that changes placements in a budget, and whose options are written as KEY=VALUE."""
    usage = f"{name}[:KEY=VALUE,...]"
    return Entry(name, usage, lambda text: read_options(options, text), True, make=make, keys=keys_of(options))


def keys_of(options: type[LiveOptions]) -> dict[str, tuple[str, ...]]:
    """Return the names of a policy's options, and the words that each may be."""
    return {f.name: options.CHOICES.get(f.name, ()) for f in fields(options)}


# Seconds. By items instead, a decision over six layers let others run twenty times: beside eight passes on two cores a
# profile found the worker waiting there, and ten seconds had 65 promotions where they have 153 by the clock.
TURN = 5e-4
Item = TypeVar("Item")
Options = TypeVar("Options", bound=LiveOptions)


def in_turns(items: Iterable[Item]) -> Iterator[Item]:
    """Iterate over `items`, and let other threads run after every TURN seconds.

    A decision over thousands of experts takes milliseconds, for which forward passes would wait for the GIL.
    """
    began = time.perf_counter()
    for item in items:
        if time.perf_counter() - began > TURN:
            time.sleep(0)
            began = time.perf_counter()
        yield item


def read_options(kind: type[Options], text: str) -> Options:
    """Read options of class `kind`, written as key=value and separated by commas.

    Raises:
        InputError: for an unknown option, or a value that an option does not accept.
    """
    known: dict[str, Any] = {f.name: type(f.default) for f in fields(kind)}
    values: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            guess = f"did you mean {near[0]}=? " if near else ""
            raise InputError(f"option {key!r} is unknown: {guess}there are {', '.join(known)}")
        if not equals:
            raise InputError(f"option {key} has no value: write {key}=...")
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
