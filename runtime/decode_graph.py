"""Decode steps on a GPU as replays of CUDA graphs.

A pass is captured when it has come WARM times with one token of each sequence, arguments of the same shapes, and a KV
cache that is static or, as the server's, found by a table. A graph reads addresses that never change: the pass's
tensors, the handle table and the counters of a step are copied there and back on the step's stream. So policies go on
changing versions between replays. What is read at other addresses, or decided by the host in a pass, is never
captured: experts that the host runs or that are in pages, policies that make passes wait, padding. A budget holds back
what graphs take.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from moepack.families.arguments import cache_of, inputs
from moepack.runtime.devices import graphs
from moepack.runtime.experts.counters import Counters
from moepack.runtime.experts.gpu import takes
from moepack.runtime.experts.handles import RUN_THERE, LayerExperts
from moepack.runtime.step import Step, opened

WARM = 2  # passes before a capture: kernels are compiled, and libraries take their memory
KEPT = 20  # graphs of one model: the server has one for each number of sequences
log = logging.getLogger("moepack.runtime")
Forward = Callable[..., Any]


@dataclass(slots=True)
class _Captured:
    """A pass in a graph, and what its kernels read and write."""

    graph: graphs.Graph
    given: list[Tensor]  # copies of the pass's tensors, in order
    words: Tensor | None  # the handle tables of all layers; `None` if versions never change
    counters: Counters | None
    kind: Any  # the class of the model's output
    out: dict[str, Any]  # its parts, in memory that graphs share, but for the cache: that would never be let go
    shared: list[Tensor]  # that memory
    taken: int  # bytes of the device that the capture took
    addresses: tuple[int, ...]  # of the cache or its table, and of handles that never change
    step: Step  # kept: its snapshots' tensors are views of `words`


class DecodeGraphs:
    """The graphs of one model. Passes of several threads take turns while they use them."""

    def __init__(self, layers: Sequence[LayerExperts]) -> None:
        """Capture passes of a model with these layers of experts."""
        self._layers, self._lock = tuple(layers), threading.Lock()
        self._seen: dict[Any, int] = {}
        self._made: dict[Any, _Captured | None] = {}  # None: it could not be captured
        # Memory of outputs, as long as a graph has it; a replay's are copied before the next replay
        self._outs: weakref.WeakValueDictionary[Any, Tensor] = weakref.WeakValueDictionary()

    def run(
        self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], step: Step, given: Any, bounded: bool
    ) -> Any:
        """Return a pass's output by a replay; None if it is to run as it is.

        Args:
            forward: the model's own forward.
            args: and `kwargs`, of the pass.
            step: the running step of the pass.
            given: the pass's arguments by name.
            bounded: whether the model has a budget, which holds back `graphs.MEMORY` for all graphs.
        """
        cache, ids, table = cache_of(given), inputs(given), None if step.packed is None else step.packed.table
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
        stream = graphs.stream(self._layers[0].of.device)
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
            if key not in self._made:
                if len(self._seen) > 16 * KEPT:  # of passes that never come again
                    self._seen.clear()
                self._seen[key] = self._seen.get(key, 0) + 1
                if self._seen[key] <= WARM:
                    return None
                self._keep(key, owner)
            made = self._made.get(key)
            if made is not None and made.addresses != _addresses(owner, step):
                del self._made[key]  # the cache was made anew, by another order of beams for example
                return None
            if made is None and key not in self._made:
                made = self._capture(forward, (args, kwargs), tensors, step, (cache, owner), (stream, tokens))
                if made is not None and bounded and made.taken + self._taken() > graphs.MEMORY:
                    log.warning("a decode step is not captured in a CUDA graph: it takes %d bytes", made.taken)
                    made = None
                self._made[key] = made
            if full is not None:
                full.refused = 0 if made is not None else full.refused + 1
            return None if made is None else self._replay(made, tensors, step, cache)

    def _taken(self) -> int:
        return sum(m.taken for m in list(self._made.values()) if m is not None)

    def _may(self, step: Step, given: dict[str, Any], cache: Any) -> bool:
        """Whether a graph may hold the pass."""
        ids, counters, packed = inputs(given), step.counters, step.packed
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
            takes(layer, step, tokens, 1) and not snapshot.in_window and snapshot.places <= RUN_THERE
            for layer, snapshot in zip(self._layers, step.snapshots, strict=True)
        )

    def _keep(self, key: Any, owner: Any) -> None:
        """Make room for one more graph, which goes with its cache or table."""
        while len(self._made) >= KEPT:
            self._made.pop(next(iter(list(self._made))), None)
        self._seen.pop(key, None)
        weakref.finalize(owner, self._made.pop, key, None).atexit = False

    def _capture(
        self, forward: Forward, of: Any, tensors: list[Tensor], step: Step, into: tuple[Any, Any], at: tuple[int, int]
    ) -> _Captured | None:
        """Capture a pass `into` its cache and what that belongs to, `at` a stream and of so many tokens."""
        (cache, owner), device, counters, words = into, self._layers[0].of.device, None, None
        if step.packed is not None:
            step.packed.write_table()  # which is no part of the graph
        with torch.inference_mode(False):
            own = [t.detach().clone() for t in tensors]
            if step.counters is not None:
                counters = step.counters.like()
            if step.table is not None:
                words = step.table.words.clone()
        seen = step.snapshots if words is None else [s.over(w) for s, w in zip(step.snapshots, words, strict=True)]
        inner = replace(step, snapshots=tuple(seen), counters=counters, table=None, routed=None)
        args, kwargs = _with(of, iter(own))
        out, kind, shared = dict[str, Any](), list[Any](), list[Tensor]()

        def run() -> None:
            if counters is not None:
                counters.zero()
            made = forward(*args, **kwargs)
            out.update((k, None if v is cache else self._shared(at, k, v, shared)) for k, v in made.items())
            kind.append(type(made))

        try:
            # Graphs of one stream run one after another, and their outputs are copied: they may share memory.
            beside = next((m.graph for k, m in list(self._made.items()) if m is not None and k[0] == at[0]), None)
            before = graphs.reserved(device, emptied=True)  # as a capture begins by emptying what is kept for later
            with opened(inner):
                graph = graphs.capture(run, device, beside)
        except Exception as error:  # of any kind, from a family's code
            log.warning("a decode step is not captured in a CUDA graph: %s", str(error).splitlines()[0])
            return None
        inner.packed = inner.outer = None  # which hold sequences and memory of this pass
        log.info("a decode step of %d sequences is now a CUDA graph", at[1])
        taken = max(0, graphs.reserved(device) - before)
        return _Captured(graph, own, words, counters, kind[0], out, shared, taken, _addresses(owner, step), inner)

    def _shared(self, at: tuple[int, int], name: str, made: Any, shared: list[Tensor]) -> Tensor:
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

    def _replay(self, made: _Captured, tensors: list[Tensor], step: Step, cache: Any) -> Any:
        with torch.no_grad():
            if step.packed is not None:
                step.packed.write_table()
            for to, source in zip(made.given, tensors, strict=True):
                to.copy_(source, non_blocking=True)
            if made.words is not None:
                made.words.copy_(step.table.words, non_blocking=True)
            made.graph.replay()
            if made.counters is not None:
                made.counters.copy_to(step.counters)
            return made.kind(**{k: cache if v is None else v.clone() for k, v in made.out.items()})


def _is_static(cache: Any) -> bool:
    """Whether a cache keeps its memory, and has it already."""
    layers = getattr(cache, "layers", ())
    return bool(layers) and all(
        isinstance(getattr(x, "cumulative_length", None), Tensor)
        and getattr(x, "is_initialized", False)
        and not hasattr(x, "cumulative_length_int")  # of a window: Python decides by it, and a replay does not count it
        for x in layers
    )


def _addresses(owner: Any, step: Step) -> tuple[int, ...]:
    """What a graph reads beside its own tensors: of a static cache or a table, and handles."""
    if step.packed is not None:
        held = [owner.there.data_ptr()]
    else:
        held = [t.data_ptr() for x in owner.layers for t in (x.keys, x.values, x.cumulative_length)]
    if step.table is None:
        held += [s.device_table().data_ptr() for s in step.snapshots]
    return tuple(held)


def _key(value: Any, tensors: list[Tensor], cache: Any) -> Any:
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


def _with(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return arguments with other tensors, in the order of `_key`."""
    if isinstance(value, Tensor):
        return next(tensors)
    if isinstance(value, tuple | list):
        return type(value)(_with(v, tensors) for v in value)
    return {k: _with(v, tensors) for k, v in value.items()} if type(value) is dict else value
