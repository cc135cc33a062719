"""A cache of experts at several precisions: least recently used, by bytes (dymoe, section 4.4.2). Pure.

A subclass may have another order of leaving.

An expert is in the cache at one placement at most. A request for a better placement is a miss, and replaces the expert;
a request for a worse placement is a hit. All layers share the bytes, and also the blocks if memory has blocks.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from moepack.pack.errors import InputError

from .contract import Changes, Key

_Kind = tuple[int, int]  # a placement and the bytes of an expert there: experts of one kind share blocks


class MixedCache:
    """The experts above the base placement that are in device memory, or being copied there."""

    def __init__(
        self, sizes: Sequence[Sequence[int]], reuse: bool = True, most: Sequence[Sequence[int]] | None = None
    ) -> None:
        """Start empty. `sizes` [layers][placements] are an expert's bytes beyond the base, the last placement.

        With `reuse` an expert at a better placement serves a request for a worse one; otherwise it is replaced. `most`
        [layers][placements] are blocks of memory, shared by layers with experts of one size; `None` without blocks.
        """
        self.held: OrderedDict[Key, int] = OrderedDict()  # placements of the cached experts, least recently used first
        self.bytes = 0  # bytes of the cached experts
        self._sizes = sizes
        self._reuse = reuse
        self.base = len(sizes[0]) - 1 if sizes else 0  # the placement of experts outside
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
        """Return when an expert was last used, as a count of uses: policies take it as the expert's `worth`."""
        return self._used.get(key, 0)

    def leaving(self) -> Iterable[Key]:
        """Return the cached experts in the order in which they leave; experts may be dropped while this is read."""
        return list(self.held)

    def of_layer(self, layer: int) -> list[Key]:
        """Return a layer's cached experts, in any order."""
        return [(layer, expert) for expert in self._layers[layer]]

    def fill(self, wants: Mapping[Key, int], room: int) -> dict[Key, int]:
        """Put `wants` into the empty cache, the most wanted first, as far as they fit; return those."""
        fits: dict[Key, int] = {}
        taken: Counter[_Kind] = Counter()
        for key, placement in wants.items():
            kind = self._kind(key, placement)
            if kind[1] <= room and (self._most is None or taken[kind] < self._most[kind]):
                fits[key] = placement
                taken[kind] += 1
                room -= kind[1]
        for key in reversed(fits):  # so that the most wanted is the most recently used
            self._put(key, fits[key])
        return fits

    def serve(
        self,
        layer: int,
        wants: Mapping[int, int],
        room: int,
        placed: Sequence[int] | None = None,
        coming: Sequence[int] | None = None,
        all_of_them: bool = True,
    ) -> Changes:
        """Request a layer's experts; return their placements, and the experts that are evicted for them.

        Prefetched experts that are not requested are evicted first, then the least recently used. If a placement has
        too few blocks for the layer, the least important experts get the next better placement, or else a worse one.

        Args:
            layer: the layer's position.
            wants: the requested placements, the most important expert first.
            room: bytes that the cache may take.
            placed, coming: the layer's experts' present placements, and those being copied; by default as in `held`. An
                expert that is not requested and not at the placement in `held` is dropped.
            all_of_them: whether InputError is raised unless every expert fits; otherwise the least important are left
                out.
        """
        settled = placed is not None and not self._foreseen and self._are_here(layer, wants, placed)
        if settled and not self._is_over(room):
            return self._touched(layer, wants)
        out = Changes()
        for expert in [e for e in self._layers[layer] if e not in wants]:
            if placed is not None and placed[expert] != self.held[layer, expert]:
                out[layer, expert] = self.drop((layer, expert))
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
        for expert in reversed(list(wants)):  # so that the most important is the most recently used
            self._put((layer, expert), out[layer, expert])
        for gone in self.leaving() if self._is_over(room) else ():
            if not self._is_over(room):
                break
            if (gone[0] != layer or gone[1] not in wants) and self._is_too_much(gone, room):
                out[gone] = self.drop(gone)
        for expert in reversed(list(wants)):
            key = layer, expert
            if not self._is_too_much(key, room):
                continue
            if all_of_them:
                if self.bytes <= room:
                    raise InputError(f"a layer's {len(wants)} experts are more than there are blocks of memory for")
                raise InputError(f"a layer's experts take {self.bytes} bytes, which {room} do not hold")
            out[key] = self.drop(key)
        return Changes({(layer, e): out.pop((layer, e)) for e in wants} | out)

    def _are_here(self, layer: int, wants: Mapping[int, int], placed: Sequence[int]) -> bool:
        """Return whether all of `wants` are in memory as they are wanted, and the layer's other experts as noted."""
        held = self.held
        pairs = ((held.get((layer, e), self.base), v) for e, v in wants.items())
        fits = all(have < self.base and (have == v or (self._reuse and have < v)) for have, v in pairs)
        return fits and all(placed[e] == held[layer, e] for e in self._layers[layer])

    def foresee(self, layer: int, wants: Mapping[int, int], room: int, needed: Mapping[Key, int]) -> Changes:
        """Prefetch a layer's `wants` in order, while experts outside `needed` and `wants` can be evicted for them."""
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
            for other in self.leaving() if short > 0 or blocks > 0 else ():
                if other in needed or (other[0] == layer and other[1] in wants):
                    continue
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
                out[other] = self.drop(other)
            self._put(key, asked)
            self._foreseen[key] = None
            out[key] = asked
        return out

    def drop(self, key: Key) -> int:
        """Remove an expert from the cache; return the base placement, at which it then is."""
        if (have := self.held.pop(key, None)) is not None:
            self.bytes -= self._size(key, have)
            self._taken[self._kind(key, have)] -= 1
            del self._layers[key[0]][key[1]], self._used[key]
            self._foreseen.pop(key, None)
        return self.base

    def hold(self, key: Key, placement: int, room: int) -> bool:
        """Count a second version of a cached expert beside its first, if it fits; return whether it does."""
        kind = self._kind(key, placement)
        if self.bytes + kind[1] > room or (self._most is not None and self._taken[kind] >= self._most[kind]):
            return False
        self.bytes += kind[1]
        self._taken[kind] += 1
        return True

    def release(self, key: Key, placement: int) -> None:
        """Count a second version no more."""
        kind = self._kind(key, placement)
        self.bytes -= kind[1]
        self._taken[kind] -= 1

    def _size(self, key: Key, placement: int) -> int:
        return self._sizes[key[0]][placement]

    def _kind(self, key: Key, placement: int) -> _Kind:
        return placement, self._sizes[key[0]][placement]

    def _allowed(self, layer: int, asked: int, used: Counter[_Kind]) -> int:
        """Return the placement nearest to `asked` that has a block left beside those in `used`; count it in `used`."""
        nearest = [*range(asked, -1, -1), *range(asked + 1, self.base)]
        most = self._most
        kinds = {v: (v, self._sizes[layer][v]) for v in nearest if v != self.base}
        free = (v for v, kind in kinds.items() if most is None or used[kind] < most[kind])
        found = asked if asked == self.base else next(free, asked)
        used[found, self._sizes[layer][found]] += 1
        return found

    def _is_over(self, room: int) -> bool:
        return self.bytes > room or (self._most is not None and any(n > self._most[k] for k, n in self._taken.items()))

    def _is_too_much(self, key: Key, room: int) -> bool:
        """Return whether the cache is over its limits and dropping this expert would help."""
        have = self.held.get(key)
        if have is None:
            return False
        kind = self._kind(key, have)
        return self.bytes > room or (self._most is not None and self._taken[kind] > self._most[kind])

    def _put(self, key: Key, placement: int) -> None:
        self.drop(key)
        if placement != self.base:
            self._clock += 1
            self.held[key] = placement
            self._used[key] = self._clock
            self._layers[key[0]][key[1]] = None
            self.bytes += self._size(key, placement)
            self._taken[self._kind(key, placement)] += 1

    def _touched(self, layer: int, wants: Mapping[int, int]) -> Changes:
        """Mark cached experts as used now, and return their placements."""
        for expert in reversed(list(wants)):  # so that the most important is the most recently used
            self._clock += 1
            self.held.move_to_end((layer, expert))
            self._used[layer, expert] = self._clock
        return Changes({(layer, e): self.held[layer, e] for e in wants})
