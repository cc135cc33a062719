"""Forward passes for many sequences at once: packed into one where the model allows it, else one pass a sequence.

Knows tokens and caches; nothing of requests, and decides neither who runs nor what is sampled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.runtime.devices import glibc
from moepack.runtime.residency.kv_reserve import KvWatch

from .packed_cache import NAME, NotPackable, Row, Rows, Shape, windows_of

log = logging.getLogger("moepack.server")
# Passes of all lengths, on a thread of their own, leave holes in the heap: 800 of up to 256 tokens 200 MB.
TRIM = 5.0  # seconds between two times that they are given back


@dataclass(slots=True, eq=False)
class Slot:
    """A sequence's place in an engine.

    Attributes:
        row: its cache where passes are packed.
        cache: its cache where it has passes of its own.
        length: tokens in either.
    """

    row: Row | None = None
    cache: Any = None
    length: int = 0


@dataclass(frozen=True, slots=True)
class Item:
    """What a pass reads of one sequence.

    Attributes:
        slot: where its cache is.
        tokens: the next ones.
        wanted: of which of them logits are wanted, counted from the last: 0 none, 1 the last's.
        is_prompt: whether they belong to a prompt.
    """

    slot: Slot
    tokens: Sequence[int]
    wanted: int = 1
    is_prompt: bool = False


class Engine:
    """Runs a model's passes; one thread at a time.

    Attributes:
        device: where logits are.
        why_not_packed: why every sequence has passes of its own; None where they are packed.
    """

    def __init__(self, model: Any, step_tokens: int) -> None:
        """For passes of `step_tokens` tokens at the most."""
        self._model, self._step = model, step_tokens
        self.device: torch.device = model.device
        self._native = model.config._attn_implementation
        self._trimmed = time.monotonic()
        self._only_last = bool(model._supports_logits_to_keep())
        self.why_not_packed: str | None = None
        self._windows: list[int | None] = []
        self._rows: Rows | None = None
        serving = getattr(model, "moepack", None)
        self._watch: KvWatch | None = None if serving is None else serving.caches
        live = None if serving is None else serving.live
        try:
            if live is not None and getattr(live.policy.needs, "importance", False):
                raise NotPackable("its policy reads attention weights")
            self._windows = windows_of(model.config)
        except NotPackable as error:
            self._give_up(error)
        else:
            self._use(NAME)

    def _use(self, attention: str | None) -> None:
        self._model.config._attn_implementation = attention

    def _give_up(self, error: NotPackable) -> None:
        self.why_not_packed = str(error)
        log.warning("requests are not batched, each has forward passes of its own: %s", error)
        self._use(self._native)

    @property
    def is_packed(self) -> bool:
        """Whether sequences share passes."""
        return self.why_not_packed is None

    # --- sequences

    def add(self, wanted: int) -> Slot:
        """A sequence joins, whose cache will soon hold `wanted` tokens."""
        if not self.is_packed:
            return Slot()
        if self._rows is None:
            self._rows = Rows(self._windows, self._shape(), self._step)
        return Slot(self._rows.add(wanted))

    def remove(self, slot: Slot) -> None:
        """A sequence leaves; its cache goes at once."""
        if slot.row is not None and self._rows is not None:
            self._rows.remove(slot.row)
            if not self._rows.rows:  # with it goes what the budget counts for it
                self._rows = None
        slot.row = slot.cache = None
        slot.length = 0

    def _shape(self) -> Shape | None:
        if self._watch is None:
            return None
        full = 0
        windowed: dict[int, int] = {}
        for _, slope, cap in self._watch.shape.parts:
            if cap is None:
                full += slope
            else:
                window = cap // slope + 1
                windowed[window] = windowed.get(window, 0) + slope
        return Shape(full, tuple((size, window) for window, size in windowed.items()))

    # --- room

    @property
    def cache_bytes(self) -> int:
        """Bytes of all sequences' caches, where somebody counts."""
        return self._watch.used if self._watch is not None else 0

    def fits(self, items: Sequence[Item], joining: Sequence[int] = ()) -> bool:
        """Whether the budget can hold a pass of these, beside caches of `joining` tokens that do not exist yet."""
        if self._watch is None:
            return True
        shape, tokens = self._watch.shape, sum(len(i.tokens) for i in items)
        longest = max((i.slot.length + len(i.tokens) for i in items), default=0)
        if self._rows is not None:
            size = self._rows.after([(i.slot.row, len(i.tokens)) for i in items if i.slot.row is not None])
        else:
            size = self._watch.used
            size += sum(shape.bytes(i.slot.length + len(i.tokens)) - shape.bytes(i.slot.length) for i in items)
        size += sum(self._alone(n) for n in joining)
        return self._watch.fits(size, max(1, min(tokens, self._step)), max([longest, *joining]))

    def _alone(self, tokens: int) -> int:
        """Bytes of the cache of a sequence of so many tokens."""
        assert self._watch is not None
        shape = self._shape()
        if not self.is_packed or shape is None:
            return self._watch.shape.bytes(tokens)
        room = Row([]).room_for(tokens)
        return shape.bytes(room + room // 4, self._step)  # it grows ahead of need, and is copied a layer at a time

    def holds(self, tokens: int) -> bool:
        """Whether the budget could hold a sequence of so many tokens, alone."""
        return self._watch is None or self._watch.fits(self._alone(tokens), min(tokens, self._step), tokens)

    def most_tokens(self, most: int) -> int:
        """The longest sequence, up to `most` tokens, that the budget could hold alone."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.holds(middle) else (low, middle - 1)
        return low

    # --- passes

    def run(self, items: Sequence[Item]) -> list[Tensor | None]:
        """One step: every item's logits [wanted, vocab] in the model's dtype, or None where none are wanted.

        Raises:
            BudgetExceeded: before anything was computed, when the budget has no room after all.
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
                        item.slot.row = None
                    raise
            return [self._alone_pass(item) for item in items]

    def _packed(self, items: Sequence[Item]) -> list[Tensor | None]:
        rows = self._rows
        assert rows is not None
        tokens = [token for item in items for token in item.tokens]
        positions = [p for i in items for p in range(i.slot.length, i.slot.length + len(i.tokens))]
        end = 0
        kept: list[int] = []
        for item in items:
            end += len(item.tokens)
            kept += range(end - item.wanted, end)
        parts = [(item.slot.row, len(item.tokens), item.is_prompt) for item in items if item.slot.row is not None]
        assert len(parts) == len(items)
        try:
            with rows.passing(parts):
                logits = self._pass(tokens, positions, rows, kept or [len(tokens) - 1])
        except BaseException:
            if rows.began:
                for item in items:
                    self.remove(item.slot)
            raise
        for item in items:
            item.slot.length += len(item.tokens)
        out, at = [], 0
        for item in items:
            out.append(logits[at : at + item.wanted] if item.wanted else None)
            at += item.wanted
        return out

    def _alone_pass(self, item: Item) -> Tensor | None:
        from transformers.cache_utils import DynamicCache

        slot, count = item.slot, len(item.tokens)
        cache = DynamicCache(config=self._model.config) if slot.cache is None else slot.cache
        positions = list(range(slot.length, slot.length + count))
        kept = list(range(count - max(1, item.wanted), count))
        logits = self._pass(list(item.tokens), positions, cache, kept)
        slot.cache = cache
        slot.length += count
        return logits if item.wanted else None

    def _pass(self, tokens: list[int], positions: list[int], cache: Any, kept: list[int]) -> Tensor:
        ids = torch.tensor([tokens], device=self.device)
        at = torch.tensor([positions], device=self.device)
        wanted: dict[str, Any] = {}
        if self._only_last:
            wanted["logits_to_keep"] = torch.tensor(kept, device=self.device)
        out = self._model(input_ids=ids, position_ids=at, past_key_values=cache, use_cache=True, **wanted)
        logits: Tensor = out.logits[0]
        return logits if self._only_last else logits[kept]
