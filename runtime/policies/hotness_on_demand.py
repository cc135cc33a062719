"""`hotness:lo=stored`: experts that nobody wants are on the disk alone, and the hottest stay in memory. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from moepack.runtime.allocation.ladder import Floats, Ladder, SharedByLoss

from .beside import Moves
from .contract import Event, Interval, Key, LayerReached, Needs, Setting, Wanted
from .heat import ExpertHeat, busiest
from .mixed_cache import MixedCache
from .reducers import Ints, ranked

FIRST = 64  # experts that are sorted for leaving: more than a layer in decoding replaces


class _HottestStay(MixedCache):
    def __init__(self, experts: Sequence[int], sizes: Sequence[Sequence[int]], most: Sequence[Sequence[int]] | None):
        super().__init__(sizes, most=most)
        shape = len(experts), max(experts, default=0)
        self.heat: Floats = np.zeros(shape)
        self._here: npt.NDArray[np.bool_] = np.zeros(shape, bool)

    def leaving(self) -> Iterator[Key]:
        heat = np.where(self._here, self.heat, np.inf).ravel()
        count = len(self.held)
        width = self.heat.shape[1]
        first = np.argpartition(heat, FIRST)[:FIRST] if count > FIRST else np.flatnonzero(self._here)
        yield from (divmod(i, width) for i in first[np.argsort(heat[first], kind="stable")].tolist())
        if count > FIRST:
            order = np.argsort(heat, kind="stable")[:count]
            yield from (divmod(i, width) for i in order.tolist() if self._here.ravel()[i])

    def _put(self, key: Key, placement: int) -> None:
        super()._put(key, placement)
        self._here[key] = key in self.held

    def drop(self, key: Key) -> int:
        self._here[key] = False
        return super().drop(key)


class HotnessOnDemand:
    """The hottest experts in memory, each at the version that its heat earns; the others are fetched when needed.

    Heat is an expert's share of its layer's traffic, counted from calibration and while serving (heat.py); a layer's
    counts are added before it chooses. Every interval, bytes go to the upgrades that save the most per byte, in all
    layers together: heat times the loss saved. Between stored and the lowest version the loss is a wait, as long for
    every expert; it counts as much as leaving out an average expert.

    A layer's needed expert that is stored is fetched at the lowest version, the least that the pass can wait for. One
    that is in memory below its placement moves there beside passes (beside.py). The coldest of all layers leave.
    """

    def __init__(
        self,
        setting: Setting,
        heat: ExpertHeat,
        *,
        interval: float,
        by_loss: bool,
        margin: float,
        slack: int,
        prefetch: bool,
    ) -> None:
        """Take options of `HotnessOptions`; `by_loss` is `score=loss`."""
        self.needs = Needs(layers=True, prediction=prefetch)
        self._setting = setting
        self._heat = heat
        self._interval = interval
        self._margin = margin
        self._slack = slack
        self._lowest = setting.base - 1
        self._cache = _HottestStay(setting.experts, setting.sizes, setting.most)
        self._moves = Moves(self._cache, setting.experts, setting.sizes)
        wait = float(np.mean([(row[:, -1] - row[:, -2]).mean() for row in setting.losses]))
        self._ladders = []
        for sizes, losses in zip(setting.sizes, setting.losses, strict=True):
            known = losses.copy() if by_loss else np.tile(losses.mean(0), (len(losses), 1))
            known[:, -1] = known[:, -2] + wait
            self._ladders.append(Ladder(sizes, known, setting.base))
        self._earned = [np.full(n, setting.base, np.int64) for n in setting.experts]
        self._last: float | None = None
        for layer in range(len(setting.experts)):
            self._warm(layer)

    def worth(self, key: Key) -> float:
        """Return an expert's heat."""
        return float(self._cache.heat[key])

    def decide(self, event: Event) -> Wanted | None:
        """Return what a layer needs and what leaves for it; before any token, what the prior wants in memory."""
        room = sum(event.capacity)
        if isinstance(event, Interval):
            self._earn(room)
            keys = busiest([self._shares(p) for p in range(len(self._earned))])
            return self._cache.fill({k: p for k in keys if (p := self._at(k)) != self._setting.base}, room)
        if not isinstance(event, LayerReached):
            return None
        layer = event.layer
        placed = event.placed
        self._heat.add_layer(layer, event.counts)
        self._warm(layer)
        if self._last is None or event.time - self._last >= self._interval:
            if self._last is not None:
                self._heat.turn()
                self._earn(room)
            self._last = event.time
        if placed is not None and event.coming is not None:
            self._moves.settle(layer, placed, event.coming)
        changes = self._cache.serve(layer, self._wants(event.counts), room, placed, event.coming)
        if event.predicted is not None:
            changes |= self._cache.foresee(layer + 1, self._wants(event.predicted), room, changes)
        if placed is not None:
            self._moves.begin(layer, event.counts, self._shares(layer), self._earned[layer], room, changes)
        return changes

    def _wants(self, counts: Ints) -> dict[int, int]:
        return dict.fromkeys(ranked(counts, counts), self._lowest)

    def _at(self, key: Key) -> int:
        return int(self._earned[key[0]][key[1]])

    def _warm(self, layer: int) -> None:
        shares = self._heat.shares(layer)
        self._cache.heat[layer, : len(shares)] = shares

    def _shares(self, layer: int) -> Floats:
        out: Floats = self._cache.heat[layer, : self._setting.experts[layer]]
        return out

    def _earn(self, room: int) -> None:
        """Choose the placements that the experts earn by their heat, within `room` bytes of all layers together."""
        shares = [self._shares(p) for p in range(len(self._earned))]
        room -= self._moves.margin(room)
        rooms = SharedByLoss(self._ladders, shares).within(room)
        self._earned = [
            ladder.fill(shares[p], rooms[p], self._earned[p], self._margin, self._slack)
            for p, ladder in enumerate(self._ladders)
        ]
