"""A cache of experts at several precisions: least recently used, by bytes (dymoe, section 4.4.2). Pure.

An expert is in it at one placement at most. What is asked for at a better placement than it has is a miss, which
replaces it; what is asked for at a lesser one is served as it is. All layers share its bytes. Decides nothing about
what is asked for at which precision.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

from moepack.pack.errors import InputError

from .contract import Changes, Ints, Key


class MixedCache:
    """What is in device memory beyond the base placements, or on its way there.

    Attributes:
        held: the placement of each expert that is in it, the least recently used first.
        bytes: that they take.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], reuse: bool = True) -> None:
        """Args:
        sizes: [layers][placements], bytes of an expert beyond the base, which is the last and takes none.
        reuse: whether an expert that is there at a better placement than is asked for is served as it is; else it is
            replaced.
        """
        self.held: OrderedDict[Key, int] = OrderedDict()
        self.bytes = 0
        self._sizes, self._reuse = sizes, reuse
        self._base = len(sizes[0]) - 1 if sizes else 0
        self._layers: list[dict[int, None]] = [{} for _ in sizes]
        self._used: dict[Key, int] = {}
        self._foreseen: dict[Key, None] = {}
        self._clock = 0

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
        and is not asked for leaves before those.

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
        for expert, asked in reversed(list(wants.items())):  # the most important is the last used
            key = layer, expert
            have = self.held.get(key)
            if have is not None and placed is not None and coming is not None:
                have = have if have in (placed[expert], coming[expert]) else None
            out[key] = have if self._reuse and have is not None and have <= asked else asked
            self._put(key, out[key])
        victims = (key for key in list(self.held) if key[0] != layer or key[1] not in wants)
        while self.bytes > room and (gone := next(victims, None)) is not None:
            out[gone] = self._drop(gone)
        for expert in reversed(list(wants)):
            if self.bytes <= room:
                break
            if all_of_them:
                raise InputError(f"a layer's experts take {self.bytes} bytes, which {room} do not hold")
            out[layer, expert] = self._drop((layer, expert))
        return Changes({(layer, e): out.pop((layer, e)) for e in wants} | out)

    def foresee(self, layer: int, wants: Mapping[int, int], room: int, needed: Mapping[Key, int]) -> Changes:
        """Get experts that a layer will ask for, in their order, as far as others can leave for them.

        Neither what is `needed` now nor anything else that this layer will ask for leaves.
        """
        out = Changes()
        for expert, asked in wants.items():
            key = layer, expert
            have = self.held.get(key)
            if have is not None and have <= asked:
                continue
            short = self.bytes + self._size(key, asked) - (0 if have is None else self._size(key, have)) - room
            leaving = []
            for other in self._victims(layer, wants, needed) if short > 0 else ():
                leaving.append(other)
                short -= self._size(other, self.held[other])
                if short <= 0:
                    break
            if short > 0:
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

    def _put(self, key: Key, placement: int) -> None:
        """At this placement, and at no other; used now."""
        self._drop(key)
        if placement != self._base:
            self._clock += 1
            self.held[key], self._used[key] = placement, self._clock
            self._layers[key[0]][key[1]] = None
            self.bytes += self._size(key, placement)

    def _drop(self, key: Key) -> int:
        """Let an expert go; returns the base."""
        if (have := self.held.pop(key, None)) is not None:
            self.bytes -= self._size(key, have)
            del self._layers[key[0]][key[1]], self._used[key]
            self._foreseen.pop(key, None)
        return self._base
