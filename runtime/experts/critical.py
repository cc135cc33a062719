"""Which of the experts that a pass needs in a layer run at the best version, chosen in the pass (dymoe, section 4.2).

A policy over pinned memory may let a layer choose by itself (`LiveOptions.critical`): both versions of every expert are
where kernels read them, so no pass waits for one. On a GPU one launch ranks the experts by the step's counters and
writes the words that the layer's kernels then take in place of the handle table; it is the same whatever is ranked, so
a CUDA graph may hold it. Elsewhere the host ranks them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from moepack.runtime.kernels.forms import handle
from moepack.runtime.policies.contract import critical_count
from moepack.runtime.policies.reducers import COUNTS, Reducer, ranked
from moepack.runtime.step.context import Step

from .handles import Handle, Snapshot

if TYPE_CHECKING:
    from .handles import ServedLayer


class Critical:
    """The choice of one layer. Experts that padding alone needs are never critical: counters leave it out."""

    def __init__(
        self, of: ServedLayer, share: float, best: tuple[Handle, ...], by: Callable[[bool], tuple[Reducer, ...]]
    ) -> None:
        """Choose a `share` of the needed experts; `best` are handles of all experts, [experts], in pinned memory.

        `by` is `LiveOptions.critical_by`.
        """
        self._by = by
        self.best = best
        version = best[0].version
        assert version is not None
        self._number = np.uint64(of.numbers[version.name])
        self._words = np.array([handle(made.extent.data_ptr(), int(self._number)) for made in best], np.uint64)
        self._most = [critical_count(share, n) for n in range(len(best) + 1)]  # of n needed experts
        with torch.inference_mode(False):
            self._most_there = torch.tensor(self._most, dtype=torch.int32).to(of.device)

    def seconds(self, snapshot: Snapshot) -> npt.NDArray[np.int64]:
        """The word of each expert's best version, int64 [experts]: the active one if it is that, else in pinned memory.

        For `ServedLayer.second`.
        """
        here = (snapshot.table & np.uint64(63)) == self._number
        return np.where(here, snapshot.table, self._words).view(np.int64)

    def choose(self, snapshot: Snapshot, step: Step, position: int) -> Snapshot:
        """Return the layer's experts as the pass runs them: critical ones at the best version, others as they are.

        Waits for no device. On a GPU the kernels' words change alone; handles stay those of the active versions.

        Args:
            snapshot: the layer's experts as the step began.
            step: the running step, whose counters have the layer's routing.
            position: the layer's position.
        """
        by = self._by(step.prompt.several)
        if snapshot.of.backend == "triton":
            from . import gpu

            score, *ties = (step.counters.row(position, reducer) for reducer in by)
            scores = score, ties[0] if ties else None
            words = gpu.critical_words(snapshot, step.counters.counts[position], scores, self._most_there)
            return snapshot.at(words)
        counts, sums = step.counters.layer(position)
        order = ranked(counts, *(counts if reducer is COUNTS else sums[reducer] for reducer in by))
        table = snapshot.table.copy()
        handles = list(snapshot.handles)
        for e in order[: self._most[len(order)]]:
            if handles[e].version != self.best[e].version:
                table[e], handles[e] = self._words[e], self.best[e]
        return Snapshot(snapshot.of, table, tuple(handles))
