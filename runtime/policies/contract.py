"""What serving tells a policy, and what it asks of one. Pure: numbers in, decisions out, no torch.

A policy is one file with an `Entry` and one line in registry.py. One that never changes anything answers with a map
(`versions`); one that changes placements while the model is served is made when it is loaded (`make`), says what it
needs to know, and is handed events. Decides nothing.
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

from .placements import Placement

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle

Key = tuple[int, int]  # layer position, expert
Wanted = Mapping[Key, int]  # experts that are to be elsewhere than at the base placement, the most wanted first
Versions = tuple[tuple[str, ...], ...]  # a version's name by layer position and expert
Ladder = tuple[Placement, ...]  # the best first; other code counts in it. The last is the base
Counts = Sequence[npt.NDArray[np.int64]]
Sums = Sequence[npt.NDArray[np.float64]]
Ints = npt.NDArray[np.int64]  # [experts]
Floats = npt.NDArray[np.float64]  # [experts]


class Changes(dict[Key, int]):
    """An answer to `LayerReached` that names only what is to change: everything else stays wanted as it was.

    Experts at the base placement leave.
    """


@dataclass(frozen=True, slots=True)
class Counted:
    """What the router chose.

    Attributes:
        time: seconds on a clock that never goes back.
        capacity: [layers], bytes of device memory that each layer's experts may take beyond what they all take at the
            base placement.
        counts: int64 [experts] a layer, how often the router chose each; padding is left out.
        gates: float64 [experts] a layer, the sums of its weights there; empty for a policy that does not need them.
    """

    time: float
    capacity: Sequence[int]
    counts: Counts
    gates: Sums = ()


@dataclass(frozen=True, slots=True)
class Interval(Counted):
    """Time has gone by, or what fits has changed. Counts are of the steps that ended since the last interval.

    For a policy that needs timings also, of those steps that were no prompts:

    Attributes:
        steps: how many.
        computed: seconds that they took, without those that they waited for experts.
        loaded: [layers][placements], bytes of weights that they had to have brought, by where those came from.
    """

    steps: int = 0
    computed: float = 0.0
    loaded: Sequence[Sequence[int]] = ()


@dataclass(frozen=True, slots=True)
class SequenceBegan:
    """The first step of a sequence begins. A sequence is the batch behind one KV cache; a pass without a cache is one.

    Attributes:
        time, capacity: as of `Counted`.
        tokens: of its prompt, or of the first chunk of that, over the batch and with padding; 0 where the prompt was
            read elsewhere, into a cache that then came here.
        sequence: its number, from 1; no two have the same.
    """

    time: float
    capacity: Sequence[int]
    tokens: int
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class PrefillEnded(Counted):
    """A step that read a prompt has ended, or a chunk of one: into an empty cache, or several tokens of each sequence
    that are no guesses (residency/sequences.py).

    Attributes:
        counts, gates: of this step alone.
        sequence: whose.
    """

    sequence: int = 0


@dataclass(frozen=True, slots=True)
class DecodingBegan:
    """The first step of a sequence that goes on by one token, or verifies guesses, begins. All chunks of its prompt
    were heard of before.

    A later prompt into the same cache, another turn, is `PrefillEnded` again, and decoding then begins again.

    Attributes:
        time, capacity: as of `Counted`.
        sequence: whose.
    """

    time: float
    capacity: Sequence[int]
    sequence: int


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A sequence's cache has gone, or was emptied, or there was none and its pass has ended. It is the last of its
    events; it may come some time after.

    Attributes:
        time, capacity: as of `Counted`.
        sequence: which.
    """

    time: float
    capacity: Sequence[int]
    sequence: int


@dataclass(frozen=True, slots=True)
class LayerReached:
    """A layer's experts are about to run.

    The step waits for those of them that the answer names above the base, and for no others. Keys of other layers that
    are not there are begun in the background, in the answer's order, once all that is waited for has begun: a prefetch,
    whose deadline is the moment its layer is reached. One that the answer then does not name, or that an earlier answer
    wants elsewhere, is cancelled.

    Attributes:
        time, capacity: as of `Counted`.
        layer: its position.
        counts: how often the router chose each for it in this step.
        gates: the sums of its weights there; None for a policy that does not need them.
        is_prompt: whether the step reads several tokens of a prompt a sequence.
        important: of `counts`, those of heavy-hitter tokens; None where `Needs.importance` does not ask or the step is
            no prompt, and in a compiled pass.
        predicted, predicted_gates: what the next layer's counts and gates will be, by its router on what this layer's
            experts read; None where `Needs.prediction` does not ask, and at the last layer.
        placed: the placement that each of the layer's experts is at.
        coming: the one that is on its way, -1 where none is.
    """

    time: float
    capacity: Sequence[int]
    layer: int
    counts: Ints
    gates: Floats | None = None
    is_prompt: bool = False
    important: Ints | None = None
    predicted: Ints | None = None
    predicted_gates: Floats | None = None
    placed: Ints | None = None
    coming: Ints | None = None


Event = Interval | SequenceBegan | PrefillEnded | DecodingBegan | SequenceEnded | LayerReached


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy is told, beside `Interval`, and may do.

    Attributes:
        interval: seconds between two `Interval` events.
        prompts: whether it is told of `SequenceBegan`, `PrefillEnded`, `DecodingBegan` and `SequenceEnded`.
        layers: whether it is told of `LayerReached`, and the step then waits for what it wants: such steps run one at
            a time, and there are no intervals. Where an expert has no resident version, and for baselines.
        gates: whether gate weights are summed up for it.
        exact: whether an expert on the device that is named on the host, or nowhere, leaves at once; else it stays
            until somebody needs its bytes.
        importance: with `layers`, the share of a prompt's tokens that are heavy hitters: those that receive most
            attention; 0 where nobody asks. A model whose attention does not tell is refused.
        prediction: with `layers`, whether the next layer's routing is predicted. A model whose routers cannot be asked
            is refused.
        timings: whether it is told how long steps compute, and what they have brought.
        pages_ahead: of paged experts, whether a prompt has the next layer's loaded while one runs.
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
    """A policy that changes placements. One event at a time is handed to it, on whatever thread."""

    needs: Needs

    def decide(self, event: Event) -> Wanted | None:
        """What is wanted from now on; None where it is what was wanted before."""

    def worth(self, key: Key) -> float:
        """What an expert above the base placement is worth there; of any two, the lesser goes first."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy that changes placements is made for.

    Attributes:
        experts: [layers].
        ladder: the placements there are, the best first; a policy answers with their numbers.
        sizes: [layers][placements], bytes of device memory of an expert.
        traffic: [layers][experts], calibration tokens routed to each, at least one.
        losses: float64 [experts, placements] a layer, squared error that a token adds to the layer's output.
        most: [layers][placements], how many experts may be at each, where memory is not shared between placements; None
            where it is.
        rates: [placements], bytes of weights a second that experts are brought at from each when their layer runs,
            measured here; infinity where they are there. Empty where all are.
        together: whether those that bring them work beside one another, as a bus and a GPU do; else they share the
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
        """The placement of an expert that is not named in an answer."""
        return len(self.ladder) - 1

    def number(self, name: str) -> int:
        """The placement of this name (`w4`, `w4@host`, `absent`)."""
        return [str(placement) for placement in self.ladder].index(name)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What a policy that changes placements lets its user choose; subclasses add to it, and name the ladders.

    A field's type says how its text is read; `CHOICES` names the words it may be.

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
        """The ladders there are to choose from; of several the plan takes the one with the least expected loss.

        Args:
            versions: the bundle's, the most precise first.

        Raises:
            InputError: when a version is not there.
        """
        raise NotImplementedError

    @property
    def keeps_low(self) -> bool:
        """Whether an expert that is promoted keeps its base version; else it gives it back."""
        return False

    @property
    def spare_blocks(self) -> int:
        """Base blocks of each size that are kept for demotions, where base versions are given back."""
        return 1

    @property
    def bytes_per_second(self) -> float | None:
        """What copies may take; None without a limit."""
        return self.rate * 1e6 or None

    @property
    def on_demand(self) -> bool:
        """Whether experts are absent until a layer that is reached wants them: the budget must then hold all experts of
        any one layer at the best placement."""
        return False

    @property
    def workspace(self) -> tuple[int, int]:
        """Bytes that what the policy is told takes inside a pass, beside the model's own activations: the least with
        which that works, and the most that are of use."""
        return 0, 0

    @property
    def makes_up_for_absent(self) -> bool:
        """Whether the weights of a token's experts that are not absent are scaled so that their sum is what it was."""
        return False


@dataclass(frozen=True, slots=True)
class DeviceOptions(LiveOptions):
    """Of a policy whose ladder is versions on the device.

    Attributes:
        hi, lo: the ends of the ladder; what is not named is chosen for the least loss that the bundle's calibration
            foretells in the budget.
        between: "yes": the versions between the two are served as well; "no": those two alone.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {**LiveOptions.CHOICES, "between": ("yes", "no")}

    hi: str = ""
    lo: str = ""
    between: str = "yes"

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """One for each pair of ends."""
        names = [v.name for v in versions]
        here = ", ".join(names)
        for name in filter(None, (self.hi, self.lo)):
            if name not in names:
                raise InputError(f"has no version {name!r}: here are {here}")
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
        name: what stands before the colon.
        usage: how users write it.
        parse: reads what stands after the colon; raises InputError, whose text the caller puts the policy before.
        needs_budget: whether it serves in a memory budget only.
        versions: of a policy that never changes: the map, from the bundle, what was parsed, and the bytes that a
            budget leaves to experts (None without one); raises BudgetError where they do not suffice.
        make: of one that changes placements: the policy, for a setting and what was parsed.
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
