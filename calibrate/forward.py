"""The calibration pass: every batch goes through one decoder layer, then through the next.

First the model runs with a recorder in place of each decoder layer (trace.py). Kept are the embeddings' output and each
layer's arguments: masks and rotary tables differ between layers. All windows have one length and no padding, so batches
of equal size share these arguments. Arguments that depend on the text, such as ids, are kept per batch, as is what
layers pass on beside hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from moepack.pack.errors import CODE_ERRORS, InputError, NotFiniteError, in_a_line

from .dense import DenseWatch
from .finite import not_finite
from .held import empty, release
from .products import widened
from .stream import StreamedModel
from .trace import (
    MOST,
    Arguments,
    Passed,
    Program,
    Recording,
    ReturnsMore,
    Unsupported,
    outputs_of,
    same,
    split,
)

if TYPE_CHECKING:
    from moepack.families.interface import ExpertsModule

EXPERTS_IMPLEMENTATION = "moepack_observe"
Take = Callable[[Tensor, Tensor, Tensor], None]  # gets the inputs, experts and gates of a call


class _HeadReached(Exception):
    """Raised in place of computing the output projection."""


@dataclass(frozen=True)
class Observation:
    """The inputs and routing of a layer's experts, with tokens in the order of the windows."""

    inputs: Tensor  # [tokens, hidden], in the model's compute dtype
    experts: Tensor  # int32 [tokens, top_k], the experts that the router chose; a number past the last: none
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
        self._stream = stream
        self._dtype = dtype
        self._reusing = reusing
        self._hidden_in = hidden_in
        self._seen_in = seen_in
        self.length = ids.shape[1]
        self._batches = list(ids.split(batch_size))
        # The next layer's inputs on the CPU, [batch, length, hidden_size] for each batch: views of one tensor, which
        # each layer overwrites.
        self.hidden: list[Tensor] = []
        self._arguments: dict[tuple[int, int], Arguments] = {}  # (step, windows) -> its arguments
        self._own: dict[tuple[int, int], Arguments] = {}  # (step, batch) -> the batch's own arguments
        self._program: Program | None = None
        self._passed = [Passed() for _ in self._batches]

    def start(self) -> None:
        """Embed every batch and record each layer's arguments. The part outside the layers must be loaded."""
        self.hidden = []
        self._program = None
        self._passed = [Passed() for _ in self._batches]
        with torch.inference_mode(), self._own_code():
            for i in range(len(self._batches)):
                recording = self._record(i)
                if self._program is None:
                    self._program = Program(recording)
                elif not self._program.same_as(recording):
                    raise Unsupported("are called in another way for another text")
                self._keep_arguments(i, recording)

    def _record(self, batch: int) -> Recording:
        """Run a batch with recorders in place of the layers, and keep the embeddings' output."""

        def at(index: int, hidden: Tensor) -> None:
            if not index:
                self._check(hidden, batch, "what goes into layer 0")
                self._keep(batch, hidden)

        first = self._program.outputs if self._program else 1
        for outputs in range(first, MOST + 1):
            recording = Recording(outputs)
            try:
                self._run(batch, recording, at)
                break
            except (ReturnsMore, ValueError) as error:  # ValueError: "not enough values to unpack"
                if outputs == MOST or (not isinstance(error, ReturnsMore) and "unpack" not in str(error)):
                    raise
        if len(Program(recording).at) != len(self._stream.layers):
            raise Unsupported("are not all called")
        return recording

    def _run(self, batch: int, recording: Recording, at: Callable[[int, Tensor], object]) -> None:
        def recorder(index: int) -> Callable[..., object]:
            def forward(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
                at(index, hidden_states)
                return recording.layer(index, hidden_states, args, kwargs)

            return forward

        with self._in_place_of_layers(recorder):
            self._stream.model.base_model(input_ids=self._batches[batch].to(self._stream.device), use_cache=False)

    def _keep_arguments(self, batch: int, recording: Recording) -> None:
        """Keep the arguments of a batch's steps: once for all batches of its size, where they are the same."""
        compared: dict[tuple[int, int], tuple[bool, Tensor]] = {}  # pairs of this batch: layers share tensors

        def equal(a: Tensor, b: Tensor) -> bool:
            if (id(a), id(b)) not in compared:
                compared[id(a), id(b)] = a.shape == b.shape and torch.equal(a, b), a
            return compared[id(a), id(b)][0]

        for step, given in enumerate(recording.arguments[: self._recorded.at[-1] + 1]):
            known = self._arguments.setdefault((step, len(self._batches[batch])), given)
            if own := {n: v for n, v in given.items() if not same(v, known.get(n), equal)}:
                self._own[step, batch] = own

    def _given(self, step: int, batch: int) -> Arguments:
        return {**self._arguments[step, len(self._batches[batch])], **self._own.get((step, batch), {})}

    @contextmanager
    def _in_place_of_layers(self, forward: Callable[[int], Callable[..., object]]) -> Iterator[None]:
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
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except ReturnsMore:
            raise self._unsupported("return more than hidden states") from None
        except Unsupported as error:
            raise self._unsupported(str(error)) from None
        except CODE_ERRORS as error:
            name = self._stream.checkpoint.config.model_type
            what = f"{name} cannot be run layer by layer: its own code says: {in_a_line(error)}"
            raise InputError(what) from error

    def _keep(self, batch: int, hidden: Tensor) -> None:
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

    def _check(self, hidden: Tensor, batch: int, what: str) -> None:
        """Raise NotFiniteError if a batch's activations [windows, length, hidden_size] are not finite."""
        found = not_finite(hidden)
        if found is None:
            return
        (window, token, *_), value = found
        at = f"in window {sum(len(b) for b in self._batches[:batch]) + window} of the calibration text, token {token}"
        raise NotFiniteError(f"{self._stream.checkpoint.name}: {what}", f"is {value:g} {at}: {_remedy(self._dtype)}")

    def kept(self) -> dict[str, Tensor]:
        """Return the next layer's inputs by name: each batch's activations, and other values that layers pass on."""
        out = {f"{i:06d}": hidden for i, hidden in enumerate(self.hidden)}
        return out | {f"{i:06d}.{n}": x for i, passed in enumerate(self._passed) for n, x in passed.named().items()}

    def restore(self, kept: Iterable[tuple[str, Tensor]]) -> None:
        """Use items that `kept` returned earlier, sorted by name, as the next layer's inputs."""
        self.hidden = []
        self._passed = [Passed() for _ in self._batches]
        for name, tensor in kept:
            batch, _, rest = name.partition(".")
            if rest:
                self._passed[int(batch)].put(rest, tensor)
            else:
                self._keep(int(batch), tensor)

    @property
    def windows(self) -> int:
        """Number of windows in all batches."""
        return sum(len(batch) for batch in self._batches)

    def fork(self, source: int, batch: int) -> None:
        """Give a batch the activations of another batch of the same text."""
        self._keep(batch, self.hidden[source])
        self._passed[batch] = self._passed[source].copy()

    def run_batches(self, index: int, batches: Iterable[int]) -> None:
        """Run some batches through a loaded layer, unobserved."""
        module = self._stream.experts_module(index) if index in self._stream.expert_layers else None
        with observing(module, lambda *_: None), torch.inference_mode():
            for i in batches:
                self._through(index, i)

    def head_inputs(self, batch: int) -> Tensor:
        """Return a batch's inputs of the output projection, [batch, length, hidden_size] on the device.

        The part outside the layers must be loaded.
        """
        found: list[Tensor] = []
        with torch.inference_mode(), self._own_code():
            self._run_to_head(batch, found.append)
        return found[0]

    def run_head(self, watch: DenseWatch) -> None:
        """Pass the last layer's output to the watched output projection. The part outside the layers must be loaded."""
        with watch.watching(), torch.inference_mode(), self._own_code():
            for i, batch in enumerate(self._batches):
                self._run_to_head(i, lambda inputs: None)
                watch.batch(len(batch))

    def _run_to_head(self, batch: int, take: Callable[[Tensor], None]) -> None:
        """Go on from the last layer's outputs; give `take` the output projection's inputs, and skip its product."""

        def stop(_: object, args: tuple[Tensor, ...]) -> None:
            take(args[0])
            raise _HeadReached

        # Runs after the hooks that are there, as a watch's.
        hook = self._stream.model.get_output_embeddings().register_forward_pre_hook(stop)
        try:
            with suppress(_HeadReached), self._in_place_of_layers(self._after_layers(batch)):
                self._stream.model(input_ids=self._batches[batch].to(self._stream.device), use_cache=False)
        finally:
            hook.remove()

    def _after_layers(self, batch: int) -> Callable[[int], Callable[..., object]]:
        """Return the layers' replacements, by index, so that the model continues from the last layer's outputs."""
        program = self._recorded
        device = self._stream.device
        values = {n: x.to(device) for n, x in self._passed[batch].values.items()}
        hidden = self.hidden[batch].to(device)
        recording = Recording(program.outputs, values | {program.steps[program.at[-1]].made[0]: hidden})

        def at(index: int) -> Callable[..., object]:
            def forward(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
                out = recording.layer(index, hidden, args, kwargs)
                if not program.same_as(recording):  # its nodes would have other numbers
                    raise Unsupported("are called in another way before the output projection")
                return out

            return forward

        return at

    @property
    def _recorded(self) -> Program:
        assert self._program is not None, "start() comes first"
        return self._program

    def run_layer(
        self, index: int, progress: Callable[[int], None] = lambda tokens: None, watch: DenseWatch | None = None
    ) -> Observation | None:
        """Run every batch through a loaded layer; returns what reached its experts, or None without experts."""
        has_experts = index in self._stream.expert_layers
        buffer = _Buffer(self.windows * self.length, self._seen_in)
        module = self._stream.experts_module(index) if has_experts else None
        watching = watch.watching() if watch else nullcontext()
        with ExitStack() as rest, watching, observing(module, buffer.take), torch.inference_mode():
            for i, hidden in enumerate(self.hidden):
                if i == 1:  # by now `_keep` and `_Buffer` have allocated all that outlives the layer
                    rest.enter_context(self._reusing())
                self._through(index, i)
                if watch is not None:
                    watch.batch(len(hidden))
                progress(hidden.shape[0] * hidden.shape[1])
        return Observation(*buffer.whole(), self.length) if has_experts else None

    def _through(self, index: int, batch: int) -> None:
        """Run a batch through a layer and the operations behind it; keep what goes into the next layer."""
        program = self._recorded
        passed = self._passed[batch]
        device = self._stream.device
        at = program.at[index]
        given, stores = passed.resolve(self._given(at, batch) | {0: None}, passed.values, device)
        args, kwargs = split(given | {0: self.hidden[batch].to(device)})
        mapped = self._stream.experts_in is not None
        with widened(device, self._dtype, mapped), self._own_code():
            out = self._stream.layers[index](*args, **kwargs)
            if isinstance(out, Tensor) != program.steps[at].whole or program.outputs not in (1, len(out)):
                raise Unsupported("return more than hidden states")
            passed.fill(stores)
            values = passed.values | dict(outputs_of(program.steps[at], out))
            for i in program.between(index):
                step = program.steps[i]
                args, kwargs = split(passed.resolve(self._given(i, batch), values, device)[0])
                assert step.function is not None
                values |= outputs_of(step, step.function(*args, **kwargs))
        following = program.hidden[index + 1] if index + 1 < len(program.at) else program.steps[at].made[0]
        self._check(values[following], batch, f"what layer {index} makes")
        self._keep(batch, values[following])
        needed = program.needed(values, index)
        if index + 1 == len(program.at):
            needed.pop(following, None)  # it is kept as hidden states
        passed.values = {n: x.to("cpu") if isinstance(x, Tensor) else x for n, x in needed.items()}


def _remedy(dtype: torch.dtype) -> str:
    if dtype == torch.float16:
        return "FP16 ends at 65,504: calibrate in bfloat16 or float32"
    if dtype == torch.bfloat16:
        return "its numbers are too large for this computation: try calibration: {dtype: float32}"
    return "its weights make numbers beyond float32: the checkpoint is damaged, or never worked"


class _Buffer:
    def __init__(self, tokens: int, folder: Path | None) -> None:
        self._tokens = tokens
        self._folder = folder
        self._filled = 0
        self._parts: tuple[Tensor, ...] = ()

    def take(self, inputs: Tensor, experts: Tensor, gates: Tensor) -> None:
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
        inputs, experts, gates = self._parts
        return inputs[: self._filled], experts[: self._filled], gates[: self._filled]


@contextmanager
def observing(module: ExpertsModule | None, take: Take) -> Iterator[None]:
    """Pass inputs, experts and gates of each call of an experts module to `take`; do nothing if `module` is None."""
    from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

    if module is None:
        yield
        return

    def forward(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
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
