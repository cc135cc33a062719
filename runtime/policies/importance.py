"""`importance`: each layer's important experts at high precision, loaded when it is reached, and before (dymoe). Pure.

No expert has a resident version: what a layer needs and the cache lacks is fetched, and the pass waits for it; experts
that the next layer will need by prediction are fetched meanwhile. Decides nothing about how attention is measured or
routing predicted: both come with the events.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from moepack.pack.errors import InputError
from moepack.pack.spec import Version

from .contract import (
    Changes,
    Entry,
    Event,
    Floats,
    Ints,
    Key,
    Ladder,
    LayerReached,
    LiveOptions,
    Needs,
    Setting,
    read_options,
)
from .mixed_cache import MixedCache
from .placements import ABSENT, on_device

HIGH = 0  # the ladder's first placement; the low one is the second, which with `lo=absent` is the base too
LOW = 1
WORKSPACE = 1 << 18, 64 << 20  # bytes in which attention is added up: the least is a head's weights of 21,000 keys


@dataclass(frozen=True, slots=True)
class ImportanceOptions(LiveOptions):
    """What follows `importance:`.

    Attributes:
        hi: the version of critical experts; without it the best of at most 4 bits.
        lo: that of the others, or `absent`: they are left out. Without it `w2`, or the best below `hi`.
        r: the average over layers of the share of experts that are critical, from 0.5 to 1.
        heavy: the share of a prompt's tokens that are heavy hitters, at least one of them.
        by: what makes an expert critical: "importance" (heavy hitters in a prompt, gate weights in decoding), "counts"
            in place of the former, or "random", to compare with.
        prefetch: whether what the next layer will need is fetched ahead.
        reuse: "yes": an expert that is there at high precision is served so where low would do; "no": it is replaced,
            so that results do not depend on what was asked before.
        renormalise: with `lo=absent`, whether the weights of a token's experts that stay make up for the others'.
        seed: of `by=random`.
    """

    CHOICES: ClassVar[dict[str, tuple[str, ...]]] = {
        **LiveOptions.CHOICES, "by": ("importance", "counts", "random"), "prefetch": ("yes", "no"),
        "reuse": ("yes", "no"), "renormalise": ("yes", "no"),
    }  # fmt: skip

    hi: str = ""
    lo: str = ""
    r: float = 0.75
    heavy: float = 0.2
    by: str = "importance"
    prefetch: str = "yes"
    reuse: str = "yes"
    renormalise: str = "no"
    seed: int = 0

    def __post_init__(self) -> None:
        LiveOptions.__post_init__(self)
        if not 0.5 <= self.r <= 1:
            raise ValueError("r is from 0.5 to 1")
        if not 0 < self.heavy <= 1:
            raise ValueError("heavy is above 0, up to 1")
        if self.seed < 0:
            raise ValueError("seed is from 0")

    def ladders(self, versions: Sequence[Version]) -> list[Ladder]:
        """High, low if there is one, and absent: one ladder."""
        names = [v.name for v in versions]
        small = [v.name for v in versions if v.bits <= 4]
        high = on_device(self.hi or (small or names)[0], versions)
        below = names[names.index(str(high)) + 1 :]
        lo = self.lo or ("w2" if "w2" in below else (below or [str(ABSENT)])[0])
        if lo == str(ABSENT):
            return [(high, ABSENT)]
        low = on_device(lo, versions)
        if lo not in below:
            raise InputError(f"lo={lo} is not below hi={high}")
        return [(high, low, ABSENT)]

    @property
    def keeps_low(self) -> bool:
        """The base takes no memory: it is always there."""
        return True

    @property
    def spare_blocks(self) -> int:
        """Nothing is demoted into a block."""
        return 0

    @property
    def on_demand(self) -> bool:
        """Always."""
        return True

    @property
    def workspace(self) -> tuple[int, int]:
        """For attention."""
        return WORKSPACE if self.by == "importance" else (0, 0)

    @property
    def makes_up_for_absent(self) -> bool:
        """As `renormalise` says."""
        return self.renormalise == "yes"


def retention(layer: int, layers: int, r: float) -> float:
    """The share of a layer's experts that are critical, r(l) (equation 4); its mean over layers is `r`.

    Lambda is 2 r - 1, as the cosine's mean is one half. Of one layer alone it is `r` itself.
    """
    if layers == 1:
        return r
    least = 2 * r - 1
    return (1 - least) * (math.cos(math.pi * layer / (layers - 1)) + 1) / 2 + least


def critical(share: float, experts: int) -> int:
    """How many of so many experts are critical, t_l (equation 5)."""
    return math.ceil(share * experts - 1e-9)  # 0.7 x 10 is 7, whatever the product's last bit says


class Importance:
    """Critical experts at high precision, the others at low or left out (dymoe, section 4).

    Where the paper leaves it open: M of equation 5 is the number of experts that the step needs in the layer. With all
    of the layer's, t_l would pass top_k in decoding, and nothing would ever be of low precision; in a prompt that needs
    all of them it is the same, and a short one is nearer to decoding.
    """

    def __init__(self, setting: Setting, options: ImportanceOptions | None = None) -> None:
        self._options = options = options or ImportanceOptions()
        gated = options.by != "random"
        self.needs = Needs(
            layers=True, gates=gated, importance=options.heavy if options.by == "importance" else 0.0,
            prediction=options.prefetch == "yes",
        )  # fmt: skip
        layers = len(setting.experts)
        self._shares = [retention(layer, layers, options.r) for layer in range(layers)]
        self._low = min(LOW, setting.base)
        self._base = setting.base
        self._random = np.random.default_rng(options.seed)
        self._cache = MixedCache(setting.sizes, options.reuse == "yes", setting.most)

    def decide(self, event: Event) -> Changes | None:
        """What the layer needs and the cache lacks, what the next one will need, and what leaves for both."""
        if not isinstance(event, LayerReached):
            return None
        room = sum(event.capacity)
        wants = self._designated(event.layer, self._ranked(event))
        changes = self._cache.serve(event.layer, wants, room, event.placed, event.coming)
        if event.predicted is not None and event.predicted_gates is not None:
            ahead = self._ahead(event.layer + 1, event.is_prompt, event.predicted, event.predicted_gates)
            changes |= self._cache.foresee(event.layer + 1, ahead, room, changes)
        return changes

    def _ranked(self, event: LayerReached) -> list[int]:
        """The experts that the step needs, the most important first (equations 2 and 3)."""
        if self._options.by == "random":
            chosen: list[int] = self._random.permutation(event.counts.nonzero()[0]).tolist()
            return chosen
        assert event.gates is not None
        if not event.is_prompt:
            return ranked(event.counts, event.gates)
        if event.important is not None:
            return ranked(event.counts, event.important, event.counts)
        return ranked(event.counts, event.counts)

    def _designated(self, layer: int, experts: Sequence[int]) -> dict[int, int]:
        """Each at its precision."""
        high = critical(self._shares[layer], len(experts))
        return {e: HIGH if i < high else self._low for i, e in enumerate(experts)}

    def _ahead(self, layer: int, is_prompt: bool, counts: Ints, gates: Floats) -> dict[int, int]:
        """What to fetch ahead: of a prompt the most frequent ones, in decoding the predicted ones themselves (equations
        7 and 8)."""
        wants = self._designated(layer, ranked(counts, counts, gates) if is_prompt else ranked(counts, gates))
        return {e: v for e, v in wants.items() if v == HIGH or (v != self._base and not is_prompt)}

    def worth(self, key: Key) -> float:
        """What was used last goes last."""
        return float(self._cache.last_used(key))


def ranked(counts: Ints, *scores: Ints | Floats) -> list[int]:
    """The experts that have any tokens, by the first score, then by the next, the highest first."""
    here = counts.nonzero()[0]
    order = np.lexsort([-score[here] for score in reversed(scores)])
    out: list[int] = here[order].tolist()
    return out


ENTRY = Entry(
    name="importance",
    usage="importance[:KEY=VALUE,...]",
    parse=lambda text: read_options(ImportanceOptions, text),
    needs_budget=True,
    make=Importance,
)
