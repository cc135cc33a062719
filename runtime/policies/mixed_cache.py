"""A cache of experts at several precisions: least recently used, by bytes (dymoe, section 4.4.2). Pure.

An expert is in it at one placement at most. What is asked for at a better placement than it has is a miss, which
replaces it; what is asked for at a lesser one is served as it is. All layers share its bytes; where memory is cut into
blocks of each placement once and for all, also those. Decides nothing about what is asked for at which precision.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from moepack.pack.errors import InputError

from .contract import Changes, Ints, Key

_Kind = tuple[int, int]  # a placement, and the bytes of an expert there: whose blocks are alike


class MixedCache:
    """What is in device memory beyond the base placements, or on its way there.

    Attributes:
        held: the placement of each expert that is in it, the least recently used first.
        bytes: that they take.
    """

    def __init__(
        self, sizes: Sequence[Sequence[int]], reuse: bool = True, most: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Args:
        sizes: [layers][placements], bytes of an expert beyond the base, which is the last and takes none.
        reuse: whether an expert that is there at a better placement than is asked for is served as it is; else it is
            replaced.
        most: [layers][placements], blocks that memory is cut into; layers whose experts are of one size at a placement
            share them. None where bytes are all there is.
        """
        self.held: OrderedDict[Key, int] = OrderedDict()
        self.bytes = 0
        self._sizes, self._reuse = sizes, reuse
        self._base = len(sizes[0]) - 1 if sizes else 0
        self._layers: list[dict[int, None]] = [{} for _ in sizes]
        self._used: dict[Key, int] = {}
        self._foreseen: dict[Key, None] = {}
        self._clock = 0
        self._taken: Counter[_Kind] = Counter()
        self._most: Counter[_Kind] | None = None
        if most is not None:
            self._most = Counter()
            for row, blocks in zip(sizes, most, strict=True):
                for placement, size in enumerate(row[:-1]):
                    self._most[placement, size] += blocks[placement]

    def last_used(self, key: Key) -> int:
        """When an expert was used last: more is later."""
        return self._used.get(key, 0)

    def serve(
        self,
        layer: int,
        wants: Mapping[int, int],
        room: int,
        placed: Ints | None = None,
        coming: Ints | None = None,
        all_of_them: bool = True,
    ) -> Changes:
        """Get a layer's experts; others leave for them, the least recently used first. What was foreseen for the layer
        and is not asked for leaves before those. Where the blocks of a placement do not suffice for the layer alone,
        the least important are served at another: a better one, else a lesser one.

        Args:
            layer: its position.
            wants: the placement that each expert is asked for at, the most important first.
            room: bytes that the cache may have.
            placed, coming: where the layer's experts are and where they are on their way to; without them, as `held`
                has it. What is neither where it should be nor asked for is given up.
            all_of_them: whether every expert must be had; else the least important go without.

        Returns:
            what changes: the experts asked for with their placements, and those that leave.

        Raises:
            InputError: when they do not fit all together.
        """
        out = Changes()
        for expert in [e for e in self._layers[layer] if e not in wants]:
            if placed is not None and placed[expert] != self.held[layer, expert]:
                out[layer, expert] = self._drop((layer, expert))
        for key in [key for key in self._foreseen if key[0] == layer]:
            del self._foreseen[key]
            if key[1] not in wants:
                self.held.move_to_end(key, last=False)
                self._used[key] = 0
        used: Counter[_Kind] = Counter()
        for expert, asked in wants.items():
            key = layer, expert
            have = self.held.get(key)
            if have is not None and placed is not None and coming is not None:
                have = have if have in (placed[expert], coming[expert]) else None
            best = have if self._reuse and have is not None and have <= asked else asked
            out[key] = self._allowed(layer, best, used)
        for expert in reversed(list(wants)):  # the most important is the last used
            self._put((layer, expert), out[layer, expert])
        for gone in [key for key in self.held if key[0] != layer or key[1] not in wants]:
            if self._is_too_much(gone, room):
                out[gone] = self._drop(gone)
        for expert in reversed(list(wants)):
            key = layer, expert
            if not self._is_too_much(key, room):
                continue
            if all_of_them:
                if self.bytes <= room:
                    raise InputError(f"a layer's {len(wants)} experts are more than there are blocks of memory for")
                raise InputError(f"a layer's experts take {self.bytes} bytes, which {room} do not hold")
            out[key] = self._drop(key)
        return Changes({(layer, e): out.pop((layer, e)) for e in wants} | out)

    def foresee(self, layer: int, wants: Mapping[int, int], room: int, needed: Mapping[Key, int]) -> Changes:
        """Get experts that a layer will ask for, in their order, as far as others can leave for them.

        Neither what is `needed` now nor anything else that this layer will ask for leaves.
        """
        out = Changes()
        used: Counter[_Kind] = Counter()
        for expert, first in wants.items():
            key = layer, expert
            have = self.held.get(key)
            asked = self._allowed(layer, first if have is None else min(first, have), used)
            if have is not None and have <= asked:
                continue
            kind = self._kind(key, asked)
            short = self.bytes + self._size(key, asked) - (0 if have is None else self._size(key, have)) - room
            blocks = 0 if self._most is None else self._taken[kind] + 1 - self._most[kind]
            leaving = []
            for other in self._victims(layer, wants, needed):
                if short <= 0 and blocks <= 0:
                    break
                alike = self._kind(other, self.held[other]) == kind
                if short > 0 or alike:
                    leaving.append(other)
                    short -= self._size(other, self.held[other])
                    blocks -= alike
            if short > 0 or blocks > 0:
                break
            for other in leaving:
                out[other] = self._drop(other)
            self._put(key, asked)
            self._foreseen[key] = None
            out[key] = asked
        return out

    def _victims(self, layer: int, wants: Mapping[int, int], needed: Mapping[Key, int]) -> Iterator[Key]:
        return (k for k in self.held if k not in needed and (k[0] != layer or k[1] not in wants))

    def _size(self, key: Key, placement: int) -> int:
        return self._sizes[key[0]][placement]

    def _kind(self, key: Key, placement: int) -> _Kind:
        return placement, self._sizes[key[0]][placement]

    def _allowed(self, layer: int, asked: int, used: Counter[_Kind]) -> int:
        """A placement that has blocks for one more of a layer's experts, beside those in `used`, where it is added."""
        nearest = [*range(asked, -1, -1), *range(asked + 1, self._base)]
        most = self._most
        kinds = {v: (v, self._sizes[layer][v]) for v in nearest if v != self._base}
        free = (v for v, kind in kinds.items() if most is None or used[kind] < most[kind])
        found = asked if asked == self._base else next(free, asked)
        used[found, self._sizes[layer][found]] += 1
        return found

    def _is_too_much(self, key: Key, room: int) -> bool:
        """Whether there is less than is held, and what an expert has would help."""
        have = self.held.get(key)
        if have is None:
            return False
        kind = self._kind(key, have)
        return self.bytes > room or (self._most is not None and self._taken[kind] > self._most[kind])

    def _put(self, key: Key, placement: int) -> None:
        """At this placement, and at no other; used now."""
        self._drop(key)
        if placement != self._base:
            self._clock += 1
            self.held[key], self._used[key] = placement, self._clock
            self._layers[key[0]][key[1]] = None
            self.bytes += self._size(key, placement)
            self._taken[self._kind(key, placement)] += 1

    def _drop(self, key: Key) -> int:
        """Let an expert go; returns the base."""
        if (have := self.held.pop(key, None)) is not None:
            self.bytes -= self._size(key, have)
            self._taken[self._kind(key, have)] -= 1
            del self._layers[key[0]][key[1]], self._used[key]
            self._foreseen.pop(key, None)
        return self._base
