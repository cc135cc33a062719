"""The step context: what one forward pass reads and tells, in one object that the running thread holds.

`ForwardWrapper.step` (runtime/forward_wrapper.py) opens a step around every forward pass of a served model, through
`opened`, the only function that sets the context. Two kinds of code read it: `experts_forward` (experts/forward.py, by
`step_of`), and attention (experts/token_importance.py and the server's packed_cache.py, by `current`).

This module holds data and protocols alone, so that every subpackage may import it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NoReturn, Protocol

from torch import Tensor, nn

from moepack.runtime.policies.reducers import RouterOutput

from .counters import Counters

if TYPE_CHECKING:
    import torch
    from transformers import Cache

    from moepack.runtime.kernels.routing_triton import Routed


@dataclass(frozen=True, slots=True)
class Prompt:
    """The attributes of a sequence that a step reads (residency/sequences.py)."""

    sequence: int = 0  # the sequence's number, from 1; 0 where the policy does not ask
    tokens: int = 0  # tokens of a prompt or of a chunk of one, over the batch; 0 while decoding
    begins: bool = False  # whether the sequence begins with this step
    decodes: bool = False  # whether decoding begins with this step
    several: bool = False  # whether the step reads several tokens of a prompt of each sequence in the batch
    length: int = 0  # tokens of this sequence in the step, over the batch
    # The prompt of each sequence in a packed step; the other fields are then sums, or true if true in any part
    parts: tuple[Prompt, ...] = ()

    @property
    def each(self) -> tuple[Prompt, ...]:
        """The prompt of each sequence."""
        return self.parts or (self,)


def joined(parts: Iterable[Prompt]) -> Prompt:
    """Join the prompts of several sequences into that of a packed step."""
    of = tuple(parts)
    return Prompt(
        0,
        sum(p.tokens for p in of),
        any(p.begins for p in of),
        any(p.decodes for p in of),
        any(p.several for p in of),
        sum(p.length for p in of),
        of,
    )


NO_PROMPT = Prompt()


class RoutingCounter(Protocol):
    """Counts what routers choose."""

    def add(self, position: int, routing: RouterOutput) -> None:
        """Count the routing of the layer at `position`."""


class Loader(Protocol):
    """Loads what a policy wants for a layer's routing."""

    def load(self, step: Step, position: int, hidden: Tensor, index: Tensor) -> None:
        """Return once the current snapshot of the layer is what the policy wants; the layer then reads that one."""


class HeavyHitters(Protocol):
    """Sees the attention of a prompt, and marks heavy hitters."""

    def saw(
        self,
        module: object,
        query: Tensor,
        key: Tensor | Iterable[Tensor],
        mask: Tensor | None,
        given: dict[str, object],
    ) -> None:
        """Take up one attention layer's call; keys may be given some heads after others."""

    def heavy(self, position: int, tokens: int) -> Tensor | None:
        """Return whether each token is a heavy hitter, bool [tokens]; None if the attention was not observed."""


class SequenceTable(Protocol):
    """The table by which launches find the memory of a pass's sequences."""

    sequences: int  # the most of a pass
    there: Tensor  # the table on the device
    by_address: bool  # whether some layer's attention reads its rows at their own addresses
    refused: int  # passes of the most rows, one after another, that were not replayed (decode_graph.py)


class PackedCache:
    """A KV cache whose passes read [1, tokens]: tokens of several sequences, one after another.

    The server's cache implements it (moepack/server/batching/packed_cache.py). The KV reserve and the sequences ask it
    about the pass that is about to begin; attention calls `attend`, and layers that keep a state instead of keys and
    values call `by_row`. A pass of few tokens on a GPU has a `table`.
    """

    attention = ""  # the name under which transformers knows attention over such a cache
    windows: Sequence[int | None] = ()  # of each layer's keys and values, in tokens; None for all
    table: SequenceTable | None = None  # of the running pass, if it has one

    def by_row(self, layer: int, device: torch.device) -> Sequence[Sequence[tuple[slice, Cache]]]:
        """Return what a layer with states runs at once, one list after another.

        Each list has where sequences' tokens are in the pass, and each one's own cache of states, which the pass
        changes. A sequence that stands in several lists goes on from the states that the one before left.
        """
        raise NotImplementedError

    def ran(self, layer: int, number: int) -> None:
        """Note that a layer has run list `number` of `by_row`: some of the states may be copied now."""
        raise NotImplementedError

    def refuse(self, why: str) -> NoReturn:
        """End the pass: the model does what packed passes do not allow."""
        raise NotImplementedError

    def sequences(self) -> Sequence[tuple[object, int, bool]]:
        """Return each sequence in order: its own cache, its number of tokens, and whether they are of a prompt."""
        raise NotImplementedError

    def needed(self) -> tuple[int, int]:
        """Return the bytes of all sequences' caches in the pass, and the longest sequence's tokens after it."""
        raise NotImplementedError

    def write_table(self) -> None:
        """Write the table of the running pass, unless it has none or that was done."""
        raise NotImplementedError

    def written(self, layer: int) -> Tensor | None:
        """Return a layer's part of the table, where a launch writes keys and values; None without a table."""
        raise NotImplementedError

    def with_room(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return a layer's keys and values, [1, heads, tokens, dim], with a row more, which the caller writes.

        None, unless the pass is one token of one sequence that has begun; the cache is then to be updated, and `attend`
        called.
        """
        raise NotImplementedError

    def keep(self, layer: int) -> None:
        """Note that the row of `with_room` is written."""
        raise NotImplementedError

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, scaling: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Let each sequence's queries attend to its own keys: [1, heads, tokens, dim] to [1, tokens, heads, dim]."""
        raise NotImplementedError


class Ending(Protocol):
    """Something of a step that hears of its end."""

    def ended(self) -> None:
        """Hear that the step has ended, and was not interrupted."""


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass of one model while it runs."""

    model: object = None  # the key of the model, as `LayerExperts.model`; None for a model without experts of a bundle
    snapshots: Sequence[object] = ()  # of every layer as the step began; `seen` knows their class (experts/handles.py)
    counters: Counters | None = None  # the step's routing counts; None where not wanted
    watchers: Sequence[RoutingCounter] = ()  # other counters; the server's live page registers one
    prompt: Prompt = NO_PROMPT  # what the step reads of its sequences
    # The `ResidencyManager`, if the policy lets passes wait for experts. Its `load` returns once the layer's current
    # snapshot is what the policy wants for the layer's routing; the layer then reads that snapshot
    loader: Loader | None = None
    weighed: bool = False  # whether the pass was asked for its attention's weights
    unmasked: list[Tensor] = field(default_factory=list)  # masks of attention that were found to hide nothing
    line: Ending | None = None  # what decoder layers made for those behind them (dense/decoder_layers.py)
    importance: HeavyHitters | None = None  # the `TokenImportance` that sees the attention of a prompt, for `loader`
    logits: tuple[int, Tensor | None] | None = None  # the last router's: its layer's position, and [tokens, experts]
    packed: PackedCache | None = None  # the cache of a pass that packs several sequences
    number: int = 0  # the residency's number of the step
    words: Tensor | None = None  # of its handle table on a GPU, int64 (devices/handle_tables.py)
    # By the last router's own launch on a GPU: its layer's position, its `Routed`, and whether it was counted
    routed: tuple[int, Routed, bool] | None = None
    began: float = 0.0  # perf_counter seconds
    seconds: float = 0.0  # time of the step without waits, set at its end
    waited: float = 0.0  # seconds waited for experts' bytes
    # For each copy that the step waited for: layer position, placement from which it came, bytes of weights
    demanded: list[tuple[int, int, int]] = field(default_factory=list)
    outer: Step | None = None  # the step that was running in this thread when this one began

    @property
    def counted(self) -> Counters:
        """The routing counts of a step whose residency wants them."""
        assert self.counters is not None
        return self.counters


class StepOpener(Protocol):
    """Opens the steps of one model: its `ForwardWrapper` (runtime/forward_wrapper.py)."""

    def alone(self) -> AbstractContextManager[Step]:
        """Return a context with a step, for one call of an experts module outside any forward pass."""

    def compiled_layer(self, module: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run one layer's experts in a compiled pass: the first layer opens the pass's step, the last one closes it."""


class _Context(threading.local):
    """A thread's context: its innermost step, and each model's open compiled pass."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.compiled: dict[object, _CompiledPass] = {}


class _CompiledPass:
    """The open step of a compiled pass: one operator opens it and another closes it.

    After an interruption it stays open until the model's next pass on the thread, or the end of the thread.
    """

    def __init__(self, step: AbstractContextManager[object]) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(step)

    def end(self) -> None:
        """Close the step. May be called twice."""
        self._stack.close()

    __del__ = end


_context = _Context()


@contextmanager
def opened(step: Step) -> Iterator[Step]:
    """Make `step` the running step of this thread until the context ends, however it ends."""
    outer = step.outer = _context.step
    if outer is not None and step.packed is None:
        step.packed = outer.packed
    _context.step = step
    try:
        yield step
        if step.line is not None:
            step.line.ended()
    finally:
        if _context.step is step:
            _context.step = step.outer
        else:  # a compiled pass of another model was interrupted inside this one, or this is such a pass
            inner: Step | None = _context.step
            while inner is not None and inner.outer is not step:
                inner = inner.outer
            if inner is not None:
                inner.outer = step.outer


def go_back_to(step: Step | None) -> None:
    """Make a step that was `current` this thread's running step again, whatever was opened since."""
    _context.step = step


def current() -> Step | None:
    """Return the innermost step of this thread."""
    return _context.step


def observe_attention(
    module: object, query: Tensor, key: Tensor | Iterable[Tensor], mask: Tensor | None, given: dict[str, object]
) -> None:
    """Let the running step's heavy hitters, if it ranks any, see an attention layer's call, as `HeavyHitters.saw`."""
    step = _context.step
    if step is not None and step.importance is not None:
        step.importance.saw(module, query, key, mask, given)


def step_of(model: object) -> Step | None:
    """Return the running step of a model in this thread."""
    step = _context.step
    while step is not None and step.model is not model:
        step = step.outer
    return step


def open_compiled(model: object, step: AbstractContextManager[object]) -> None:
    """Open the step of a compiled pass, until `end_compiled`."""
    end_compiled(model)
    _context.compiled[model] = _CompiledPass(step)


def end_compiled(model: object) -> None:
    """Close the step of a model's compiled pass in this thread, if one is open."""
    if (open_pass := _context.compiled.pop(model, None)) is not None:
        open_pass.end()
