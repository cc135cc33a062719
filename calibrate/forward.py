"""The calibration pass: every batch through one decoder layer, then the next layer.

Before the first layer, one run of the model with every decoder layer replaced by a recorder gives the embeddings'
output and the keyword arguments that each layer is called with (masks and rotary tables differ between layers of a
model). All windows have one length and no padding, so one set of arguments serves all batches of a size, but for those
that come from the text (the ids, where a layer routes by them), which are kept for each batch.
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
Take = Callable[[Tensor, Tensor, Tensor], None]  # inputs, experts and gates of a call


class _HiddenOnly(Tensor):
    """Hidden states that a decoder layer returns, and nothing beside them: a model that expects more is told so."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __iter__(self) -> Any:
        raise _ReturnsMore


class _ReturnsMore(Exception):
    """A decoder layer returns more than hidden states."""


class _HeadReached(Exception):
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
        hidden: the input of the next layer, one tensor [batch, length, hidden_size] a batch, on the CPU: parts of one
            tensor, which each layer's output takes over.
    """

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
        """
        Args:
            stream: the model.
            ids: int64 [windows, length].
            batch_size: windows that go through a layer together.
            dtype: what to compute with.
            hidden_in, seen_in: folders whose disk holds what goes into the next layer, and what a layer's experts
                saw; None is in memory.
            reusing: what a layer's batches but for the first are run in: a batch may take the memory that the one
                before freed.
        """
        self._stream, self._dtype, self._reusing = stream, dtype, reusing
        self._hidden_in, self._seen_in = hidden_in, seen_in
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

        self.hidden = []
        first, now = iter(range(len(self._batches))), [0]

        def recorder(index: int) -> Callable[..., Any]:
            def forward(hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                if any(a is not None for a in args):
                    name = stream.checkpoint.config.model_type
                    raise InputError(f"decoder layers of {name} take positional arguments: not supported yet")
                if index == 0:
                    now[0] = next(first)
                    self._keep(now[0], hidden_states)
                    same.clear()
                known = self._arguments.setdefault((index, len(hidden_states)), kwargs)
                if own := {n: v for n, v in kwargs.items() if not is_same(v, known.get(n))}:
                    self._own[index, now[0]] = own
                return hidden_states.as_subclass(_HiddenOnly)

            return forward

        for i, layer in enumerate(stream.layers):
            restore.append(layer.forward)
            layer.forward = recorder(i)
        try:
            with torch.inference_mode():
                for batch in self._batches:
                    stream.model.base_model(input_ids=batch.to(stream.device), use_cache=False)
        except _ReturnsMore:
            raise self._returns_more() from None
        except torch.OutOfMemoryError:
            raise
        except CODE_ERRORS as error:
            raise self._own_code(error) from error
        finally:
            for layer, forward in zip(stream.layers, restore, strict=True):
                layer.forward = forward

    def _returns_more(self) -> InputError:
        name = self._stream.checkpoint.config.model_type
        return InputError(f"decoder layers of {name} return more than hidden states: not supported yet")

    def _own_code(self, error: Exception) -> InputError:
        name = self._stream.checkpoint.config.model_type
        return InputError(f"{name} cannot be run layer by layer: its own code says: {in_a_line(error)}")

    def _keep(self, batch: int, hidden: Tensor) -> None:
        """Put a batch's activations where they stay until the next layer."""
        if not self.hidden:
            shape = self.windows, self.length, hidden.shape[-1]
            whole = empty(shape, hidden.dtype, self._hidden_in)
            self.hidden = list(whole.split([len(b) for b in self._batches]))
        place = self.hidden[batch]
        if place.dtype == hidden.dtype and place.shape == hidden.shape:
            place.copy_(hidden)
            release(place)
        else:  # of a family whose layers compute in more than one dtype
            self.hidden[batch] = hidden.to("cpu")

    def restore(self, hidden: Iterable[Tensor]) -> None:
        """Go on from activations that were kept, a tensor a batch."""
        self.hidden = []
        for i, batch in enumerate(hidden):
            self._keep(i, batch)

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
            raise _HeadReached

        for layer in layers:
            layer.forward = lambda hidden_states, *args, **kwargs: now[0]
        with watch.watching():
            hook = head.register_forward_pre_hook(stop)  # after the watch's; the product itself is not asked for
            try:
                with torch.inference_mode():
                    for batch, hidden in zip(self._batches, self.hidden, strict=True):
                        now[:] = [hidden.to(self._stream.device)]
                        with suppress(_HeadReached):
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
        buffer = _Buffer(self.windows * self.length, self._seen_in)
        module = self._stream.experts_module(index) if has_experts else None
        watching = watch.watching() if watch else nullcontext()
        with ExitStack() as rest, watching, observing(module, buffer.take), torch.inference_mode():
            for i, hidden in enumerate(self.hidden):
                if i == 1:  # `_keep` and `_Buffer` have allocated what outlives the layer
                    rest.enter_context(self._reusing())
                arguments = {**self._arguments[(index, len(hidden))], **self._own.get((index, i), {})}
                with widened(self._stream.device, self._dtype, mapped=self._stream.experts_in is not None):
                    try:
                        out = layer(hidden.to(self._stream.device), **arguments)
                    except torch.OutOfMemoryError:
                        raise
                    except CODE_ERRORS as error:
                        raise self._own_code(error) from error
                if not isinstance(out, Tensor):
                    raise self._returns_more()
                self._keep(i, out)
                if watch is not None:
                    watch.batch(len(hidden))
                progress(hidden.shape[0] * hidden.shape[1])
        return Observation(*buffer.whole(), self.length) if has_experts else None


class _Buffer:
    """Collects inputs, experts and gates of a layer, batch by batch."""

    def __init__(self, tokens: int, folder: Path | None) -> None:
        self._tokens, self._folder, self._filled = tokens, folder, 0
        self._parts: tuple[Tensor, ...] = ()

    def take(self, inputs: Tensor, experts: Tensor, gates: Tensor) -> None:
        """Copy one call's tensors."""
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
        """All that was taken."""
        inputs, experts, gates = (part[: self._filled] for part in self._parts)
        return inputs, experts, gates


@contextmanager
def observing(module: Any, take: Take) -> Iterator[None]:
    """Have an experts module hand inputs, experts and gates of every call to `take`; None observes nothing."""
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
        ExpertsInterface.register(EXPERTS_IMPLEMENTATION, grouped_mm_experts_forward)  # and let go of what was taken
