"""The forward wrapper: opens and closes the step of every forward pass of a served model.

A pass takes, in this order: a lock, if the policy lets passes wait for experts; room for its cache and activations; its
sequences; and a step of the residency manager. The model and its decoder get a derived class with a wrapped `forward`,
not hooks: torch runs no hook after an interrupted pass, nor when `forward` is called directly.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from inspect import Signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from moepack.families.arguments import CACHE_NAMES, bound, cache_of, inputs, uses_cache, with_cache, without_self
from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.runtime.devices import graphs
from moepack.runtime.experts.forward import experts_forward
from moepack.runtime.experts.handles import LayerExperts, Snapshot, seen
from moepack.runtime.experts.prediction import Prediction, tell_logits
from moepack.runtime.kv.static import cached_tokens
from moepack.runtime.residency.kv_reserve import KvBudget
from moepack.runtime.residency.manager import ResidencyManager
from moepack.runtime.residency.transitions import Queues
from moepack.runtime.step.context import (
    PackedCache,
    RoutingCounter,
    Step,
    current,
    end_compiled,
    go_back_to,
    open_compiled,
    opened,
    step_of,
)
from moepack.runtime.step.counters import Counters

from .model_methods import model_methods
from .trace import Record, TraceWriter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from moepack.runtime.experts.token_importance import TokenImportance
    from moepack.runtime.kv.forms import Bits

    from .decode_graph import DecodeGraphs

log = logging.getLogger("moepack.runtime")


def decode_graphs(layers: Sequence[LayerExperts], memory: int = graphs.MEMORY) -> DecodeGraphs | None:
    """Return what captures a model's passes; None if its experts are not on one GPU, or the environment forbids it.

    `memory` is what a budget holds back for graphs.
    """
    kernels = {x.of.backend for x in layers} == {"triton"}
    if not graphs.wanted() or not kernels or len({x.of.device for x in layers}) > 1:
        return None
    from .decode_graph import DecodeGraphs  # which imports Triton

    return DecodeGraphs(layers, memory)


@functools.cache
def _wrapped_class(kind: type[nn.Module]) -> type:
    """Derive a model class whose forward opens a step. It keeps the name of `kind`."""

    signature = without_self(kind.forward)

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: object, **kwargs: object) -> object:
        wrapper: ForwardWrapper = self._moepack_wrapper
        if torch.compiler.is_compiling():
            wrapper.check_compiling(self, args, kwargs)
            return kind.forward(self, *args, **kwargs)
        end_compiled(wrapper._key)  # an interrupted compiled pass may have left its step open in this thread
        given = bound(signature, args, kwargs)
        whole = step_of(wrapper._key) is None
        if whole and wrapper.kv and cache_of(given) is None and uses_cache(self.config, given):
            from moepack.runtime.kv.growing import new_cache

            signature.bind_partial(*args, **kwargs)  # raises what the forward itself would
            named = dict(zip(signature.parameters, args, strict=False)) | kwargs
            kwargs = {name: value for name, value in named.items() if name not in CACHE_NAMES}
            kwargs |= with_cache(self, new_cache(self, wrapper.kv))
            args = ()
            given = bound(signature, args, kwargs)

        def run() -> object:
            own = functools.partial(kind.forward, self)
            out = wrapper.replayed(own, args, kwargs, given) if whole and wrapper.graphs is not None else None
            return own(*args, **kwargs) if out is None else out

        return wrapper.run(given, run)

    names = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**names, **model_methods(kind), "forward": forward})


def unwrapped_forward(model: PreTrainedModel) -> Callable[..., Any]:
    """Return a model's own forward, for a part of a pass whose step is already open."""
    wrapped = "_moepack_wrapper" in model.__dict__
    kind: Any = type(model).__mro__[1]
    return functools.partial(kind.forward, model) if wrapped else model.forward


class ForwardWrapper:
    """Opens a step around every forward pass of one model. Passes of several threads are separate steps."""

    def __init__(
        self,
        model: PreTrainedModel,
        layers: Sequence[LayerExperts],
        manager: ResidencyManager | None,
        kv: Sequence[Bits] = (),
    ) -> None:
        """Wrap the forward of a model and of its decoder. Caches have the bits `kv`, by layer; empty for plain ones."""
        self.kv = tuple(kv)
        self._config = model.config
        self.caches: KvBudget | None = None  # keeps KV caches inside the budget; None without one
        self.watchers: tuple[RoutingCounter, ...] = ()  # other counters of routing, beside the residency manager's
        self.graphs = decode_graphs(layers, graphs.memory(model))
        self._closed = False
        self._process = os.getpid()
        self._layers = tuple(layers)
        self._manager = manager
        self._key = object() if manager is None else manager.key
        self._trace: TraceWriter | None = None
        self._resident: Callable[[], int] = lambda: 0
        self._written = 0
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._importance: TokenImportance | None = None
        if manager is not None:
            needs = manager.policy.needs
            described = [layer.of.layer for layer in self._layers]
            if needs.importance:
                from moepack.runtime.experts.token_importance import TokenImportance

                self._importance = TokenImportance(model, described, needs.importance, manager.plan.workspace)
            if needs.prediction:
                manager.prediction = Prediction(model, described, needs.sums)
            if any(reducer.reads_logits for reducer in needs.sums):
                tell_logits(model, described, self._key)
        for position, layer in enumerate(self._layers):
            layer.model = self._key
            layer.position = position
            layer.steps = self
        decoder = getattr(model, model.base_model_prefix, model)
        for module in (model,) if decoder is model else (model, decoder):
            module._moepack_wrapper = self
            if (own := module.__dict__.get("forward")) is not None:  # set on the instance: it would hide the class's
                module.forward = self._wrapped(own, without_self(type(module).forward))
            module.__class__ = _wrapped_class(type(module))  # type: ignore[arg-type]

    def _wrapped(self, own: Callable[..., object], signature: Signature) -> Callable[..., object]:
        @functools.wraps(own)
        def forward(*args: object, **kwargs: object) -> object:
            return self.run(bound(signature, args, kwargs), functools.partial(own, *args, **kwargs))

        return forward

    # --- steps

    def run(self, given: dict[str, object], own: Callable[[], object]) -> object:
        """Run a forward pass of the model or its decoder in its step, and return the result.

        Args:
            given: the forward's arguments by name.
            own: runs the forward itself.
        """
        if step_of(self._key) is not None:  # a forward inside another belongs to the outer one's step
            return own()
        outer = current()
        try:
            with self.step(given) as done:
                out = own()
                done(out)
                return out
        except BaseException:
            # An interruption may fall after a context has begun and before its `with` statement knows of it. It then
            # stays open for as long as somebody keeps the traceback, and must not stand for a running pass.
            go_back_to(outer)
            self._end_interrupted()
            raise

    def _end_interrupted(self) -> None:
        """Let go what an interrupted pass of this thread left. None of its passes runs."""
        if self.caches is not None:
            self.caches.end_interrupted()
        if self._manager is not None:
            self._manager.end_interrupted()

    @contextlib.contextmanager
    def step(self, given: dict[str, object]) -> Iterator[Callable[[object], None]]:
        """Open the step of a forward pass of the model or its decoder; yield a function that takes the pass's result.

        `given` are the forward's arguments by name.
        """
        if step_of(self._key) is not None:  # a forward inside another belongs to the outer one's step
            yield lambda out: None
            return
        self._check()
        self._end_interrupted()  # a second interruption may have fallen into the end of the first one's pass
        traced = self._trace is not None
        manager = self._manager
        text = _text(given)
        counts: list[list[int]] = []
        told: list[Callable[[object], None]] = []
        with contextlib.ExitStack() as stack:
            if manager is not None:
                stack.enter_context(manager.pass_lock())
            if (cache := cache_of(given)) is not None and not isinstance(cache, PackedCache):  # which codes for itself
                from moepack.runtime.kv.growing import grow_in_place  # which imports transformers

                grow_in_place(cache, 0 if self.caches is None else self.caches.needs.workload.kv_tokens, self.kv)
            if self.caches is not None:
                told.append(stack.enter_context(self.caches.room(given)))
            if manager is None:
                step = stack.enter_context(opened(self._unchanging()))
                if traced:
                    experts = [x.of.layer.experts for x in self._layers]
                    device = self._layers[0].of.device
                    step.counters = counters = Counters(experts, (), device)
                    counters.mask = text
            else:
                prompt, done = stack.enter_context(manager.sequence(given))
                told.append(done)
                step = stack.enter_context(manager.step(prompt, text))
                if prompt.several and self._importance is not None:
                    stack.enter_context(self._observed(self._importance, step, given, text))
            step.watchers = self.watchers
            step.weighed = bool(given.get("output_attentions") or getattr(self._config, "output_attentions", False))

            def tell(out: object) -> None:
                for done in told:
                    done(out)

            yield tell
            if traced:
                counts = [row.tolist() for row in step.counted.take()[0]]
        if traced:
            self._write(counts, seen(step))

    def replayed(
        self, forward: Callable[..., Any], args: tuple[object, ...], kwargs: dict[str, object], given: dict[str, object]
    ) -> object:
        """Return the output of a decode step by the replay of a CUDA graph; None if it is to run as it is."""
        step = step_of(self._key)
        if step is None or self.graphs is None:
            return None
        return self.graphs.run(forward, args, kwargs, step, given, self.caches is not None)

    @contextlib.contextmanager
    def _observed(
        self, importance: TokenImportance, step: Step, given: dict[str, object], text: Tensor | None
    ) -> Iterator[None]:
        """Enclose a pass: measure how much attention each token of its prompt receives."""
        cache = cache_of(given)
        cached = 0 if cache is None else int(cache.get_seq_length())
        with importance.watching(tuple(inputs(given).shape[:2]), text, cached):
            step.importance = importance
            yield

    def _unchanging(self) -> Step:
        """Return a step of a model whose versions never change."""
        return Step(self._key, tuple(layer.current for layer in self._layers))

    def alone(self) -> AbstractContextManager[Step]:
        """Return a context with a step, for one call of an experts module outside any forward pass.

        The call's routing does not count as traffic, unless experts are chosen by it: a policy that lets passes wait
        loads them.
        """
        if self._manager is None:
            return opened(self._unchanging())
        return self._manager.step(counted=self._manager.policy.needs.layers)

    # --- compiled passes

    def check_compiling(self, model: PreTrainedModel, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        """Check the arguments of a compiled pass, whose step only knows the number of its tokens.

        Raises:
            InputError: for an export, and a cache that would not be coded as others are; in a budget also for any
                cache, and for outputs that it was not loaded for.
        """
        if torch.compiler.is_exporting():
            raise InputError("a loaded bundle is not exported: its experts are read where they lie in this process")
        if self.kv and uses_cache(model.config, kwargs):
            cache = cache_of(kwargs)
            layers = getattr(cache, "layers", ())
            if not any(type(layer).__name__ == "CodedKvLayer" for layer in layers):
                raise InputError("a compiled pass makes no cache of codes: pass use_cache=False, or load with kv=16")
        if self.caches is None:
            return
        if len(args) > 1:
            raise InputError("a compiled pass in a budget is given its arguments by name")
        if cache_of(kwargs) is not None or uses_cache(model.config, kwargs):
            raise InputError("a compiled pass in a budget keeps no cache: pass use_cache=False")
        for name in ("labels", "output_hidden_states", "output_attentions", "output_router_logits"):
            if kwargs.get(name) is not None and kwargs.get(name) is not False:
                raise InputError(f"a compiled pass in a budget returns logits alone: without {name}")
        if hasattr(model, "lm_head") and not self.caches.needs.workload.all_logits and not kwargs.get("logits_to_keep"):
            raise InputError("a compiled pass in a budget returns what it was loaded for: pass logits_to_keep=1")

    def compiled_layer(self, module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run one layer's experts in a compiled pass: the first layer opens the pass's step, the last one closes it."""
        position: int = module._moepack.position
        if not position:
            ids = torch.empty(1, len(hidden), dtype=torch.int64, device="meta")
            end_compiled(self._key)
            open_compiled(self._key, self.step({"input_ids": ids, "use_cache": False}))
        ends = True
        try:
            out = experts_forward(module, hidden, index, weights)
            ends = position == len(self._layers) - 1
            return out
        finally:
            if ends:
                end_compiled(self._key)

    # --- the model

    def _check(self) -> None:
        if self._closed:
            raise InputError("this model was closed: load the bundle again")
        if self._process != os.getpid() and (self._manager is not None or self.caches is not None):
            raise InputError("a bundle served in a budget stays with the process that loaded it: load it in the child")

    @property
    def in_budget(self) -> bool:
        """Whether the model is served in a memory budget."""
        return self._manager is not None or self.caches is not None

    def expert_bytes(self) -> int:
        """Return the bytes of all active versions."""
        return sum(layer.resident_bytes for layer in self._layers)

    def expert_parameters(self) -> int:
        """Return how many numbers the experts' matrices and biases hold, at any version."""
        layers = [x.of.layer for x in self._layers]
        return sum(x.experts * sum(m.weights + m.rows * m.bias for m in x.matrices) for x in layers)

    def refuse_copies(self) -> NoReturn:
        """Raise InputError for a copy or a pickle of the model."""
        raise InputError("a loaded bundle is neither copied nor pickled: load it again, with moepack.load")

    # --- traces

    def trace_to(self, path: str | Path, policy: str, bundle: Bundle, resident: Callable[[], int]) -> None:
        """Write every step from now on into a file; `resident` returns the bytes of device memory in use."""
        self.end_trace()
        layers = [(layer.index, layer.experts) for layer in bundle.layers]
        self._resident = resident
        self._trace = TraceWriter(Path(path), policy, layers, [v.name for v in bundle.manifest.versions])

    def _write(self, counts: list[list[int]], layers: Sequence[Snapshot]) -> None:
        manager = self._manager
        now = time.monotonic()
        queues = manager.transitions.queues() if manager is not None else Queues(0, 0, 0)
        with self._lock:
            if self._trace is None:
                return
            self._written += 1
            record = Record(
                self._written,
                now - self._began,
                [[-1 if h.version is None else x.of.numbers[h.version.name] for h in x.handles] for x in layers],
                counts,
                queues.updates,
                queues.evictions,
                queues.in_flight,
                manager.moved if manager is not None else 0,
                self._resident(),
                manager.transitions.refusals if manager is not None else 0,
                manager.waits if manager is not None else 0,
            )
            self._unless_broken(functools.partial(self._trace.write, record))

    def close(self) -> None:
        """End the trace, and refuse later passes."""
        self._closed = True
        if self.caches is not None:
            self.caches.closed = True
        self.end_trace()

    def end_trace(self) -> None:
        """Close the trace's file."""
        with self._lock:
            trace = self._trace
            self._trace = None
            if trace is not None:
                self._unless_broken(trace.close)

    def _unless_broken(self, write: Callable[[], None]) -> None:
        """Call `write` for the trace. If it fails, serving goes on without a trace, and the log says so once."""
        try:
            write()
        except OSError as error:
            self._trace = None
            log.warning("%s: the trace ends early, it cannot be written: %s", error.filename, error.strerror)


def _text(given: dict[str, object]) -> Tensor | None:
    """Return int64 [tokens], 1 for text and 0 for padding; None without an attention mask [batch, tokens].

    A mask may be longer than what is cached and read, as transformers takes it: with columns for tokens to come.
    """
    ids = inputs(given)
    mask = given.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2 or ids is None or mask.shape[1] < ids.shape[1]:
        return None
    tokens = ids.shape[1]
    held = cached_tokens(cache_of(given))
    last = mask.shape[1] - tokens
    first = last if held is None else min(held, last)
    return (mask[:, first : first + tokens] != 0).reshape(-1).long()
