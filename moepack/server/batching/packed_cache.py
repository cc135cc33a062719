"""Sequences packed into one forward pass without padding: their KV caches, and attention within each sequence.

A pass reads [1, tokens]: some tokens of every running sequence, one after another. A row is one sequence's cache. Only
attention combines tokens, and each sequence attends to its own row alone, so others do not change its result.

On a GPU a pass of one token of each row finds them by a table (row_table.py): the same launches for any rows.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.masking_utils import AttentionMaskInterface

from moepack.families.arguments import unknown_to_attention
from moepack.runtime.experts import backends
from moepack.runtime.kernels.by_torch import attend_by_groups
from moepack.runtime.kv.forms import PLAIN, Bits
from moepack.runtime.kv.growing import as_given, coded
from moepack.runtime.step.context import PackedCache, Step, current, opened
from moepack.server.options import UNLIMITED

from .prefix_files import PrefixFiles
from .prefixes import CHUNK, STATES, Chunk, Prefixes, copied, size_of
from .row_table import END, ROOM, RowTable, Where, where

if TYPE_CHECKING:
    from moepack.runtime.dense.latent import Latents  # which needs the compiled kernels

Some = TypeVar("Some")
NAME = "moepack_rows"  # packed attention's name in transformers' registry
GRAIN = 32  # a row has room (allocated memory) for a multiple of this many tokens
# Kinds of layers: those of the last four keep a state of fixed size, or nothing
KINDS = {"full_attention", "sliding_attention", "linear_attention", "conv", "moe", "mlp"}
FEW = 16  # new tokens up to which the kernel attends, which reads keys where they lie; with sinks it always does
AHEAD = 64  # when a row grows: the least tokens of room beyond the need


class NotPackable(Exception):
    """The model uses its cache in a way that packed attention does not support."""


@dataclass(slots=True, eq=False)
class _LayerCache:
    """One layer of a row: keys and values (or a latent's two parts), [1, heads, room, dim], valid up to `end`."""

    keys: Tensor | None = None
    values: Tensor | None = None
    end: int = 0


@dataclass(slots=True, eq=False, weakref_slot=True)
class SequenceCache:
    """A row: one sequence's cache."""

    layers: list[_LayerCache]  # keys and values by layer
    wanted: int = 0  # the least room, in tokens, that the row's first pass allocates
    most: int = UNLIMITED  # tokens that the sequence has at its end
    keys: tuple[bytes, ...] = ()  # the prompt's `chunk_keys`
    length: int = 0  # cached tokens
    room: int = 0  # tokens for which the layers without a window have memory
    where: Where | None = None  # where its layers lie, as the last pass by a table has written it
    states: Cache | None = None  # of the layers that keep a state of fixed size, if the model has such layers
    # After how many chunks other prompts may go on in another way: states are worth keeping there.
    ends: set[int] = field(default_factory=set)

    def get_seq_length(self) -> int:
        """Cached tokens, under the name that transformers' caches use."""
        return self.length

    def room_for(self, tokens: int) -> int:
        """Return the room, in tokens, of a row that holds `tokens`.

        It grows ahead of need, so that few passes copy, but not beyond the sequence's end.
        """
        if tokens <= self.room:
            return self.room
        ahead = tokens + max(AHEAD, tokens // 8) if self.room else self.wanted
        return in_grains(max(tokens, min(ahead, self.most)))


def in_grains(tokens: int) -> int:
    """Round a number of tokens up to what a row may have room for."""
    return -(-tokens // GRAIN) * GRAIN


class Alike(NamedTuple):
    """Tensors of a row that grow alike, such as the keys of all layers."""

    tensors: int
    token: int  # bytes of each, a token
    window: int | None = None  # tokens

    def bytes(self, room: int, step: int) -> int:
        """Bytes of one of them in a row with room for `room` tokens, if passes read at most `step` tokens."""
        return self.token * (room if self.window is None else min(room, self.window - 1 + step))


@dataclass(frozen=True, slots=True)
class CacheShape:
    """How many bytes a row takes."""

    tensors: tuple[Alike, ...]
    fixed: int = 0  # bytes of states, which do not grow

    @property
    def full(self) -> int:
        """Bytes a token in all layers without a window."""
        return sum(alike.tensors * alike.token for alike in self.tensors if alike.window is None)

    def bytes(self, room: int, step: int) -> int:
        """Bytes of a row with room for `room` tokens, if passes read at most `step` tokens."""
        grown = sum(alike.tensors * alike.bytes(room, step) for alike in self.tensors)
        return grown + (self.fixed if room else 0)

    def copied(self, before: int, room: int, step: int) -> int:
        """Bytes of the largest tensor that lies in memory twice when a row's room becomes `room`, from `before`.

        Layers with a window move their keys and values to the beginning in rows that do not grow as well.
        """
        moved = (alike.bytes(before, step) for alike in self.tensors if room > before or alike.window is not None)
        return max(moved, default=0)


@dataclass(slots=True, eq=False)
class CacheSlot:
    """One sequence's cache in the engine, which a removed sequence lets go: policies hear of its end by that."""

    cache: Any = None  # a `SequenceCache` if passes are packed, else transformers' own, made in the first pass
    length: int = 0  # cached tokens


@dataclass(frozen=True, slots=True)
class StepInput:
    """The tokens that one step reads of one sequence."""

    slot: CacheSlot  # the sequence's cache
    tokens: Sequence[int]  # the sequence's next token ids
    wanted: int = 1  # how many of the last tokens need logits; 0 for none
    is_prompt: bool = False  # whether the tokens belong to a prompt
    taken: int = 0  # tokens before them that are copied from kept chunks (`Engine.kept_ahead`)
    keeps: int = 0  # the most chunks that are kept of those of the prompt that the step completes

    @property
    def row(self) -> SequenceCache:
        """The sequence's row, if passes are packed."""
        row: SequenceCache = self.slot.cache
        return row

    @property
    def count(self) -> int:
        """How many tokens are read."""
        return len(self.tokens)

    @property
    def start(self) -> int:
        """Tokens of the sequence before those that are read."""
        return self.slot.length + self.taken

    @property
    def end(self) -> int:
        """Tokens of the sequence after the step."""
        return self.start + self.count

    @property
    def room(self) -> int:
        """The row's room after the step."""
        return self.row.room_for(self.end)


@dataclass(frozen=True, slots=True)
class _PassPart:
    """A row's part of the running pass."""

    of: StepInput
    span: slice  # where its tokens are in the pass
    room: int  # the row's room after the pass
    chunks: list[Chunk]  # the kept chunks at its prompt's beginning, if it takes some
    begins: Chunk | None  # the kept states with which it begins, if it takes some
    new: range  # the chunks of its prompt that are kept after the pass
    states: dict[int, dict[int, tuple[Tensor, ...]]]  # by number of its prompt's chunks: the states by layer after them


# Tokens of one row, and after how many chunks of its prompt they end, if the states are kept there.
_Piece = tuple[slice, _PassPart, int | None]


class PackedKvCache(Cache, PackedCache):
    """The caches of all packed sequences (`rows`) behind the interface of transformers' caches.

    The KV budget (runtime/residency/kv_reserve.py) reads `held_bytes` and `needed`; policies read `sequences`.
    """

    attention = NAME

    def __init__(
        self,
        windows: Sequence[int | None],
        shape: CacheShape | None,
        step: int,
        most_kept: int = 0,
        table: RowTable | None = None,
        states: Callable[[], Cache] | None = None,
        bits: Sequence[Bits] = (),
        files: PrefixFiles | None = None,
    ) -> None:
        """Start empty. `windows`: attention windows by layer, tokens, None for full; `step`: the most tokens a pass.

        `most_kept` is the most bytes of kept chunks; 0 unless every layer is full. `table` is the model's, on a GPU.
        `states` makes a sequence's cache of states, if some layers keep one. `bits` are those of each layer's keys and
        values; empty for plain ones. Kept chunks are written to `files`.
        """
        layers: list[Any] = [_Layer(self, n) for n in range(len(windows))]
        super().__init__(layers=layers)
        self.windows = tuple(windows)
        self.shape = shape
        self.step = step
        self.rows: list[SequenceCache] = []
        self.prefixes = Prefixes(most_kept, self._chunk_bytes(shape), shape.fixed if shape else 0)
        self.began = False  # whether the last pass has written into rows
        self._parts: list[_PassPart] = []
        self._runs: list[list[_Piece]] = []  # what layers with states run at once
        self._passed: list[tuple[Tensor, Tensor] | None] = [None] * len(windows)
        self._table = table
        self._states = states
        self._files = files
        self._bits = tuple(bits) or ((PLAIN, PLAIN),) * len(windows)
        self._written = False
        self.table: RowTable | None = None  # where the running pass finds its rows, if it does so by a table

    # --- rows

    def add(self, wanted: int, keys: tuple[bytes, ...] = (), most: int = UNLIMITED) -> SequenceCache:
        """Add an empty sequence; its first pass makes room for `wanted` tokens, its last for no more than `most`.

        `keys` are its prompt's chunk keys.
        """
        states = self._states() if self._states is not None else None
        row = SequenceCache([_LayerCache() for _ in self.windows], wanted, most, keys, states=states)
        if states is not None:
            row.ends.add(len(self.found(keys)))
            for other in self.rows:
                alike = sum(1 for _ in itertools.takewhile(bool, map(operator.eq, keys, other.keys)))
                row.ends.add(alike)
                other.ends.add(alike)
        self.rows.append(row)
        return row

    def found(self, keys: tuple[bytes, ...]) -> list[Chunk]:
        """Return the kept chunks at the beginning of a prompt, those in files too."""
        found = self.prefixes.find(keys)
        if self._files is not None:
            self._files.take(keys, found, self.prefixes)
        return found

    def remove(self, row: SequenceCache) -> None:
        """Remove a sequence and free its memory."""
        self.rows.remove(row)
        row.layers = []
        row.states = None

    @property
    def held_bytes(self) -> int:
        """Bytes of all rows and kept chunks; during a pass, what they may reach in it."""
        return self.after([part.of for part in self._parts])

    def after(self, inputs: Sequence[StepInput], kept: bool = True) -> int:
        """Return the peak bytes of all rows, and of kept chunks if these are `kept`, in a pass with these inputs."""
        grown = [(one.row.room, one.room) for one in inputs]
        size = sum(self._bytes(row.room) for row in self.rows)
        size += sum(self._bytes(room) - self._bytes(before) for before, room in grown)
        if self.shape is not None:
            size += max((self.shape.copied(before, room, self.step) for before, room in grown), default=0)
        if kept:
            new = self._chunk_bytes(self.shape) * sum(len(self.new_chunks(one)) for one in inputs)
            size += min(self.prefixes.bytes + new, max(self.prefixes.bytes, self.prefixes.most))
            if self.shape is not None:  # states are copied in the pass, before others leave
                size += self.shape.fixed * sum(len(self.new_states(one)) for one in inputs)
        return size

    def _bytes(self, room: int) -> int:
        return self.shape.bytes(room, self.step) if self.shape else 0

    @staticmethod
    def _chunk_bytes(shape: CacheShape | None) -> int:
        """Bytes of a kept chunk: of its token ids alone if no layer keeps keys and values; 0 if unknown."""
        return CHUNK * (shape.full or 8) if shape else 0

    def new_chunks(self, one: StepInput) -> range:
        """Return which of a prompt's chunks a pass completes and keeps, by their place in the prompt, from 0."""
        first = one.start // CHUNK
        whole = min(len(one.row.keys), one.end // CHUNK)
        if first >= whole or not one.keeps:
            return range(0)
        have = len(self.prefixes.find(one.row.keys))
        return range(have, min(whole, have + one.keeps, self.prefixes.most_chunks) if first <= have else have)

    def new_states(self, one: StepInput) -> list[int]:
        """Return after how many chunks of a prompt a pass keeps the states, in ascending order.

        These are its last chunk, those after which other prompts go on in another way, and some so far apart that their
        states take no more bytes than the keys and values between.
        """
        row = one.row
        if row.states is None or not one.keeps or one.start >= CHUNK * len(row.keys):
            return []
        found = self.prefixes.find(row.keys)
        whole = max(len(found), self.new_chunks(one).stop)
        ends = {*row.ends, min(len(row.keys), self.prefixes.most_chunks)}
        if self.prefixes.state_bytes and self.prefixes.chunk_bytes:
            ends.update(range(0, whole + 1, -(-self.prefixes.state_bytes // self.prefixes.chunk_bytes)))
        inside = (n for n in sorted(ends) if one.start < n * CHUNK <= one.end and n <= whole)
        return [n for n in inside if n > len(found) or self.prefixes.states(found[n - 1]) is None][-one.keeps :]

    def needed(self) -> tuple[int, int]:
        """Return the peak bytes of rows and kept chunks in this pass, and the final length of its longest row."""
        return self.held_bytes, max((part.of.end for part in self._parts), default=0)

    def sequences(self) -> list[tuple[SequenceCache, int, bool]]:
        """The rows of this pass, each with the number of tokens read and whether they are a prompt's."""
        return [(part.of.row, part.of.count, part.of.is_prompt) for part in self._parts]

    @contextmanager
    def passing(self, inputs: Sequence[StepInput]) -> Iterator[None]:
        """Enclose a pass with these inputs in order.

        If the pass fails once `began` is set, its rows are invalid.
        """
        start = 0
        self.began = False
        for one in inputs:
            span = slice(start, start + one.count)
            start = start + one.count
            chunks = self.prefixes.find(one.row.keys) if one.taken else []
            assert not one.taken or one.start <= CHUNK * len(chunks), "a chunk left after the pass was planned"
            begins = None
            if one.taken and one.row.states is not None:
                begins = self.prefixes.states(chunks[one.start // CHUNK - 1])
                assert begins is not None and one.start % CHUNK == 0, "states left after the pass was planned"
            kept: dict[int, dict[int, tuple[Tensor, ...]]] = {n: {} for n in self.new_states(one)}
            part = _PassPart(one, span, one.room, chunks, begins, self.new_chunks(one), kept)
            self._parts.append(part)
            self._cut(part)
        made = self._table
        if made is not None and len(inputs) <= made.sequences:
            self.table = made if all(x.count == 1 and x.row.length and not x.taken for x in inputs) else None
        try:
            with opened(Step(packed=self)):
                yield
            for part in self._parts:
                self._keep(part)
                part.of.row.length = part.of.end
                part.of.row.room = part.room
        finally:
            self._parts = []
            self._runs = []
            self._passed = [None] * len(self.windows)
            self.table = None
            self._written = False

    def _cut(self, part: _PassPart) -> None:
        """Add a row's tokens to what layers with states run at once: those before kept states run before the others."""
        start = part.span.start
        offset = start - part.of.start
        pieces: list[_Piece] = []
        for n in part.states:
            pieces.append((slice(start, offset + n * CHUNK), part, n))
            start = offset + n * CHUNK
        if start < part.span.stop:
            pieces.append((slice(start, part.span.stop), part, None))
        for n, piece in enumerate(pieces):
            if n or not self._runs:
                self._runs.append([piece])
            else:
                self._runs[-1].append(piece)

    def _keep(self, part: _PassPart) -> None:
        """Keep copies of the chunks and states that a pass has completed: no more than its claim counts."""
        row = part.of.row
        if not part.new and not part.states:
            return
        if row.states is not None:
            self.prefixes.state_bytes = size_of(dict(enumerate(map(_states_of, row.states.layers))))
        found = self.prefixes.find(row.keys)
        for n in range(len(found), part.new.stop):
            at = slice(n * CHUNK, (n + 1) * CHUNK)
            held = {n: (x.keys, x.values) for n, x in enumerate(row.layers) if x.keys is not None}
            layers = {n: (keys[:, :, at], _given(values)[:, :, at]) for n, (keys, values) in held.items()}
            if not self.prefixes.add(found, row.keys[n], layers):
                break
            if self._files is not None:
                self._files.keep(row.keys[: n + 1], found[-1])
        for n, states in part.states.items():
            whole = row.states is not None and len(states) == sum(map(bool, map(_states_of, row.states.layers)))
            made = self.prefixes.add_states(found, n, states) if whole and n <= len(found) else None
            if made is not None and self._files is not None:
                self._files.keep((*row.keys[:n], STATES), made)

    # --- what models call

    def by_row(self, layer: int, device: torch.device) -> list[list[tuple[slice, Cache]]]:
        """Return where rows' tokens are in the pass, and their states, which a layer changes; put kept ones there."""
        if any(part.of.row.states is None for part in self._parts):
            self.refuse("a layer keeps a state of which its configuration says nothing")
        self.began = True
        for part in self._parts:
            if part.begins is not None:
                held: Any = _given(part.of.row.states).layers[layer]
                kept = [t.to(device) for t in part.begins.layers[layer]]
                for n, (window, state) in enumerate(zip(kept[::2], kept[1::2], strict=True)):
                    if window.numel():
                        held.update_conv_state(window, state_idx=n)
                    if state.numel():
                        held.update_recurrent_state(state, state_idx=n)
        return [[(span, _given(part.of.row.states)) for span, part, _ in run] for run in self._runs]

    def ran(self, layer: int, number: int) -> None:
        """Copy the states that are kept after list `number` of `by_row`."""
        for _, part, end in self._runs[number]:
            if end is not None:
                made = copied({layer: _states_of(_given(part.of.row.states).layers[layer])})
                part.states[end].update(made or {})

    def refuse(self, why: str) -> NoReturn:
        """Raise NotPackable."""
        raise NotPackable(why)

    def get_conv_state(self, *_: object, **__: object) -> NoReturn:
        """Refuse: no state is shared by rows. Layers that keep one are run by row."""
        self.refuse("a layer keeps a state in code that is not run by row")

    get_recurrent_state = update_conv_state = update_recurrent_state = has_previous_state = get_conv_state

    def write_table(self) -> None:
        """Make room for the pass's tokens in every layer, and say in the table where they belong; once a pass."""
        if self.table is None or self._written:
            return
        self.began = self._written = True
        found = []
        for part in self._parts:
            row = part.of.row
            at = part.of.row.where
            grows = at is None or bool((at[:, END] >= at[:, ROOM]).any())
            for layer, held in enumerate(row.layers):
                held.end = self._room(part, layer, held.keys, held.values) if grows else held.end + 1
            if at is None or grows:
                at = row.where = where(row.layers)
            else:
                at[:, END] += 1
            found.append(at)
        self.table.write(found)

    def written(self, layer: int) -> Tensor | None:
        """Return a layer's part of the table, where a launch is to write the layer's keys and values.

        None if the pass has no table. The part then stands for keys and values, as what `update` returns does.
        """
        if self.table is None:
            return None
        self.write_table()
        made = self.table.there[layer]
        self._passed[layer] = made, made
        return made

    def _room(self, part: _PassPart, layer: int, keys: Any, values: Any) -> int:
        """Make room in a row's layer for the pass's tokens, like `keys` and `values`; return where they end."""
        one = part.of
        window = self.windows[layer]
        held = part.of.row.layers[layer]
        end = held.end + one.taken + one.count
        if held.keys is not None and end <= held.keys.shape[2]:
            return end
        size = part.room if window is None else min(part.room, window - 1 + self.step)
        keep = held.end if window is None else min(held.end, window - 1)
        held.keys = _moved(held.keys, held.end, keep, size, keys)
        held.values = _moved(held.values, held.end, keep, size, values)
        return keep + one.taken + one.count

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values [1, heads, tokens, dim] to the rows, and return both unchanged."""
        self._passed[layer] = keys, values
        if self.table is not None:
            self.write_table()
            self.table.append(layer, keys, values)
            return keys, values
        self.began = True
        given = keys, values
        keys, values = (coded(t, n) for t, n in zip(given, self._bits[layer], strict=True))
        for part in self._parts:
            one = part.of
            held = part.of.row.layers[layer]
            part.of.row.where = None
            end = self._room(part, layer, keys, values)
            assert held.keys is not None and held.values is not None
            for n in range(one.row.length // CHUNK, -(-one.start // CHUNK) if one.taken else 0):
                kept = part.chunks[n].layers[layer]
                first = n * CHUNK
                low = max(one.row.length, first)
                high = min(one.start, first + CHUNK)
                held.keys[:, :, low:high] = kept[0][:, :, low - first : high - first]
                held.values[:, :, low:high] = kept[1][:, :, low - first : high - first]
            held.keys[:, :, end - one.count : end] = keys[:, :, part.span]
            held.values[:, :, end - one.count : end] = values[:, :, part.span]
            held.end = end
        return given

    def with_room(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Return a layer's keys and values with a row more, for one token of one sequence; else None."""
        part = self._parts[0]
        held = part.of.row.layers[layer]
        alone = len(self._parts) == 1 and part.of.count == 1 and not part.of.taken and self.table is None
        if not alone or self._bits[layer] != (PLAIN, PLAIN) or held.keys is None or held.values is None:
            return None
        self.began = True
        end = self._room(part, layer, held.keys, held.values)
        held.end = end - 1  # where a window's rows were moved to
        window = self.windows[layer]
        first = 0 if window is None else max(0, end - window)
        return held.keys[:, :, first:end], held.values[:, :, first:end]

    def keep(self, layer: int) -> None:
        """Note that the row of `with_room` is written."""
        self._parts[0].of.row.layers[layer].end += 1

    def attend(
        self, module: Any, query: Tensor, key: Tensor | Latents, scaling: float | None, sinks: Tensor | None
    ) -> Tensor:
        """Attend within each row, queries over the row's keys: [1, heads, tokens, dim] to [1, tokens, heads, dim]."""
        layer = module.layer_idx
        window = self.windows[layer]
        expand = hasattr(module, "expand_kv")
        latents = None if isinstance(key, Tensor) else key
        passed = self._passed[layer]
        if passed is None or (not expand and key is not passed[0]):
            raise NotPackable(f"{type(module).__name__} changes what its cache returns")
        if self.table is not None:
            one = self._parts[0].of.row.layers[layer]
            made = None
            if not expand:
                made = self.table.attend(layer, query, one, scaling, window, sinks)
            elif latents is not None and scaling is not None and window is None and sinks is None:
                made = latents.attend_rows(query, self.table.there[layer], scaling)
            if made is not None:
                return made
            self.table.by_address = True
        out = []
        for part in self._parts:
            held = part.of.row.layers[layer]
            stored = _given(held.keys)[:, :, : held.end], _given(held.values)[:, :, : held.end]
            k, v = (as_given(*of) for of in zip(stored, passed, self._bits[layer], strict=True))
            asked = query[:, :, part.span]
            made = None
            if latents is not None and scaling is not None and window is None and sinks is None:
                row = latents.over(k, v)
                made = row.attend(asked, None, scaling)
                if made is None:
                    made = row.by_heads(_expanded, module, asked, None, {"scaling": scaling})
            if made is None:
                if expand:
                    k, v = module.expand_kv(k, v) if latents is None else latents.over(k, v).expanded()
                made = _attend(asked, k, v, scaling, window, sinks)
            out.append(made)
        return torch.cat(out, dim=1)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens of the longest row."""
        return max((row.length for row in self.rows), default=0)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return placeholders: packed passes have no mask, so nothing reads its sizes."""
        return query_length, 0


class _Layer:
    """One layer of `PackedKvCache`, for models that read their cache by layer."""

    is_sliding = is_linear = is_dummy = False
    is_compileable = False

    def __init__(self, rows: PackedKvCache, number: int) -> None:
        # a reference cycle would keep the rows' memory
        self._rows = weakref.proxy(rows)
        self._number = number

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store new keys and values and return both unchanged; `attend` reads the rows instead."""
        out: tuple[Tensor, Tensor] = self._rows.store(self._number, keys, values)
        return out

    def get_seq_length(self) -> int:
        """Tokens of the longest row."""
        return int(self._rows.get_seq_length())


def _given(thing: Some | None) -> Some:
    assert thing is not None
    return thing


def _states_of(layer: Any) -> tuple[Tensor, ...]:
    """Return a layer's windows and states in turns, each without elements if there is none; none for other layers."""
    pairs = ((layer.conv_states[n], layer.recurrent_states[n]) for n in range(getattr(layer, "number_of_states", 0)))
    return tuple(torch.empty(0) if t is None else t for pair in pairs for t in pair)


def _moved(old: Tensor | None, end: int, keep: int, size: int, like: Tensor) -> Tensor:
    """Allocate room for `size` tokens, and copy tokens [end - keep, end) of `old` to its beginning."""
    new = like.new_empty(1, like.shape[1], size, like.shape[3])
    if old is not None and keep:
        new[:, :, :keep] = old[:, :, end - keep : end]
    return new


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, sinks: Tensor | None) -> Tensor:
    """Attend with a sequence's last queries [1, heads, n, dim] over its keys [1, kv heads, length, dim]."""
    made = _by_kernel(q, k, v, scaling, window, sinks)
    if made is not None:
        return made
    n = q.shape[2]
    length = k.shape[2]
    heads = k.shape[1]
    mask = None
    if n == 1 and window is not None and length > window:
        k = k[:, :, -window:]
        v = v[:, :, -window:]
    elif n > 1 and (sinks is not None or length > n or (window is not None and length > window)):
        mask = torch.ones(n, length, dtype=torch.bool, device=q.device).tril_(length - n)
        if window is not None:
            mask = mask.triu_(length - n - window + 1)
    if sinks is not None:
        return _with_sinks(q, k, v, scaling, mask, sinks)
    if n == 1:  # query heads that share keys become queries of one head, so keys are not repeated
        out = scaled_dot_product_attention(q.reshape(1, heads, -1, q.shape[3]), k, v, scale=scaling)
        return out.reshape(1, 1, -1, v.shape[3])
    grouped = q.shape[1] != heads
    if grouped and mask is not None:
        if q.device.type == "cpu":
            return attend_by_groups(q, k, v, mask[None, None], scaling).transpose(1, 2)
        k, v = (t.repeat_interleave(q.shape[1] // heads, dim=1) for t in (k, v))
        grouped = False
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2)


def _by_kernel(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, sinks: Tensor | None
) -> Tensor | None:
    """Attend by the compiled kernel, as `_attend` does; None where torch is faster, or for other tensors."""
    n = q.shape[2]
    length = k.shape[2]
    fits = q.dtype == torch.bfloat16 and q.device.type == "cpu" and q.stride(3) == k.stride(3) == v.stride(3) == 1
    if not fits or (sinks is None and n > FEW) or backends.library() is None:
        return None
    from moepack.runtime.kernels.dense_native import attend

    mask = None
    if window is not None and length > window:
        if n == 1:
            k = k[:, :, -window:]
            v = v[:, :, -window:]
        else:
            mask = torch.ones(1, 1, n, length, dtype=torch.bool).tril_(length - n).triu_(length - n - window + 1)
    return attend(q, k, v, q.shape[3] ** -0.5 if scaling is None else scaling, mask=mask, sinks=sinks)


def _expanded(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float
) -> tuple[Tensor, None]:
    """Attend over a row's expanded latents, as `Latents.by_heads` asks for it."""
    return _attend(query, key, value, scaling, None, None), None


def _with_sinks(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, mask: Tensor | None, sinks: Tensor) -> Tensor:
    """Attend with one learnt logit a head in the softmax (gpt-oss), as transformers' eager attention does."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
    scores = torch.matmul(q, k.transpose(2, 3)) * (q.shape[3] ** -0.5 if scaling is None else scaling)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    scores = torch.cat([scores, sinks.reshape(1, -1, 1, 1).expand(1, -1, q.shape[2], 1)], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    probabilities = torch.nn.functional.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1].to(v.dtype)
    return torch.matmul(probabilities, v).transpose(1, 2)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    """The attention of a packed pass, as transformers calls it."""
    step = current()
    if step is None or step.packed is None:  # set by PackedKvCache.passing
        raise NotPackable("a pass that is not packed reached packed attention")
    scaling = given.pop("scaling", None)
    sinks = given.pop("s_aux", None)
    if given.get("sliding_window", 0) is None and step.packed.windows[module.layer_idx] is not None:
        raise NotPackable(f"{type(module).__name__} sees all keys, and its cache keeps those of a window")
    if unknown := unknown_to_attention(given):
        raise NotPackable(f"{type(module).__name__} gives its attention {', '.join(unknown)}")
    return step.packed.attend(module, query, key, scaling, sinks), None


def _no_mask(**_: object) -> None:
    """Make no mask: each sequence reads its own cache."""


_attention.takes_latents = True  # type: ignore[attr-defined]
AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _no_mask)


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """Each layer's attention window in tokens; None for full, and for a layer without attention.

    Raises:
        NotPackable: if a layer keeps keys in another way, or positions depend on other sequences of a pass.
    """
    text = config.get_text_config(decoder=True)
    ropes = getattr(text, "rope_parameters", None) or {}  # one for all layers, or one by kind of layer
    for given in (ropes, *ropes.values()):
        rope = given.get("rope_type", given.get("type")) if isinstance(given, dict) else None
        if rope in ("dynamic", "longrope"):
            raise NotPackable(f"its positions ({rope}) depend on the longest sequence of a pass")
    kinds = getattr(text, "layer_types", None) or ()
    if odd := {*kinds} - KINDS:
        raise NotPackable(f"its layers are of {', '.join(sorted(odd))}")
    out: list[int | None] = []
    for layer in DynamicCache(config=config).layers:
        if type(layer) in (DynamicLayer, LinearAttentionLayer, DummyLayer):
            out.append(None)
        elif type(layer) is DynamicSlidingWindowLayer:
            out.append(int(layer.sliding_window))
        else:
            raise NotPackable(f"its cache has a {type(layer).__name__}")
    if len(out) != text.num_hidden_layers:
        raise NotPackable("its cache does not have one layer for each of the model's")
    return out


def told_cache(config: PreTrainedConfig, prompt: int | None) -> DynamicCache | None:
    """Return an empty cache whose layers know the length of the prompt; None if none asks.

    Layers of Unlimited-OCR keep a prompt and a window of what follows: untold, they take the first pass for it.
    """
    if prompt is None:
        return None
    made = DynamicCache(config=config)
    asking: list[Any] = [layer for layer in made.layers if hasattr(layer, "set_prefill_length")]
    for layer in asking:
        layer.set_prefill_length(prompt)
    return made if asking else None


def layers_with_states(config: PreTrainedConfig) -> frozenset[int]:
    """Return the numbers of the layers that keep a state of fixed size."""
    layers = DynamicCache(config=config).layers
    return frozenset(n for n, layer in enumerate(layers) if type(layer) is LinearAttentionLayer)
