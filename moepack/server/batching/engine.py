"""Run a step of many sequences: in one packed forward pass where the model allows it, else in a pass for each.

The engine owns the KV caches. The scheduler chooses the sequences, and samples from the logits.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache

from moepack.families.arguments import cache_in, with_cache
from moepack.pack.errors import InputError
from moepack.runtime.dense.by_row import serve_rows
from moepack.runtime.devices import glibc
from moepack.runtime.planning.exceeded import BudgetExceeded
from moepack.runtime.residency.kv_reserve import KvBudget
from moepack.server.options import UNLIMITED

from .packed_cache import (
    NAME,
    Alike,
    CacheShape,
    CacheSlot,
    NotPackable,
    PackedKvCache,
    StepInput,
    in_grains,
    layers_with_states,
    told_cache,
    windows_of,
)
from .prefix_files import PrefixFiles
from .prefixes import CHUNK, chunk_keys
from .row_table import RowTable

if TYPE_CHECKING:
    from transformers import Cache

    from moepack.runtime.kv.forms import Bits
    from moepack.runtime.served_model import CausalModel

__all__ = ["CacheSlot", "Engine", "StepInput"]
log = logging.getLogger("moepack.server")
# Passes of many lengths on one thread fragment the heap: 800 passes of up to 256 tokens left 200 MB of free holes.
TRIM = 5.0  # seconds between two returns of free heap memory to the system
# The default of the most bytes of kept chunks: KEPT, in a budget at most a SHARE-th of it.
KEPT = 1 << 30
SHARE = 8


class Engine:
    """Run a model's forward passes. One thread at a time may call it."""

    def __init__(
        self, model: CausalModel, step_tokens: int, most_kept: int | None = 0, files: PrefixFiles | None = None
    ) -> None:
        """Prepare for passes of at most `step_tokens` tokens.

        `most_kept` is the most bytes of kept chunks of prompts: 0 keeps none, None takes the default. They are also
        written to `files`, and found there.
        """
        self._model = model
        self._files = files
        self._step = step_tokens
        self.device: torch.device = model.device  # device of the logits
        self._native = model.config._attn_implementation
        self._trimmed = time.monotonic()
        self._only_last = bool(model._supports_logits_to_keep())
        self.why_not_packed: str | None = None  # why each sequence has passes of its own; None if passes are packed
        self._windows: list[int | None] = []
        self._with_states: frozenset[int] = frozenset()  # layers
        self._rows: PackedKvCache | None = None
        self._table: RowTable | None = None
        # The most sequences that a replayed pass decodes; more in one pass take longer. None without replays.
        self.at_once: Callable[[], int | None] = lambda: None
        serving = getattr(model, "moepack", None)
        self._watch: KvBudget | None = None if serving is None else serving.caches
        self._kv: Sequence[Bits] = () if serving is None else serving.kv
        manager = None if serving is None else serving.manager
        # Seconds that passes waited for experts' bytes since the start.
        self.waited: Callable[[], float] = lambda: 0.0 if manager is None else float(manager.waited)
        try:
            self._windows = windows_of(model.config)
            self._with_states = layers_with_states(model.config)
            if unknown := self._with_states - serve_rows(model, self._with_states):
                raise NotPackable(f"its layers {', '.join(map(str, sorted(unknown)))} keep states of their own kind")
            if manager is not None and manager.policy.needs.importance:
                raise NotPackable("its policy reads attention weights")
            model.config._attn_implementation = NAME
            if not self._with_states:
                self._table = RowTable.of(model, len(self._windows))
            if self._table is not None and not (manager is not None and manager.policy.needs.layers):
                self.at_once = self._table.at_once  # a policy that lets passes wait has no replays
        except NotPackable as error:
            self._give_up(error)
        budget = None if serving is None else serving.budget_bytes
        self._most_kept = min(KEPT, budget // SHARE if budget else KEPT) if most_kept is None else most_kept
        shape = self._shape()
        # Of a kept chunk and the states after it; 0 if unknown, without a budget.
        self._chunk_bytes = CHUNK * shape.full + shape.fixed if shape else 0
        if self._most_kept and (why := self.why_not_kept) is not None:
            log.warning("no prompt is kept, each is read in full: %s", why)

    def _give_up(self, error: NotPackable) -> None:
        """Run each sequence in passes of its own from now on."""
        self.why_not_packed = str(error)
        log.warning("requests are not batched, each has forward passes of its own: %s", error)
        self._model.config._attn_implementation = self._native

    @property
    def is_packed(self) -> bool:
        """Whether sequences share passes."""
        return self.why_not_packed is None

    # --- sequences

    def add(
        self, wanted: int, keys: tuple[bytes, ...] = (), prompt: int | None = None, most: int = UNLIMITED
    ) -> CacheSlot:
        """Add a sequence whose cache will soon hold `wanted` tokens, and at its end `most`.

        `keys` are its prompt's `chunk_keys`. `prompt` is its prompt's number of tokens, which may take several passes;
        None: all of the first pass.
        """
        if not self.is_packed:
            return CacheSlot(told_cache(self._model.config, prompt))
        if self._rows is None:
            states = partial(DynamicCache, config=self._model.config) if self._with_states else None
            self._rows = PackedKvCache(
                self._windows, self._shape(), self._step, self.most_kept, self._table, states, self._kv, self._files
            )
        return CacheSlot(self._rows.add(wanted, keys, most))

    def remove(self, slot: CacheSlot) -> None:
        """Remove a sequence and free its cache."""
        if slot.cache is not None and self._rows is not None:
            self._rows.remove(slot.cache)
            self._recount()
        slot.cache = None
        slot.length = 0

    def _recount(self) -> None:
        """Tell the budget that the rows or the kept chunks became fewer."""
        assert self._rows is not None
        if not self._rows.rows and not len(self._rows.prefixes):
            self._rows = None  # without the object, the budget ends what it reserved for it
        elif self._watch is not None:
            self._watch.recount(self._rows)

    # --- kept chunks of prompts

    @property
    def why_not_kept(self) -> str | None:
        """Why no prompt is kept; None if prompts are."""
        if self.why_not_packed is not None:
            return self.why_not_packed
        if any(window is not None for window in self._windows):
            return "it has layers with an attention window"
        if not self._most_kept:
            return "it is switched off"
        if self._chunk_bytes > self._most_kept:
            what = f"{CHUNK} tokens{' and states' * bool(self._with_states)}"
            return f"{what} take {self._chunk_bytes} bytes, and the most is {self._most_kept}"
        return None

    @property
    def most_kept(self) -> int:
        """The most bytes of kept chunks."""
        return self._most_kept if self.why_not_kept is None else 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of kept chunks."""
        rows = self._rows  # read once: the engine's thread may replace it
        return 0 if rows is None else rows.prefixes.bytes

    def keys(self, prompt: Sequence[int]) -> tuple[bytes, ...]:
        """Return the `chunk_keys` of a prompt. Any thread may call it.

        The last token is always read, and states do not go back: with states it is no chunk's.
        """
        return chunk_keys(prompt[:-1] if self._with_states else prompt)

    def kept_ahead(self, slot: CacheSlot, most: int) -> int:
        """Return the tokens, at most `most`, at the beginning of a sequence's prompt that are kept beyond its cache."""
        if self._rows is None or slot.cache is None or not slot.cache.keys:
            return 0
        found = self._rows.found(slot.cache.keys)
        end = slot.length + most
        if self._with_states:
            return max(0, CHUNK * self._rows.prefixes.deepest(found[: end // CHUNK]) - slot.length)
        return max(0, min(CHUNK * len(found), end) - slot.length)

    def look_for(self, prompt: Sequence[int]) -> None:
        """Check the files that hold the beginning of a prompt, which waits for that. Any thread may call it."""
        if self._files is not None and self.most_kept:
            self._files.look_for(self.keys(prompt), states=bool(self._with_states))

    def keeps_next(self, item: StepInput) -> int:
        """Return how many of its prompt's first chunks others take once a step with this input has kept the next.

        0 if it keeps nothing that follows what the sequence has. Without keys and values of its own before them, the
        states after a later chunk are what others wait for.
        """
        if self._rows is None or not item.keeps:
            return 0
        if self._with_states:
            return next(iter(self._rows.new_states(replace(item, keeps=item.count))), 0)
        number = item.start // CHUNK
        return number + 1 if number in self._rows.new_chunks(item) else 0

    def kept_tokens(self, items: Sequence[StepInput] = ()) -> int:
        """Tokens of all kept chunks, after a step of these inputs."""
        if self._rows is None:
            return 0
        return CHUNK * (len(self._rows.prefixes) + sum(len(self._rows.new_chunks(one)) for one in items))

    def evict(self, spared: Sequence[bytes] = ()) -> bool:
        """Remove the least recently used chunk, unless it begins a prompt with the chunk keys `spared`.

        Returns whether there was one.
        """
        if self._rows is None:
            return False
        prefixes = self._rows.prefixes
        found = prefixes.find(spared)
        last = prefixes.states(found[count - 1]) if (count := prefixes.deepest(found)) else None
        if not prefixes.evict(found if last is None else [*found, last]):
            return False
        self._recount()
        return True

    def close(self) -> None:
        """Write the chunks that wait to be written, and remove all."""
        if self._files is not None:
            self._files.close()
        while self.evict():
            pass

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove the chunks of a prompt that has no finite answer, and those that follow one of them."""
        if self._files is not None:
            self._files.forget(keys)
        if self._rows is not None:
            self._rows.prefixes.forget(keys)
            self._recount()

    def _shape(self) -> CacheShape | None:
        if self._watch is None:
            return None
        widest = max(filter(None, self._windows), default=None)
        counts: Counter[tuple[int, int | None]] = Counter()
        fixed = 0
        for constant, slope, cap in self._watch.shape.parts:
            if slope:
                counts[slope, None if cap is None else widest] += 1
            elif self._with_states:
                fixed += constant
        return CacheShape(tuple(Alike(count, *of) for of, count in counts.items()), fixed)

    # --- room

    @property
    def cache_bytes(self) -> int:
        """Bytes of all sequences' caches; 0 without a budget."""
        return self._watch.used if self._watch is not None else 0

    def fits(self, items: Sequence[StepInput], joining: Sequence[int] = (), kept: bool = True) -> bool:
        """Whether the budget holds a step of these inputs, and new caches of `joining` tokens beside it.

        With kept=False, assume that all kept chunks have been evicted.
        """
        if self._watch is None:
            return True
        shape = self._watch.shape
        tokens = sum(i.count for i in items)
        longest = max((i.end for i in items), default=0)
        if self._rows is not None:
            size = self._rows.after(items, kept)
        else:
            size = self._watch.used
            size += sum(shape.bytes(i.end) - shape.bytes(i.start) for i in items)
        size += sum(self._alone(n) for n in joining)
        return not self._watch.lacks(size, max(1, min(tokens, self._step)), max([longest, *joining]))

    def _alone(self, tokens: int) -> int:
        """Bytes of the cache of one sequence of `tokens` tokens."""
        assert self._watch is not None
        shape = self._shape()
        if not self.is_packed or shape is None:
            return self._watch.shape.bytes(tokens)
        room = in_grains(tokens)
        return shape.bytes(room, self._step) + shape.copied(room, room + 1, self._step)

    def lacks(self, tokens: int) -> int:
        """Bytes that the budget lacks to hold one sequence of `tokens` tokens, alone."""
        return 0 if self._watch is None else self._watch.lacks(self._alone(tokens), min(tokens, self._step), tokens)

    def most_tokens(self, most: int) -> int:
        """Tokens of the longest sequence, up to `most`, that the budget holds alone."""
        return bisect.bisect_left(range(1, most + 1), True, key=lambda tokens: self.lacks(tokens) > 0)

    # --- passes

    def run(self, items: Sequence[StepInput]) -> list[Tensor | None]:
        """Run one step.

        Returns:
            For each input its logits [wanted, vocab] in the model's dtype, or None if it wants none. Where each has a
            pass of its own, the list ends before an input that the budget refused.

        Raises:
            BudgetExceeded: before any computation, if the budget has no room.
            NotPackable: if the model's attention turns out not to be packable; all sequences' caches are then lost.
        """
        if self.device.type == "cpu" and time.monotonic() - self._trimmed > TRIM:
            glibc.trim()
            self._trimmed = time.monotonic()
        with torch.inference_mode():
            if self.is_packed:
                try:
                    return self._packed(items)
                except NotPackable as error:
                    self._give_up(error)
                    self._rows = None
                    for item in items:
                        item.slot.cache = None
                    raise
            return self._each_alone(items)

    def _packed(self, items: Sequence[StepInput]) -> list[Tensor | None]:
        rows = self._rows
        assert rows is not None
        tokens = [token for item in items for token in item.tokens]
        positions = [p for i in items for p in range(i.start, i.end)]
        ends = itertools.accumulate(i.count for i in items)
        kept = [at for item, end in zip(items, ends, strict=True) for at in range(end - item.wanted, end)]
        try:
            with rows.passing(items):
                logits, _ = self._pass(tokens, positions, rows, kept or [len(tokens) - 1])
        except BaseException:
            if rows.began:
                for item in items:
                    self.remove(item.slot)
            raise
        for item in items:
            item.slot.length = item.end
        parts = iter(logits.split([item.wanted for item in items if item.wanted] or 1))
        return [next(parts) if item.wanted else None for item in items]

    def _each_alone(self, items: Sequence[StepInput]) -> list[Tensor | None]:
        """Run a pass for each item. The results of those before one that the budget refuses count."""
        made: list[Tensor | None] = []
        for item in items:
            try:
                made.append(self._alone_pass(item))
            except BudgetExceeded:
                if not made:
                    raise
                break
        return made

    def _alone_pass(self, item: StepInput) -> Tensor | None:
        slot = item.slot
        positions = list(range(item.start, item.end))
        kept = list(range(item.count - max(1, item.wanted), item.count))
        logits, slot.cache = self._pass(list(item.tokens), positions, slot.cache, kept)
        slot.length += item.count
        return logits if item.wanted else None

    def _pass(
        self, tokens: list[int], positions: list[int], cache: Cache | None, kept: list[int]
    ) -> tuple[Tensor, object]:
        """Return the logits of the tokens `kept`, and the cache: the one given, or one of the model's own kind."""
        ids = torch.tensor([tokens], device=self.device)
        at = torch.tensor([positions], device=self.device)
        wanted = {"logits_to_keep": torch.tensor(kept, device=self.device)} if self._only_last else {}
        held = {} if cache is None else with_cache(self._model, cache)
        out = self._model(input_ids=ids, position_ids=at, use_cache=True, **held, **wanted)
        made = cache_in(out) if cache is None else cache
        if made is None:
            raise InputError(f"{type(self._model).__name__} keeps no cache between passes: it cannot be served")
        logits: Tensor = out.logits[0]
        return (logits if self._only_last else logits[kept]), made
