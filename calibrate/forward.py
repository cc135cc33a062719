"""The calibration pass: every batch through one decoder layer, then the next layer.

Before the first layer, one run of the model with every decoder layer replaced by a recorder gives the embeddings'
output and the keyword arguments that each layer is called with (masks and rotary tables differ between layers of a
model). All windows have one length and no padding, so one set of arguments serves all batches of a size, but for those
that come from the text (the ids, where a layer routes by them), which are kept for each batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import InputError

from .dense import DenseWatch
from .stream import CODE_ERRORS, StreamedModel

EXPERTS_IMPLEMENTATION = "moepack_observe"


class _Alone(Tensor):
    """Hidden states that a decoder layer returns, and nothing beside them: a model that expects more is told so."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise _More


class _More(Exception):
    """A decoder layer returns more than hidden states."""


class _Reached(Exception):
    """The output projection would be computed now."""


@dataclass(frozen=True)
class Observation:
    """What reached a layer's experts, tokens in the order of the windows.

    Attributes:
        inputs: [tokens, hidden], in the dtype the model computes with.
        experts: int32 [tokens, top_k], the experts the router chose.
        gates: float32 [tokens, top_k], their weights.
        length: tokens of a window.
    """

    inputs: Tensor
    experts: Tensor
    gates: Tensor
    length: int


class CalibrationPass:
    """The live activations between two layers, and how to move them on.

    Attributes:
        hidden: the input of the next layer, one tensor [batch, length, hidden_size] a batch, on the CPU.
    """

    def __init__(self, stream: StreamedModel, ids: Tensor, batch_size: int, dtype: torch.dtype) -> None:
        self._stream, self._dtype = stream, dtype
        self.length = ids.shape[1]
        self._batches = list(ids.split(batch_size))
        self.hidden: list[Tensor] = []
        self._arguments: dict[tuple[int, int], dict[str, Any]] = {}
        self._own: dict[tuple[int, int], dict[str, Any]] = {}  # (layer, batch) -> arguments that are this batch's alone

    def start(self) -> None:
        """Embed every batch and record how each layer is called. The part outside the layers must be loaded."""
        stream = self._stream
        restore = []
        same: dict[tuple[int, int], tuple[bool, Tensor]] = {}  # of a batch's tensors, held: layers are given the same

        def is_same(a: Any, b: Any) -> bool:
            if isinstance(a, tuple) and isinstance(b, tuple):
                return len(a) == len(b) and all(map(is_same, a, b))
            if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a is b:
                return True
            if (id(a), id(b)) not in same:
                same[id(a), id(b)] = torch.equal(a, b), a
            return same[id(a), id(b)][0]

        def recorder(index: int) -> Callable[..., Any]:
            def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if any(a is not None for a in args):
                    name = stream.checkpoint.config.model_type
                    raise InputError(f"decoder layers of {name} take positional arguments: not supported yet")
                if index == 0:
                    self.hidden.append(hidden_states.to("cpu"))
                    same.clear()
                first = self._arguments.setdefault((index, len(hidden_states)), kwargs)
                if own := {n: v for n, v in kwargs.items() if not is_same(v, first.get(n))}:
                    self._own[index, len(self.hidden) - 1] = own
                return hidden_states.as_subclass(_Alone)

            return forward

        for i, layer in enumerate(stream.layers):
            restore.append(layer.forward)
            layer.forward = recorder(i)
        try:
            with torch.inference_mode():
                for batch in self._batches:
                    stream.model.base_model(input_ids=batch.to(stream.device), use_cache=False)
        except _More:
            raise self._returns_more() from None
        except CODE_ERRORS as error:
            name, why = (
                stream.checkpoint.config.model_type,
                (str(error).strip() or type(error).__name__).splitlines()[0],
            )
            raise InputError(f"{name} cannot be run layer by layer: its own code says: {why}") from error
        finally:
            for layer, forward in zip(stream.layers, restore, strict=True):
                layer.forward = forward

    def _returns_more(self) -> InputError:
        name = self._stream.checkpoint.config.model_type
        return InputError(f"decoder layers of {name} return more than hidden states: not supported yet")

    @property
    def windows(self) -> int:
        """Windows of all batches."""
        return sum(len(batch) for batch in self._batches)

    def run_head(self, watch: DenseWatch) -> None:
        """Show the output projection what it reads after the last layer. What is outside must be loaded."""
        layers = list(self._stream.layers)
        restore = [layer.forward for layer in layers]
        head = self._stream.model.get_output_embeddings()
        now: list[Tensor] = []

        def stop(*_: Any) -> None:
            raise _Reached

        for layer in layers:
            layer.forward = lambda hidden_states, *args, **kwargs: now[0]
        with watch.watching():
            hook = head.register_forward_pre_hook(stop)  # after the watch's; the product itself is not asked for
            try:
                with torch.inference_mode():
                    for batch, hidden in zip(self._batches, self.hidden, strict=True):
                        now[:] = [hidden.to(self._stream.device)]
                        with suppress(_Reached):
                            self._stream.model(input_ids=batch.to(self._stream.device), use_cache=False)
                        watch.batch(len(batch))
            finally:
                hook.remove()
                for layer, forward in zip(layers, restore, strict=True):
                    layer.forward = forward

    def run_layer(
        self, index: int, progress: Callable[[int], None] = lambda tokens: None, watch: DenseWatch | None = None
    ) -> Observation | None:
        """Move every batch through a loaded layer; returns what its experts saw, or None for a layer without."""
        layer = self._stream.layers[index]
        has_experts = index in self._stream.expert_layers
        seen: list[tuple[Tensor, Tensor, Tensor]] = []
        module = self._stream.experts_module(index) if has_experts else None
        with watch.watching() if watch else nullcontext(), observing(module, seen), torch.inference_mode():
            for i, hidden in enumerate(self.hidden):
                arguments = {**self._arguments[(index, len(hidden))], **self._own.get((index, i), {})}
                out = layer(hidden.to(self._stream.device), **arguments)
                if not isinstance(out, Tensor):
                    raise self._returns_more()
                self.hidden[i] = out.to("cpu")
                if watch is not None:
                    watch.batch(len(hidden))
                progress(hidden.shape[0] * hidden.shape[1])
        if not has_experts:
            return None
        inputs, experts, gates = (torch.cat(parts) for parts in zip(*seen, strict=True))
        return Observation(inputs, experts, gates, self.length)


@contextmanager
def observing(module: Any, seen: list[tuple[Tensor, Tensor, Tensor]]) -> Iterator[None]:
    """Have an experts module append (inputs, experts, gates) of every call to `seen`; None observes nothing."""
    from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

    if module is None:
        yield
        return

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        seen.append(
            (
                hidden_states.to("cpu", copy=True),
                top_k_index.to("cpu", torch.int32),
                top_k_weights.to("cpu", torch.float32),
            )
        )
        out: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return out

    before = module.config._experts_implementation_internal
    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, forward)
    module.config._experts_implementation_internal = EXPERTS_IMPLEMENTATION
    try:
        yield
    finally:
        module.config._experts_implementation_internal = before
