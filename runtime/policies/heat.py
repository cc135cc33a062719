"""Heat: how much of each layer's traffic every expert gets, from calibration (the prior) and from serving. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moepack.runtime.allocation.knapsack import Table

from .contract import Counts, in_turns
from .reducers import Floats, Ints


class ExpertHeat:
    """Scores S of all experts (dynaexq, section 3.5): after an interval with counts c, S is alpha S + (1 - alpha) c.

    The prior counts as an interval before the first: once a layer has counts, its scores are scaled to their sum. It
    also keeps a lasting weight, `anchor` times that of the scores.
    """

    def __init__(self, traffic: Table, alpha: float, anchor: float, has_prior: bool) -> None:
        """Begin with calibration's `traffic` [layers][experts] as scores, or without `has_prior` with zeros."""
        rows = [np.array(row, np.float64) for row in traffic]
        self._alpha = alpha
        self._anchor = anchor if has_prior else 0.0
        self._prior = [row / row.sum() for row in rows]
        self.scores = [row.copy() if has_prior else np.zeros(len(row)) for row in rows]
        self._is_prior = [has_prior] * len(rows)
        self._counts = [np.zeros(len(row), np.int64) for row in rows]

    def add(self, counts: Counts) -> None:
        """Add up counts of all layers, [layers] of [experts]."""
        for mine, new in in_turns(zip(self._counts, counts, strict=True)):
            mine += new

    def add_layer(self, layer: int, counts: Ints) -> None:
        """Add up counts of one layer."""
        self._counts[layer] += counts

    @property
    def has_counts(self) -> bool:
        """Whether any expert was counted since the last `turn`."""
        return any(row.any() for row in self._counts)

    def turn(self) -> None:
        """End an interval: put its counts into the scores."""
        for p, counts in in_turns(enumerate(self._counts)):
            self.scores[p] = self._with_counts(p)
            self._is_prior[p] = self._is_prior[p] and not counts.any()
            counts[:] = 0

    def _with_counts(self, layer: int) -> Floats:
        scores = self.scores[layer]
        counts = self._counts[layer]
        scale = 1.0
        if self._is_prior[layer] and counts.any():
            scale = counts.sum() / scores.sum()
        out: Floats = self._alpha * scale * scores + (1 - self._alpha) * counts
        return out

    def values(self) -> list[Floats]:
        """Return every expert's score with the prior's lasting weight, [layers] of [experts], as of the last `turn`."""
        return [self._weighed(s, q) for s, q in in_turns(zip(self.scores, self._prior, strict=True))]

    def shares(self, layer: int) -> Floats:
        """Return the share of a layer's traffic that each of its experts gets, as if the interval ended now."""
        out = self._weighed(self._with_counts(layer), self._prior[layer])
        whole = out.sum()
        return out / whole if whole else out

    def _weighed(self, scores: Floats, prior: Floats) -> Floats:
        out: Floats = scores + self._anchor * scores.sum() * prior
        return out


def busiest(values: Sequence[Floats]) -> list[tuple[int, int]]:
    """Return all experts as (layer position, expert), those of the largest values [layers] of [experts] first."""
    keys = [(p, e) for p, row in enumerate(values) for e in range(len(row))]
    order = np.argsort(-np.concatenate(values), kind="stable").tolist() if keys else []
    return [keys[i] for i in order]
