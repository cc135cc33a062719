"""Decode steps on a GPU as replays of CUDA graphs.

A pass is captured when it has come WARM times with one token of each sequence, arguments of the same shapes, and a KV
cache that is static or, as the server's, found by a table. A graph reads addresses that never change: the pass's
tensors, the handle table and the counters of a step are copied there and back on the step's stream. So policies go on
changing versions between replays. What is read at other addresses, or decided by the host in a pass, is never
captured: experts that the host runs or that are in pages, policies that make passes wait, padding.

A budget holds back `graphs.memory` for the graphs of a model. A capture that fails is tried again after AGAIN passes,
then after twice as many each time, because a lack of memory passes. Graphs that were used least recently make room,
but none that was replayed since the pass in need of room was last tried: passes in turn would evict each other.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moepack.families.arguments import cache_of, inputs
from moepack.runtime.devices import graphs
from moepack.runtime.experts.gpu import takes
from moepack.runtime.experts.handles import RUN_THERE, LayerExperts, seen
from moepack.runtime.step.context import Step, opened
from moepack.runtime.step.counters import Counters

if TYPE_CHECKING:
    from transformers.utils.generic import ModelOutput

WARM = 2  # passes before a capture: kernels are compiled, and libraries take their memory
KEPT = 20  # graphs of one model: the server has one for each number of sequences
# passes between a failed capture and the next one: at first, and at the most
AGAIN = 16
RARELY = 4096
log = logging.getLogger("moepack.runtime")
Forward = Callable[..., "ModelOutput"]
Key = tuple[Hashable, ...]


@dataclass(slots=True)
class _Waiting:
    """A kind of pass without a graph."""

    left: int  # passes until a capture is tried
    since: int  # the number of the pass at which this kind was first seen, or last tried
    addresses: tuple[int, ...]  # of the cache in the last pass
    failures: int = 0
    crowded: bool = False  # whether a capture beside other graphs took more than all may: one alone may fit


@dataclass(slots=True, weakref_slot=True)
class _Pool:
    """Memory of torch's allocator that the graphs of one stream share; all is given back with the last of them."""

    taken: int = 0  # bytes


@dataclass(slots=True)
class _Captured:
    """A pass in a graph, and what its kernels read and write."""

    graph: torch.cuda.CUDAGraph
    given: list[Tensor]  # copies of the pass's tensors, in order
    words: Tensor | None  # the handle tables of all layers; `None` if versions never change
    counters: Counters | None
    kind: type[ModelOutput]  # the class of the model's output
    out: dict[str, Tensor | None]  # its parts, in memory that graphs share; None for the cache, which they would keep
    shared: list[Tensor]  # that memory
    pool: _Pool
    addresses: tuple[int, ...]  # of the cache or its table, and of handles that never change (`_addresses`)
    step: Step  # kept: its snapshots' tensors are views of `words`
    executable: int = 0  # bytes that the driver keeps of the graph
    used: int = 0  # the number of the pass that it was last replayed for


class DecodeGraphs:
    """The graphs of one model. Passes of several threads take turns while they use them."""

    def __init__(self, layers: Sequence[LayerExperts], memory: int = graphs.MEMORY) -> None:
        """Capture passes of a model with these layers of experts; `memory` is what a budget holds back for graphs."""
        self._memory = memory
        self._layers = tuple(layers)
        self._lock = threading.Lock()
        # passes that a graph may hold; captures that failed
        self._passes = 0
        self.failures = 0
        self._waiting: dict[Key, _Waiting] = {}
        self._made: dict[Key, _Captured] = {}  # the least recently used first
        # While a graph has them, by stream: pools, and memory of outputs, which are copied before the next replay
        self._pools: weakref.WeakValueDictionary[int, _Pool] = weakref.WeakValueDictionary()
        self._outs: weakref.WeakValueDictionary[Key, Tensor] = weakref.WeakValueDictionary()

    def run(
        self,
        forward: Forward,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        step: Step,
        given: dict[str, object],
        bounded: bool,
    ) -> ModelOutput | None:
        """Return a pass's output by a replay; None if it is to run as it is.

        Args:
            forward: the model's own forward.
            args: and `kwargs`, of the pass.
            step: the running step of the pass.
            given: the pass's arguments by name.
            bounded: whether the model has a budget, which holds back memory for all graphs.
        """
        cache = cache_of(given)
        ids = inputs(given)
        table = None if step.packed is None else step.packed.table
        tokens = 0 if ids is None else ids.shape[0] * ids.shape[1]
        full = table if table is not None and tokens == table.sequences else None
        if not self._may(step, given, cache):
            if full is not None:
                full.refused += 1
            return None
        tensors: list[Tensor] = []
        key = _key((args, kwargs), tensors, cache)
        if key is None:
            return None
        stream = graphs.current_stream(self._layers[0].of.device)
        owner = cache if table is None else table
        key = (
            stream,
            key,
            id(owner),
            tuple(map(id, step.watchers)),
            torch.is_inference_mode_enabled(),
            step.counters is None,
        )
        with self._lock:
            self._passes += 1
            made = self._made.pop(key, None)
            if made is not None and made.addresses != _addresses(owner, step):
                return None  # the cache was made anew, by another order of beams for example
            if made is not None:
                self._issue(made, tensors, step)
            else:
                waiting = self._waiting_for(key, _addresses(owner, step))
                if waiting.left >= 0 and not waiting.failures:
                    return None
                if waiting.left < 0 and self._makes_room(waiting):
                    at = stream, tokens
                    capture = partial(self._capture, forward, (args, kwargs), tensors, step, (cache, owner), at)
                    made = self._first(key, waiting, capture, tensors, step, bounded)
                    if made is not None:
                        weakref.finalize(owner, self._made.pop, key, None).atexit = False
            if full is not None:
                full.refused = 0 if made is not None else full.refused + 1
            if made is None:
                return None
            if key not in self._waiting:  # else it took too much memory to be kept
                self._made[key], made.used = made, self._passes
            return self._output(made, step, cache)

    def _waiting_for(self, key: Key, addresses: tuple[int, ...]) -> _Waiting:
        """Count a pass without a graph; a cache whose memory is another one than in the pass before is waited for."""
        if len(self._waiting) > 16 * KEPT:  # of passes that never come again
            self._waiting.clear()
        waiting = self._waiting.setdefault(key, _Waiting(WARM, self._passes, addresses))
        if waiting.addresses != addresses:
            waiting.addresses = addresses
            waiting.left = max(waiting.left, WARM)
        waiting.left -= 1
        return waiting

    def _makes_room(self, waiting: _Waiting) -> bool:
        """Evict graphs for one more; where those were used since it was last tried, have it wait instead."""
        if self._evict(len(self._made) if waiting.crowded else len(self._made) - KEPT + 1, waiting.since):
            return True
        waiting.left = WARM
        waiting.since = self._passes
        return False

    def _evict(self, count: int, since: int) -> bool:
        """Evict the `count` graphs that were used least recently; evict none if one was used after pass `since`."""
        made = list(self._made.items())[: max(0, count)]
        if any(of.used > since for _, of in made):
            return False
        for key, _ in made:
            self._made.pop(key, None)
        return True

    def _first(
        self,
        key: Key,
        waiting: _Waiting,
        capture: Callable[[], _Captured],
        tensors: list[Tensor],
        step: Step,
        bounded: bool,
    ) -> _Captured | None:
        """Capture a pass, and issue it for the first time; return None after a failure.

        While `key` still waits afterwards, its graph is not to be kept.
        """
        device = self._layers[0].of.device
        made = None
        try:
            with graphs.alone(device):  # captures of other models would be counted here
                before = graphs.outside(device)
                made = capture()
                self._issue(made, tensors, step)  # the driver takes some of its memory only now
                made.executable = max(0, graphs.outside(device) - before)
        except Exception as error:  # of any kind, from a family's code
            made = None  # its memory may be what is lacking
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                self._evict(1, waiting.since)
            self._failed(waiting, str(error).split("\n")[0] or type(error).__name__)
            return None
        if bounded and (taken := self._taken(made)) > self._memory:
            others = len(self._made)
            self._made.clear()  # a pool of torch's allocator is given back with its last graph
            self._failed(waiting, f"{others + 1} graphs take {taken} bytes", never=not others)
            waiting.crowded = True
            return made
        del self._waiting[key]
        return made

    def _failed(self, waiting: _Waiting, why: str, never: bool = False) -> None:
        waiting.left = sys.maxsize if never else min(AGAIN << waiting.failures, RARELY)
        waiting.failures += 1
        waiting.since = self._passes
        self.failures += 1
        again = "" if never else f", until {waiting.left} passes later"
        log.warning("a decode step is not captured in a CUDA graph%s: %s", again, why)

    def _taken(self, more: _Captured) -> int:
        """Return the bytes of the device that graphs have, with one more."""
        made = [*list(self._made.values()), more]
        return sum(m.executable for m in made) + sum(p.taken for p in {id(m.pool): m.pool for m in made}.values())

    def _may(self, step: Step, given: dict[str, object], cache: object) -> bool:
        """Whether a graph may hold the pass."""
        ids = inputs(given)
        counters = step.counters
        packed = step.packed
        if ids is None or torch.is_grad_enabled():
            return False
        tokens = ids.shape[0] * ids.shape[1]
        if packed is None:
            one_each = ids.shape[1] == 1 and _is_static(cache)
        else:
            one_each = packed is cache and packed.table is not None and not packed.table.by_address
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:  # grows with every token
            return False
        if not one_each or step.prompt.several or step.importance is not None or step.loader is not None:
            return False
        if counters is not None and (counters.mask is not None or counters.within):
            return False
        return all(
            takes(layer, step, tokens, 1) and snapshot.places <= RUN_THERE
            for layer, snapshot in zip(self._layers, seen(step), strict=True)
        )

    def _capture(
        self,
        forward: Forward,
        of: object,
        tensors: list[Tensor],
        step: Step,
        into: tuple[object, Any],
        at: tuple[int, int],
    ) -> _Captured:
        """Capture a pass `into` its cache and what that belongs to, `at` a stream and of so many tokens."""
        (cache, owner), device, counters, words = into, self._layers[0].of.device, None, None
        if step.packed is not None:
            step.packed.write_table()  # which is no part of the graph
        with torch.inference_mode(False):
            own = [t.detach().clone() for t in tensors]
            if step.counters is not None:
                counters = step.counters.like()
            if step.words is not None:
                words = step.words.clone()
        layers = seen(step) if words is None else [s.over(w) for s, w in zip(seen(step), words, strict=True)]
        inner = replace(step, snapshots=tuple(layers), counters=counters, words=None, routed=None)
        args, kwargs = _with(of, iter(own))
        out = dict[str, Tensor | None]()
        kind: list[type[ModelOutput]] = []
        shared = list[Tensor]()

        def run() -> None:
            if counters is not None:
                counters.zero()
            made = forward(*args, **kwargs)
            out.update((k, None if v is cache else self._shared(at, k, v, shared)) for k, v in made.items())
            kind.append(type(made))

        # Graphs of one stream run one after another, and their outputs are copied: they may share memory.
        beside = next((m.graph for k, m in list(self._made.items()) if k[0] == at[0]), None)
        pool = self._pools.get(at[0]) or _Pool()
        before = graphs.reserved(device, emptied=True)  # as a capture begins by emptying what is kept for later
        with opened(inner):
            graph = graphs.capture(run, device, beside)
        pool.taken += max(0, graphs.reserved(device) - before)
        self._pools[at[0]] = pool
        inner.packed = inner.outer = inner.logits = None  # which hold sequences and memory of this pass
        log.info("a decode step of %d sequences is now a CUDA graph", at[1])
        return _Captured(graph, own, words, counters, kind[0], out, shared, pool, _addresses(owner, step), inner)

    def _shared(self, at: tuple[int, int], name: str, made: object, shared: list[Tensor]) -> Tensor:
        """Copy a part of a pass's output to memory that graphs of one stream and about as many tokens share.

        Each graph's own logits would stay beside those of all others. The memory is added to `shared`.
        """
        if not isinstance(made, Tensor):
            raise RuntimeError(f"the pass returns {name}, which is no tensor")
        stream, tokens = at
        room = -(-made.numel() // tokens) * (1 << (tokens - 1).bit_length())
        with torch.inference_mode(False):
            if (memory := self._outs.get(key := (stream, name, made.dtype, room))) is None:
                memory = self._outs[key] = made.new_empty(room)
            shared.append(memory)
            return memory[: made.numel()].view(made.shape).copy_(made)

    def _issue(self, made: _Captured, tensors: list[Tensor], step: Step) -> None:
        """Copy a pass's tensors and handles to where the graph reads them, and replay it."""
        with torch.no_grad():
            if step.packed is not None:
                step.packed.write_table()
            for to, source in zip(made.given, tensors, strict=True):
                to.copy_(source, non_blocking=True)
            if made.words is not None and step.words is not None:
                made.words.copy_(step.words, non_blocking=True)
            made.graph.replay()

    def _output(self, made: _Captured, step: Step, cache: object) -> ModelOutput:
        """Return copies of what the replay makes, and add its counts to the step's."""
        with torch.no_grad():
            if made.counters is not None:
                made.counters.copy_to(step.counted)
            return made.kind(**{k: cache if v is None else v.clone() for k, v in made.out.items()})


def _is_static(cache: object) -> bool:
    """Whether a cache keeps its memory, and has it already."""
    layers = getattr(cache, "layers", ())
    return any(map(_held_by, layers)) and all(map(_keeps_memory, layers))


def _keeps_memory(layer: Any) -> bool:
    """Whether a layer of a cache has its memory, or needs none, and the host decides nothing by what it holds."""
    begun = getattr(layer, "has_previous_state", None)
    if isinstance(begun, dict):  # by number: a layer of states alone, which are changed in place
        return all(begun.values()) and layer.is_compileable
    if type(layer).__name__ == "DummyLayer":
        return True
    return (
        isinstance(getattr(layer, "cumulative_length", None), Tensor)
        and getattr(layer, "is_initialized", False)
        and not hasattr(layer, "cumulative_length_int")  # of a window: the host counts, and a replay does not
    )


def _held_by(layer: Any) -> list[int]:
    """Return the addresses of a cache's layer, of keys and values or states by number, and the numbers of its own.

    What changes from pass to pass is moved or counted by the host.
    """
    held = [v for of in vars(layer).values() for v in (of.values() if isinstance(of, dict) else (of,))]
    return [v.data_ptr() if isinstance(v, Tensor) else v for v in held if isinstance(v, Tensor | int)]


def _addresses(owner: Any, step: Step) -> tuple[int, ...]:
    """What a graph reads in addition to its own tensors: a static cache's or a table's, and handles."""
    if step.packed is not None:
        held = [owner.there.data_ptr()]
    else:
        held = [number for layer in owner.layers for number in _held_by(layer)]
    if step.words is None:
        held += [s.device_table().data_ptr() for s in seen(step)]
    return tuple(held)


def _key(value: object, tensors: list[Tensor], cache: object) -> Hashable:
    """Return what is equal for two passes with one graph, and collect tensors; None for what is not understood."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return tuple(value.shape), value.dtype, value.device
    if value is cache:
        return "cache"
    if isinstance(value, tuple | list | dict):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        parts = [(k, _key(v, tensors, cache)) for k, v in pairs]
        return None if any(part is None for _, part in parts) else (type(value), *parts)
    return (type(value), value) if value is None or isinstance(value, bool | int | float | str) else None


def _with(value: object, tensors: Iterator[Tensor]) -> Any:
    """Return arguments with other tensors, in the order of `_key`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)(_with(v, tensors) for v in value)
    return {k: _with(v, tensors) for k, v in value.items()} if type(value) is dict else value
