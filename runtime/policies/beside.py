"""Moves of experts in memory to another version, beside passes: nobody waits for them. Pure.

The present version serves until the other has arrived. Until a pass has gone by after that, both take memory, which
the cache counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from .contract import Changes, Key
from .mixed_cache import MixedCache
from .reducers import Floats, Ints

MOVES = 24  # the most at a time, in all layers
EACH = 2  # that begin at one layer: what the next layer waits for comes behind them
# free room for their blocks: so many of the largest, in a SHARE-th of all room; but one at least
MARGIN = 8
SHARE = 16


class Moves:
    """The experts that move, and those that have moved while a pass may still read their earlier version."""

    def __init__(self, cache: MixedCache, experts: Sequence[int], sizes: Sequence[Sequence[int]]) -> None:
        """Begin without any. `sizes` [layers][placements] are an expert's bytes, `experts` [layers] their number."""
        self._cache = cache
        self._sizes = sizes
        self._going: dict[Key, int] = {}  # where to
        self._gone: dict[Key, int] = {}  # where from
        self._moves = any(len(row) > 2 for row in sizes)  # else there is one version in memory: nothing moves
        self._largest = max((max(row) for row in sizes), default=0)
        # What a layer may need at once: no move takes that room
        self._least = max((n * max(row) for n, row in zip(experts, sizes, strict=True)), default=0)

    def margin(self, room: int) -> int:
        """Return the bytes of `room` that are kept free for moves."""
        return min(MARGIN * self._largest, max(self._largest, room // SHARE)) if self._moves else 0

    def settle(self, layer: int, placed: Sequence[int], coming: Sequence[int]) -> None:
        """Update the record of a layer's moves since the last call for this layer.

        Args:
            layer: the layer's position.
            placed, coming: the placements of its experts, and those that they are being copied to; -1 for none.
        """
        held = self._cache.held
        for key in [key for key in self._gone if key[0] == layer or key not in held]:
            self._cache.release(key, self._gone.pop(key))
        for key, to in [(key, to) for key, to in self._going.items() if key[0] == layer or key not in held]:
            if key in held and placed[key[1]] == to:
                del self._going[key]
                self._gone[key], held[key] = held[key], to
            elif key not in held or coming[key[1]] != to:
                del self._going[key]
                self._cache.release(key, to)

    def begin(self, layer: int, counts: Ints, heat: Floats, earned: Ints, room: int, answer: Changes) -> None:
        """Add moves to the answer for a layer: needed experts to what they earn, and others down where room is short.

        Args:
            layer: the layer's position.
            counts, heat, earned: [experts], how often the pass needs each, how hot it is, and where it is to be.
            room: bytes of all layers.
            answer: what else changes; experts in it at the base have left.
        """
        held = self._cache.held
        to = earned.tolist()
        if not self._moves or len(self._going) + len(self._gone) >= MOVES:
            return
        needed = counts.nonzero()[0].tolist()
        rising = [e for e in needed if to[e] < held.get((layer, e), -1) and self._is_still((layer, e))]
        if len(rising) > EACH:
            rising = sorted(rising, key=lambda e: -heat[e])[:EACH]
        fit = [self._move((layer, e), to[e], room, answer) for e in rising]
        if not all(fit) or self._cache.bytes + self.margin(room) > room:
            self._shed(layer, counts, heat, to, room, answer)

    def _shed(self, layer: int, counts: Ints, heat: Floats, to: list[int], room: int, answer: Changes) -> None:
        """Free the bytes of the coldest expert that is above what it earns: it leaves, or moves down."""
        held = self._cache.held
        base = self._cache.base
        above = [key for key in self._cache.of_layer(layer) if to[key[1]] > held[key] and self._is_still(key)]
        for key in sorted(above, key=lambda key: float(heat[key[1]])):
            if to[key[1]] < base and self._move(key, to[key[1]], room, answer):
                return
            if to[key[1]] == base and not counts[key[1]]:
                answer[key] = self._cache.drop(key)
                return

    def _is_still(self, key: Key) -> bool:
        return key not in self._going and key not in self._gone

    def _move(self, key: Key, to: int, room: int, answer: Changes) -> bool:
        others = self._going | self._gone
        size = sum(self._sizes[p][v] for (p, _), v in others.items()) + self._sizes[key[0]][to]
        if size + self._least > room or not self._cache.hold(key, to, room):
            return False
        self._going[key] = answer.beside[key] = to
        return True
