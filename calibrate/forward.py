"""The calibration pass: every batch goes through one decoder layer, then through the next.

First the model runs with a recorder in place of each decoder layer. Recorders keep the embeddings' output and each
layer's keyword arguments (masks and rotary tables differ between layers). All windows have one length and no padding,
so batches of equal size share these arguments. Arguments that depend on the text, such as ids, are kept per batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import CODE_ERRORS, InputError, in_a_line

from .dense import DenseWatch
from .held import empty, release
from .products import widened
from .stream import StreamedModel

EXPERTS_IMPLEMENTATION = "moepack_observe"
Take = Callable[[Tensor, Tensor, Tensor], None]  # gets the inputs, experts and gates of a call


class _HiddenOnly(Tensor):
    """The hidden states that a recorder returns. A model that unpacks them expects more: this raises _ReturnsMore."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise _ReturnsMore


class _ReturnsMore(Exception):
    """Raised if decoder layers return more than hidden states."""


class _HeadReached(Exception):
    """Raised in place of computing the output projection."""


@dataclass(frozen=True)
class Observation:
    """What reached a layer's experts, tokens in the order of the windows."""

    inputs: Tensor  # [tokens, hidden], in the model's compute dtype
    experts: Tensor  # int32 [tokens, top_k], the experts that the router chose
    gates: Tensor  # float32 [tokens, top_k], the gates of these experts
    length: int  # tokens of a window


class CalibrationPass:
    """The activations of all batches between two layers, and the methods that take them through a layer."""

    def __init__(
        self,
        stream: StreamedModel,
        ids: Tensor,
        batch_size: int,
        dtype: torch.dtype,
        hidden_in: Path | None = None,
        seen_in: Path | None = None,
        reusing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`ids`: windows of token ids, int64 [windows, length]; `batch_size` windows go through a layer together.

        `hidden_in` and `seen_in` are folders for files that hold the next layer's inputs, and the inputs of a layer's
        experts; None keeps them in memory. `reusing` is a context for all batches of a layer after the first, which may
        reuse freed memory.
        """
        self._stream, self._dtype, self._reusing = stream, dtype, reusing
        self._hidden_in, self._seen_in = hidden_in, seen_in
        self.length = ids.shape[1]
        self._batches = list(ids.split(batch_size))
        # The next layer's inputs on the CPU, [batch, length, hidden_size] for each batch: views of one tensor, which
        # each layer overwrites.
        self.hidden: list[Tensor] = []
        self._arguments: dict[tuple[int, int], dict[str, Any]] = {}
        self._own: dict[tuple[int, int], dict[str, Any]] = {}  # (layer, batch) -> the batch's own arguments

    def start(self) -> None:
        """Embed every batch and record each layer's arguments. The part outside the layers must be loaded."""
        stream = self._stream
        same: dict[tuple[int, int], tuple[bool, Tensor]] = {}  # compared pairs of one batch: layers share tensors

        def is_same(a: Any, b: Any) -> bool:
            if isinstance(a, tuple) and isinstance(b, tuple):
                return len(a) == len(b) and all(map(is_same, a, b))
            if not (isinstance(a, Tensor) and isinstance(b, Tensor)) or a is b:
                return True
            if (id(a), id(b)) not in same:
                same[id(a), id(b)] = torch.equal(a, b), a
            return same[id(a), id(b)][0]

        self.hidden = []
        first, now = iter(range(len(self._batches))), [0]

        def recorder(index: int) -> Callable[..., Any]:
            def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if any(a is not None for a in args):
                    raise self._unsupported("take positional arguments")
                if index == 0:
                    now[0] = next(first)
                    self._keep(now[0], hidden_states)
                    same.clear()
                known = self._arguments.setdefault((index, len(hidden_states)), kwargs)
                if own := {n: v for n, v in kwargs.items() if not is_same(v, known.get(n))}:
                    self._own[index, now[0]] = own
                return hidden_states.as_subclass(_HiddenOnly)

            return forward

        with self._in_place_of_layers(recorder), torch.inference_mode(), self._own_code():
            for batch in self._batches:
                stream.model.base_model(input_ids=batch.to(stream.device), use_cache=False)

    @contextmanager
    def _in_place_of_layers(self, forward: Callable[[int], Callable[..., Any]]) -> Iterator[None]:
        """Call `forward(index)` in place of each decoder layer inside the context."""
        layers = list(self._stream.layers)
        kept = [layer.forward for layer in layers]
        for i, layer in enumerate(layers):
            layer.forward = forward(i)
        try:
            yield
        finally:
            for layer, own in zip(layers, kept, strict=True):
                layer.forward = own

    def _unsupported(self, what: str) -> InputError:
        name = self._stream.checkpoint.config.model_type
        return InputError(f"decoder layers of {name} {what}: not supported yet")

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        """Turn errors of the model's code into InputErrors."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except _ReturnsMore:
            raise self._unsupported("return more than hidden states") from None
        except CODE_ERRORS as error:
            name = self._stream.checkpoint.config.model_type
            what = f"{name} cannot be run layer by layer: its own code says: {in_a_line(error)}"
            raise InputError(what) from error

    def _keep(self, batch: int, hidden: Tensor) -> None:
        """Keep a batch's activations for the next layer."""
        if not self.hidden:
            shape = self.windows, self.length, hidden.shape[-1]
            whole = empty(shape, hidden.dtype, self._hidden_in)
            self.hidden = list(whole.split([len(b) for b in self._batches]))
        place = self.hidden[batch]
        if place.dtype == hidden.dtype and place.shape == hidden.shape:
            place.copy_(hidden)
            release(place)
        else:  # the layers of some families compute in several dtypes
            self.hidden[batch] = hidden.to("cpu")

    def restore(self, hidden: Iterable[Tensor]) -> None:
        """Take up kept activations, a tensor for each batch, as the next layer's inputs."""
        self.hidden = []
        for i, batch in enumerate(hidden):
            self._keep(i, batch)

    @property
    def windows(self) -> int:
        """Number of windows in all batches."""
        return sum(len(batch) for batch in self._batches)

    def run_head(self, watch: DenseWatch) -> None:
        """Pass the last layer's output to the watched output projection. The part outside the layers must be loaded."""
        head = self._stream.model.get_output_embeddings()
        now: list[Tensor] = []

        def stop(*_: Any) -> None:
            raise _HeadReached

        last = self._in_place_of_layers(lambda index: lambda hidden_states, *args, **kwargs: now[0])
        with last, watch.watching(), torch.inference_mode():
            hook = head.register_forward_pre_hook(stop)  # runs after the watch's hook and skips the product
            try:
                for batch, hidden in zip(self._batches, self.hidden, strict=True):
                    now[:] = [hidden.to(self._stream.device)]
                    with suppress(_HeadReached):
                        self._stream.model(input_ids=batch.to(self._stream.device), use_cache=False)
                    watch.batch(len(batch))
            finally:
                hook.remove()

    def run_layer(
        self, index: int, progress: Callable[[int], None] = lambda tokens: None, watch: DenseWatch | None = None
    ) -> Observation | None:
        """Run every batch through a loaded layer; returns what reached its experts, or None without experts."""
        layer = self._stream.layers[index]
        has_experts = index in self._stream.expert_layers
        buffer = _Buffer(self.windows * self.length, self._seen_in)
        module = self._stream.experts_module(index) if has_experts else None
        watching = watch.watching() if watch else nullcontext()
        with ExitStack() as rest, watching, observing(module, buffer.take), torch.inference_mode():
            for i, hidden in enumerate(self.hidden):
                if i == 1:  # by now `_keep` and `_Buffer` have allocated all that outlives the layer
                    rest.enter_context(self._reusing())
                arguments = {**self._arguments[(index, len(hidden))], **self._own.get((index, i), {})}
                mapped = self._stream.experts_in is not None
                with widened(self._stream.device, self._dtype, mapped), self._own_code():
                    out = layer(hidden.to(self._stream.device), **arguments)
                if not isinstance(out, Tensor):
                    raise self._unsupported("return more than hidden states")
                self._keep(i, out)
                if watch is not None:
                    watch.batch(len(hidden))
                progress(hidden.shape[0] * hidden.shape[1])
        return Observation(*buffer.whole(), self.length) if has_experts else None


class _Buffer:
    """Collect the inputs, experts and gates of a layer over its batches."""

    def __init__(self, tokens: int, folder: Path | None) -> None:
        self._tokens, self._folder, self._filled = tokens, folder, 0
        self._parts: tuple[Tensor, ...] = ()

    def take(self, inputs: Tensor, experts: Tensor, gates: Tensor) -> None:
        """Append a copy of a call's tensors."""
        if not experts.shape[1]:
            raise InputError("a layer's router chooses no expert: see the config's number of experts per token")
        if not self._parts:
            self._parts = (
                empty((self._tokens, inputs.shape[1]), inputs.dtype, self._folder),
                empty((self._tokens, experts.shape[1]), torch.int32),
                empty((self._tokens, gates.shape[1]), torch.float32),
            )
        end = self._filled + len(inputs)
        if end > self._tokens:
            raise InputError(f"a layer's experts were called with more than {self._tokens} tokens: not supported yet")
        for part, new in zip(self._parts, (inputs, experts, gates), strict=True):
            part[self._filled : end].copy_(new)
        release(self._parts[0])
        self._filled = end

    def whole(self) -> tuple[Tensor, Tensor, Tensor]:
        """The collected inputs, experts and gates."""
        inputs, experts, gates = self._parts
        return inputs[: self._filled], experts[: self._filled], gates[: self._filled]


@contextmanager
def observing(module: Any, take: Take) -> Iterator[None]:
    """Pass inputs, experts and gates of each call of an experts module to `take`; do nothing if `module` is None."""
    from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

    if module is None:
        yield
        return

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        take(hidden_states, top_k_index, top_k_weights)
        out: Tensor = grouped_mm_experts_forward(self, hidden_states, top_k_index, top_k_weights)
        return out

    before = module.config._experts_implementation_internal
    ExpertsInterface.register(EXPERTS_IMPLEMENTATION, forward)
    module.config._experts_implementation_internal = EXPERTS_IMPLEMENTATION
    try:
        yield
    finally:
        module.config._experts_implementation_internal = before
        ExpertsInterface.register(EXPERTS_IMPLEMENTATION, grouped_mm_experts_forward)  # drops the reference to `take`
