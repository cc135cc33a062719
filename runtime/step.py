"""The step context: what one forward pass reads and tells, in one object that the running thread holds.

`ForwardWrapper.step` (runtime/forward_wrapper.py) opens a step around every forward pass of a served model, through
`opened`, the only function that sets the context. Two kinds of code read it: `experts_forward` (experts/forward.py, by
`step_of`), and attention (experts/token_importance.py and the server's packed_cache.py, by `current`).

This module holds data and protocols alone, so that every room may import it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a step reads of a sequence (residency/sequences.py).

    Attributes:
        sequence: the sequence's number, from 1; 0 where the policy does not ask.
        tokens: tokens of a prompt or of a chunk of one, over the batch; 0 while decoding.
        begins: whether the sequence begins with this step.
        decodes: whether decoding begins with this step.
        several: whether the step reads several tokens of a prompt of each sequence in the batch.
        length: tokens of this sequence in the step, over the batch.
        parts: for a step that packs sequences one after another, the prompt of each. The other attributes are then
            sums over the parts, or whether they hold for any part.
    """

    sequence: int = 0
    tokens: int = 0
    begins: bool = False
    decodes: bool = False
    several: bool = False
    length: int = 0
    parts: tuple[Prompt, ...] = ()

    @property
    def each(self) -> tuple[Prompt, ...]:
        """The prompts, one for each sequence."""
        return self.parts or (self,)


def joined(parts: Iterable[Prompt]) -> Prompt:
    """The prompt of a step that packs these."""
    of = tuple(parts)
    return Prompt(
        0, sum(p.tokens for p in of), any(p.begins for p in of), any(p.decodes for p in of),
        any(p.several for p in of), sum(p.length for p in of), of,
    )  # fmt: skip


NO_PROMPT = Prompt()


class RoutingCounter(Protocol):
    """Counts what routers choose."""

    def add(self, position: int, index: Tensor, weights: Tensor) -> None:
        """Count the choice of the layer at `position`: experts and their gate weights, [tokens, top_k]."""


class LayerLoader(Protocol):
    """Brings experts before their layer runs: the residency manager, under a policy that blocks."""

    def load(self, step: Step, position: int, hidden: Tensor, index: Tensor) -> None:
        """Return once the layer's current snapshot is what the policy wants for this routing."""


class PageSource(Protocol):
    """Gives paged experts their memory: `Paging` (paging/paging.py)."""

    def run(self, position: int, snapshot: Any, index: Tensor, step: Any) -> AbstractContextManager[Any]:
        """Hold the pages of a layer's chosen experts while the context is open."""


class AttentionObserver(Protocol):
    """Sees what attention reads: `TokenImportance` (experts/token_importance.py)."""

    def saw(self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, given: dict[str, Any]) -> None:
        """Note one attention layer's call."""

    def important(self, position: int, index: Tensor) -> Any:
        """Count the heavy hitters that each expert of a layer gets, int64 [experts], or None."""


class PackedCache:
    """A KV cache whose passes read [1, tokens]: tokens of several sequences, one after another.

    The server's cache implements it (moepack/server/batching/packed_cache.py). The KV reserve and the sequences ask it
    about the pass that is about to begin; attention calls `attend`.
    """

    def sequences(self) -> Sequence[tuple[Any, int, bool]]:
        """The sequences of the pass in its order: their own caches, their tokens, whether these are of a prompt."""
        raise NotImplementedError

    def needed(self) -> tuple[int, int]:
        """Bytes of all sequences' caches while the pass runs, and the longest sequence's tokens after it."""
        raise NotImplementedError

    def attend(self, module: Any, query: Tensor, key: Tensor, scaling: float | None, sinks: Tensor | None) -> Tensor:
        """Let each sequence's queries attend to its own keys: [1, heads, tokens, dim] to [1, tokens, heads, dim]."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Step:
    """One forward pass of one model while it runs.

    Attributes:
        model: the key of the model, as `LayerExperts.model`; None for a model without experts of a bundle.
        snapshots: the `Snapshot` of every layer as the step began (experts/handles.py).
        counters: the step's `Counters` (experts/counters.py): routing counts; None where they are not wanted.
        watchers: other counters, as the server's live page registers them.
        prompt: what the step reads of its sequences.
        loader: loads each layer's experts before they run; the layer then reads its current snapshot.
        paging: gives experts in pages their memory.
        prediction: the `Prediction` of the next layer's routing (experts/prediction.py), for `loader`.
        importance: sees the attention of a prompt, for `loader`.
        packed: the cache of a pass that packs several sequences.
        number: the residency's number of the step.
        table: the handle table on a GPU.
        began: perf_counter seconds.
        seconds: time of the step without waits, set at its end.
        waited: seconds waited for experts' bytes.
        demanded: (layer position, packed bytes, stored bytes) brought for each layer.
        ahead: pages taken for the next layer (paging/paging.py).
        issued: work given to a device for the step's pages, to be checked at the next layer or the end.
        outer: the step that was running in this thread when this one began.
    """

    model: object = None
    snapshots: Sequence[Any] = ()
    counters: Any = None
    watchers: Sequence[RoutingCounter] = ()
    prompt: Prompt = NO_PROMPT
    loader: LayerLoader | None = None
    paging: PageSource | None = None
    prediction: Any = None
    importance: AttentionObserver | None = None
    packed: PackedCache | None = None
    number: int = 0
    table: Any = None
    began: float = 0.0
    seconds: float = 0.0
    waited: float = 0.0
    demanded: list[tuple[int, int, int]] = field(default_factory=list)
    ahead: Any = None
    issued: list[Any] = field(default_factory=list)
    outer: Step | None = None


class StepOpener(Protocol):
    """Opens the steps of one model: its `ForwardWrapper` (runtime/forward_wrapper.py)."""

    def alone(self) -> AbstractContextManager[Step]:
        """A step for one call of an experts module outside any forward pass."""

    def compiled_layer(self, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run one layer's experts in a compiled pass: the first layer opens its step, the last one closes it."""


class _Context(threading.local):
    """The context of a thread: its innermost step, and by model what ends a compiled pass."""

    def __init__(self) -> None:
        self.step: Step | None = None
        self.compiled: dict[object, _CompiledPass] = {}


class _CompiledPass:
    """The open step of a compiled pass: one operator opens it and another closes it.

    After an interruption it stays open until the model's next pass on the thread, or the end of the thread.
    """

    def __init__(self, step: AbstractContextManager[Any]) -> None:
        self._step: AbstractContextManager[Any] | None = step
        step.__enter__()

    def end(self) -> None:
        """Close the step. May be called twice."""
        step, self._step = self._step, None
        if step is not None:
            step.__exit__(None, None, None)

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
    finally:
        if _context.step is step:
            _context.step = step.outer
        else:  # a compiled pass of another model was interrupted inside this one, or this is such a pass
            inner: Step | None = _context.step
            while inner is not None and inner.outer is not step:
                inner = inner.outer
            if inner is not None:
                inner.outer = step.outer


def current() -> Step | None:
    """The innermost step of this thread."""
    return _context.step


def step_of(model: object) -> Step | None:
    """The running step of a model in this thread."""
    step = _context.step
    while step is not None and step.model is not model:
        step = step.outer
    return step


def open_compiled(model: object, step: AbstractContextManager[Any]) -> None:
    """Open the step of a compiled pass, until `end_compiled`."""
    end_compiled(model)
    _context.compiled[model] = _CompiledPass(step)


def end_compiled(model: object) -> None:
    """Close the step of a model's compiled pass in this thread, if one is open."""
    if (open_pass := _context.compiled.pop(model, None)) is not None:
        open_pass.end()
