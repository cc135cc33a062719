"""Around every forward pass of a served model: a step, room for its cache and activations, router counts, the trace.

The model and its decoder get a class whose `forward` is wrapped: torch does not run a hook after a pass that was
interrupted, nor where `forward` is called by its name. Decides nothing.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.runtime.experts.counters import Counters
from moepack.runtime.experts.forward import experts_forward
from moepack.runtime.experts.handles import LayerExperts, Snapshot
from moepack.runtime.experts.op import Open
from moepack.runtime.experts.prediction import Prediction
from moepack.runtime.residency.arguments import bound, cache_of, inputs, without_self
from moepack.runtime.residency.kv_reserve import KvWatch
from moepack.runtime.residency.live import Live, Seen

from .model_methods import model_methods
from .trace import Record, TraceWriter

if TYPE_CHECKING:
    from moepack.runtime.experts.token_importance import TokenImportance

log = logging.getLogger("moepack.runtime")


@functools.cache
def _watched(kind: type) -> type:
    """A class of models whose forward runs inside `Passes.around`; otherwise `kind`, by its name too."""

    signature = without_self(kind.forward)  # type: ignore[attr-defined]

    @functools.wraps(kind.forward)  # type: ignore[attr-defined]
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            self._moepack_passes.compiling(self, args, kwargs)
            return kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
        self._moepack_passes.end_interrupted()
        with self._moepack_passes.around(bound(signature, args, kwargs)) as done:
            out = kind.forward(self, *args, **kwargs)  # type: ignore[attr-defined]
            done(out)
            return out

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, **model_methods(kind), "forward": forward})


def unwatched_forward(model: Any) -> Callable[..., Any]:
    """A model's own forward: for a part of a pass that has been watched already."""
    watched = "_moepack_passes" in model.__dict__
    kind: Any = type(model).__mro__[1]
    return functools.partial(kind.forward, model) if watched else model.forward


class Passes:
    """Watches a model's forward passes. A pass that another thread begins meanwhile is a step of its own."""

    def __init__(self, model: Any, layers: Sequence[LayerExperts], live: Live | None) -> None:
        self.caches: KvWatch | None = None
        self._closed, self._process = False, os.getpid()
        self._layers, self._live = tuple(layers), live
        self._running = threading.local()
        self._trace: TraceWriter | None = None
        self._resident: Callable[[], int] = lambda: 0
        self._written, self._began = 0, time.monotonic()
        self._lock = threading.Lock()
        self._importance: TokenImportance | None = None
        if live is not None:
            self._observe()
            needs, described = live.policy.needs, [layer.of.layer for layer in self._layers]
            if needs.importance:
                from moepack.runtime.experts.token_importance import TokenImportance

                self._importance = TokenImportance(model, described, needs.importance, live.plan.workspace)
            if needs.prediction:
                live.prediction = Prediction(model, described)
        for position, layer in enumerate(self._layers):
            layer.compiled = partial(self._compiled, position)
        decoder = getattr(model, model.base_model_prefix, model)
        for module in (model,) if decoder is model else (model, decoder):
            module._moepack_passes = self
            if (own := module.__dict__.get("forward")) is not None:  # somebody's wrapper, which would hide the class's
                module.forward = self._wrapped(own, without_self(type(module).forward))
            module.__class__ = _watched(type(module))  # type: ignore[arg-type]

    def _wrapped(self, own: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
        @functools.wraps(own)
        def forward(*args: Any, **kwargs: Any) -> Any:
            with self.around(bound(signature, args, kwargs)) as done:
                out = own(*args, **kwargs)
                done(out)
                return out

        return forward

    def compiling(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """What a pass that is being compiled is told: its step begins and ends with its experts' operators, which know
        of its tokens alone."""
        if torch.compiler.is_exporting():
            raise InputError("a loaded bundle is not exported: its experts are read where they lie in this process")
        if self.caches is None:
            return
        if len(args) > 1:
            raise InputError("a compiled pass in a budget is given its arguments by name")
        wanted = kwargs.get("use_cache")
        if kwargs.get("past_key_values") is not None or (
            model.config.get_text_config().use_cache if wanted is None else wanted
        ):
            raise InputError("a compiled pass in a budget keeps no cache: pass use_cache=False")
        for name in ("labels", "output_hidden_states", "output_attentions", "output_router_logits"):
            if kwargs.get(name) is not None and kwargs.get(name) is not False:
                raise InputError(f"a compiled pass in a budget returns logits alone: without {name}")
        if hasattr(model, "lm_head") and not self.caches.all_logits and not kwargs.get("logits_to_keep"):
            raise InputError("a compiled pass in a budget returns what it was loaded for: pass logits_to_keep=1")

    def end_interrupted(self) -> None:
        """A compiled pass that was interrupted left its step open: another pass of its thread ends it."""
        if (left := getattr(self._running, "open", None)) is not None:
            self._running.open = None
            left.end()

    def _compiled(self, position: int, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """A layer's experts in a compiled pass: the first of them begins a step, the last one ends it."""
        mine = self._running
        if not position:
            self.end_interrupted()
            ids = torch.empty(1, len(hidden), dtype=torch.int64, device="meta")
            mine.open = Open(self.around({"input_ids": ids, "use_cache": False}))
        done = False
        try:
            out = experts_forward(module, hidden, index, weights)
            done = position < len(self._layers) - 1
            return out
        finally:
            if not done and (ends := getattr(mine, "open", None)) is not None:
                mine.open = None
                ends.end()

    def _observe(self) -> None:
        for position, layer in enumerate(self._layers):
            layer.observer = partial(self._saw, position)

    @contextlib.contextmanager
    def around(self, given: dict[str, Any]) -> Iterator[Callable[[Any], None]]:
        """Around one forward of the model or of its decoder, with arguments by name; what it yields is told the
        result."""
        running = self._running
        if getattr(running, "pass_", False):  # a forward inside another belongs to its step
            yield lambda out: None
            return
        self._check()
        with contextlib.ExitStack() as stack:
            if self._live is not None:
                stack.enter_context(self._live.turn())
            done = stack.enter_context(self.caches.room(given)) if self.caches else lambda out: None
            traced, step, counters = self._trace is not None, None, None
            if self._live is not None:
                text = _text(given)
                prompt, kept = stack.enter_context(self._live.sequence(given))
                done = _both(done, kept)
                step = stack.enter_context(self._live.step(prompt, text))
                if prompt.several and self._importance is not None:
                    cache = cache_of(given)
                    cached = 0 if cache is None else int(cache.get_seq_length())
                    stack.enter_context(self._importance.watching(tuple(inputs(given).shape[:2]), text, cached))
                counters = step.counters
            elif traced:
                counters = Counters([x.of.layer.experts for x in self._layers], False, self._layers[0].of.device)
                counters.mask = _text(given)
            running.pass_, running.counters, running.step = True, counters, step
            try:
                yield done
                if traced and counters is not None:
                    counts = [row.tolist() for row in counters.take()[0]]
            finally:
                running.pass_, running.counters, running.step = False, None, None
        if traced:
            self._write(counts, step.snapshots if step else tuple(layer.current for layer in self._layers))

    def _check(self) -> None:
        if self._closed:
            raise InputError("this model was closed: load the bundle again")
        if self._process != os.getpid() and (self._live is not None or self.caches is not None):
            raise InputError("a bundle served in a budget stays with the process that loaded it: load it in the child")

    @property
    def in_budget(self) -> bool:
        """Whether the model is served in a memory budget."""
        return self._live is not None or self.caches is not None

    def expert_bytes(self) -> int:
        """Bytes of all active versions."""
        return sum(layer.resident_bytes for layer in self._layers)

    def expert_parameters(self) -> int:
        """How many numbers the experts' matrices and biases hold, whatever their versions."""
        layers = [x.of.layer for x in self._layers]
        return sum(x.experts * sum(m.weights + m.rows * m.bias for m in x.matrices) for x in layers)

    def refuse_copies(self) -> NoReturn:
        """Say what a copy or a pickle of the model is told."""
        raise InputError("a loaded bundle is neither copied nor pickled: load it again, with moepack.load")

    def _saw(self, position: int, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        counters: Counters | None = getattr(self._running, "counters", None)
        live = self._live
        if counters is None:  # an experts module that was called by itself
            if live is not None and live.policy.needs.layers:
                with live.step() as step:
                    step.counters.add(position, top_k_index, top_k_weights)
                    live.demand(position, step.counters)
            return
        counters.add(position, top_k_index, top_k_weights)
        if live is None or not live.policy.needs.layers:
            return
        important = self._importance.important(position, top_k_index) if self._importance is not None else None
        ahead = live.prediction
        told = ahead.ahead(position, hidden, top_k_index, counters.mask) if ahead is not None else (None, None)
        live.demand(position, counters, Seen(self._running.step.prompt.several, important, *told))

    def trace_to(self, path: str | Path, policy: str, bundle: Bundle, resident: Callable[[], int]) -> None:
        """Write every step from now on into a file; `resident` gives the bytes that are taken."""
        self.end_trace()
        self._observe()
        layers = [(layer.index, layer.experts) for layer in bundle.layers]
        self._resident = resident
        self._trace = TraceWriter(Path(path), policy, layers, [v.name for v in bundle.manifest.versions])

    def _write(self, counts: list[list[int]], seen: Sequence[Snapshot]) -> None:
        live, now = self._live, time.monotonic()
        queues = live.transitions.queues() if live is not None else None
        with self._lock:
            if self._trace is None:
                return
            self._written += 1
            record = Record(
                self._written,
                now - self._began,
                [[-1 if h.version is None else x.of.number(h.version) for h in x.handles] for x in seen],
                counts,
                queues.updates if queues else 0,
                queues.evictions if queues else 0,
                queues.in_flight if queues else 0,
                live.moved if live is not None else 0,
                self._resident(),
                live.transitions.refusals if live is not None else 0,
                live.waits if live is not None else 0,
            )
            try:
                self._trace.write(record)
            except OSError as error:
                self._broken(error)

    def close(self) -> None:
        """End the trace, and serve no more."""
        self._closed = True
        if self.caches is not None:
            self.caches.closed = True
        self.end_trace()

    def end_trace(self) -> None:
        """Close the trace's file."""
        with self._lock:
            trace, self._trace = self._trace, None
            if trace is not None:
                try:
                    trace.close()
                except OSError as error:
                    self._broken(error)

    def _broken(self, error: OSError) -> None:
        """The trace's file cannot be written: serving goes on without it, and says so once."""
        trace, self._trace = self._trace, None
        log.warning("the trace ends early, it cannot be written: %s", error.strerror or error)
        if trace is not None:
            with contextlib.suppress(OSError):  # what is left fails again; the file is closed all the same
                trace.close()


def _both(first: Callable[[Any], None], second: Callable[[Any], None]) -> Callable[[Any], None]:
    def done(out: Any) -> None:
        first(out)
        second(out)

    return done


def _text(given: dict[str, Any]) -> Tensor | None:
    """int64 [tokens], 0 where a pass's token is padding; None without a mask that says so."""
    ids, mask = inputs(given), given.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or ids is None or mask.shape[1] < ids.shape[1]:
        return None
    return (mask[:, mask.shape[1] - ids.shape[1] :] != 0).reshape(-1).long()
