"""What policies count: each `Reducer` adds a number to an expert's sum for each choice of a router. Pure.

A policy names the reducers that it needs (`Needs.sums`), and events bring their sums. Passes evaluate a reducer on the
device that runs the experts, and no pass waits for the numbers unless the policy lets it wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

Ints = npt.NDArray[np.int64]  # [experts]
Floats = npt.NDArray[np.float64]  # [experts]


@dataclass(slots=True)
class RouterOutput:
    """A layer's routing of a pass's tokens: tensors on the device that runs the experts."""

    index: Tensor  # integers [tokens, top_k], the chosen experts; a number past the last expert is none
    gates: Tensor  # [tokens, top_k], the weights of these experts
    # [tokens, experts], numbers whose softmax is the router's distribution. `None` in a compiled pass, where experts
    # run without their router, and unless the policy has a reducer with `reads_logits`
    logits: Tensor | None = None
    # bool [tokens], the heavy hitters. `None` without `Needs.importance`, outside prompts, and in a compiled pass
    heavy: Tensor | None = None

    def part(self, tokens: slice) -> RouterOutput:
        """Return the routing of some of the tokens."""
        logits = None if self.logits is None else self.logits[tokens]
        heavy = None if self.heavy is None else self.heavy[tokens]
        return RouterOutput(self.index[tokens], self.gates[tokens], logits, heavy)


@dataclass(frozen=True, slots=True, eq=False)
class Reducer:
    """A statistic of the router, summed for each expert over the tokens that are no padding."""

    # Returns what each choice adds, [tokens, top_k] or [tokens, 1], or `None` where nothing is added; it may not wait
    # for the device. Without a function each choice adds 1
    value: Callable[[RouterOutput], Tensor | None] | None = None
    reads_logits: bool = False  # whether `value` reads the logits; a model whose router does not give them is refused


COUNTS = Reducer()  # how often the router chose each expert: always the `counts` of events, never in `Needs.sums`
GATES = Reducer(lambda routing: routing.gates)  # sums of gate weights
# how many heavy hitters the router gave to each expert (dymoe, equation 2)
HEAVY = Reducer(lambda routing: None if routing.heavy is None else routing.heavy.unsqueeze(1))


def ranked(counts: Ints, *scores: Ints | Floats) -> list[int]:
    """Return the experts that have tokens, highest score first; ties of the first score are broken by the next."""
    here = counts.nonzero()[0]
    order = np.lexsort([-score[here] for score in reversed(scores)])
    out: list[int] = here[order].tolist()
    return out
