"""Place a layer's experts on a ladder within the layer's bytes, by the loss saved per byte. Pure numpy arithmetic.

Each placement of an expert has bytes and a loss. The placements on the convex hull form a chain of upgrades, each of
which saves less per byte than the one before. All losses of an expert are multiplied by its score, the number of its
tokens. So the chains are made once, and only the scores change.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Ladder:
    """The chains of upgrades of one layer's experts."""

    def __init__(self, sizes: Sequence[int], losses: Floats, base: int) -> None:
        """Make the chain of every expert, from the placement `base` up.

        `sizes` [placements] are bytes; `losses` are squared errors per token, float64 [experts, placements].
        """
        size = np.array(sizes, np.int64)
        loss = losses
        at = np.full(len(loss), base)
        rows = np.arange(len(loss))
        to = []
        cost = []
        saved = []
        while True:
            more = size[None, :] - size[at][:, None]
            less = loss[rows, at][:, None] - loss
            slope = np.where((more > 0) & (less > 0), less / np.maximum(more, 1), 0.0)
            best = slope.argmax(1)
            climbs = slope[rows, best] > 0
            if not climbs.any():
                break
            to.append(np.where(climbs, best, -1))
            cost.append(np.where(climbs, more[rows, best], 0))
            saved.append(np.where(climbs, less[rows, best], 0.0))
            at = np.where(climbs, best, at)
        # the lowest placement; the number of upgrades in the longest chain
        self.base = base
        self.steps = len(to)
        # Arrays [experts, steps]: the placement to which each upgrade leads (-1 behind the chain's end), the bytes that
        # the upgrade adds, and the loss that it saves per token (0 behind the chain's end)
        self.to: Ints = np.array(to, np.int64).reshape(-1, len(loss)).T
        self.cost: Ints = np.array(cost, np.int64).reshape(-1, len(loss)).T
        self.saved: Floats = np.array(saved, np.float64).reshape(-1, len(loss)).T
        self._rate: Floats = self.saved / np.maximum(self.cost, 1)
        self.first: Floats = self._rate[:, 0] if self.steps else np.zeros(len(loss))  # [experts], rate of first upgrade
        self._loss = loss
        self._size = size
        self._sizes, self._least = size.tolist(), int(self.cost[self.cost > 0].min()) if self.steps else 0

    def rates(self, scores: Floats) -> Floats:
        """Return the loss that every upgrade saves per byte, [experts, steps], for these tokens of experts."""
        out: Floats = scores[:, None] * self._rate
        return out

    def rate_to(self, experts: Ints, placements: Ints) -> Floats:
        """Return the loss that these placements of `experts` save per token and byte over the base, [experts]."""
        more = self._size[placements] - self._size[self.base]
        out: Floats = (self._loss[experts, self.base] - self._loss[experts, placements]) / np.maximum(more, 1)
        return out

    def loss(self, scores: Floats, placements: Ints) -> float:
        """Return the layer's loss for `scores` tokens of each expert, with the experts at these placements."""
        return float((scores * self._loss[np.arange(len(scores)), placements]).sum())

    def fill(
        self,
        scores: Floats,
        room: int,
        held: Ints | None = None,
        margin: float = 0.0,
        slack: int = 0,
        most: Sequence[int] | None = None,
    ) -> Ints:
        """Choose a placement for each expert, within `room` bytes beyond the base; return int64 [experts].

        Args:
            scores: float64 [experts], tokens.
            room: bytes.
            held: int64 [experts], the placements of an earlier answer; upgrades that led to them are incumbents.
            margin: a newcomer replaces an incumbent only if its rate is more than (1 + margin) times the incumbent's.
            slack: an incumbent stays while its rank is less than this many places below the last upgrade that fits.
            most: [placements], the most experts at each but the base, if memory is divided into blocks by placement.
        """
        chosen = np.full(len(scores), self.base, np.int64)
        if not self.steps or room < self._least:
            return chosen
        rates = self.rates(scores)
        order = self._order(rates, room, held, margin, slack).tolist()
        left = room
        place = chosen.tolist()
        sizes = self._sizes
        taken = [0] * len(sizes)
        steps = self.steps
        to = self.to.ravel().tolist()
        moved = True
        while moved:
            moved = False
            for upgrade in order:
                if left < self._least:
                    break
                expert = upgrade // steps
                target = to[upgrade]
                now = place[expert]
                more = sizes[target] - sizes[now]
                if not 0 < more <= left or (most is not None and taken[target] >= most[target]):
                    continue
                place[expert], left = target, left - more
                taken[now] -= 1
                taken[target] += 1
                moved = most is not None  # another expert may take the freed place
        return np.array(place, np.int64)

    def _order(self, rates: Floats, room: int, held: Ints | None, margin: float, slack: int) -> Ints:
        """Return upgrades that save loss, best first, those to `held` favoured, as expert * steps + chain index."""
        flat = rates.ravel()
        order = np.argsort(-flat, kind="stable")
        order = order[: np.count_nonzero(flat > 0)]
        if held is None or not (margin or slack):
            return order
        led = (self.to >= 0) & (self._size[self.to] <= self._size[held][:, None])  # upgrades to the placements held
        has = led.ravel()[order]
        fits = int(np.searchsorted(np.cumsum(self.cost.ravel()[order]), room, side="right"))
        stays = has & (np.arange(len(order)) < fits + slack)
        value = np.where(stays, np.inf, flat[order] * np.where(has, 1 + margin, 1.0))
        return order[np.argsort(-value, kind="stable")]


class SharedByLoss:
    """The upgrades of all layers in the order of the loss that they save per byte."""

    def __init__(self, ladders: Sequence[Ladder], traffic: Sequence[Sequence[float] | Floats]) -> None:
        """`traffic` [layers][experts] counts tokens."""
        tokens = [np.asarray(row, np.float64) for row in traffic]
        rates = [ladder.rates(row).ravel() for ladder, row in zip(ladders, tokens, strict=True)]
        layer = np.repeat(np.arange(len(rates)), [len(row) for row in rates])
        rate = np.concatenate(rates)
        cost = np.concatenate([ladder.cost.ravel() for ladder in ladders])
        order = np.argsort(-rate, kind="stable")
        order = order[rate[order] > 0]
        self._layers = len(rates)
        self._layer = layer[order]
        self._cost = cost[order]
        self._taken = np.cumsum(self._cost)

    def within(self, room: int) -> list[int]:
        """Return the bytes that each layer may use above the base: the best upgrades are taken until `room` is used."""
        n = int(np.searchsorted(self._taken, room, side="right"))
        out: list[int] = np.bincount(self._layer[:n], self._cost[:n], minlength=self._layers).astype(np.int64).tolist()
        return out
