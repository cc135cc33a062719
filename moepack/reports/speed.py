"""Predict how long decoding a token takes: arithmetic on a bundle's headers and tables, and on measured rates.

A token reads its dense tensors at the memory's rate and its experts at the kernels', runs each layer's calls, and waits
for experts that are fetched. The last is left out under policies that never wait. machine_rates.py measures the rates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from moepack.runtime.policies.contract import FLOOR, Decoding

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle
    from moepack.runtime.policies.contract import Versions
    from moepack.runtime.policies.registry import Policy

Floats = npt.NDArray[np.float64]
# Prefetch waits for two fifths of the bytes, and reads 1.4 times as many in all (docs/design/demand.md).
WAITED = 0.4
AHEAD = 1.4


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured rates of this machine."""

    memory: float  # bytes that all threads read
    kernels: float  # bytes of experts that the kernels multiply by, for one token
    disk: float  # bytes of extents that are fetched, as many at a time as a layer lacks
    layer: float  # seconds of a layer's calls, beside the reading of weights
    moves: float  # bytes of extents that one thread reads, digests and puts into fresh memory


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Bytes that decoding one token reads or transfers."""

    layers: int
    version: str  # of most of its experts, or of those that it waits for
    in_flight: float  # experts that a layer waits for at a time
    dense: int  # bytes outside the experts, with the cache's
    experts: int  # bytes of the experts that it is routed to
    fetched: int = 0  # of these, bytes that it waits for, were nothing fetched ahead
    prefetch: bool = False
    moved: float | None = 0.0  # the most bytes a second that experts move beside passes; None: no limit


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds per decoded token, by cause."""

    memory: float
    processor: float
    disk: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of one sequence a second."""
        return 1 / (self.memory + self.processor + self.disk)

    @property
    def bound_by(self) -> str:
        """Return the cause that takes the most seconds."""
        named = {"memory bandwidth": self.memory, "processor": self.processor, "disk": self.disk}
        return max(named, key=lambda name: named[name])


def token_bytes(bundle: Bundle, policy: Policy, table: Versions, dense: int, chosen: int) -> TokenBytes | None:
    """Return what a token moves under a policy that serves the map `table`, with `dense` bytes beside experts.

    None for policies that compute elsewhere, leave out experts in a pass or decode ahead of passes: these are not
    predicted.
    """
    tables = bundle.calibration()
    names = [name for row in table for name in row]
    served = set(names) - {"stored", "absent"}
    decoding = policy.options.decoding if policy.is_live else Decoding()
    if decoding is None or not served <= {v.name for v in bundle.versions} or not served:
        return None
    on_demand = policy.is_live and policy.options.on_demand
    waits = decoding.waits_for != "none"
    usual = max(served, key=names.count)
    placements = [v.name for v in bundle.versions if v.name in names]
    fetched = placements[-1] if decoding.fetches_lowest else placements[0]
    likely = [chances(x.tokens.astype(np.float64) + 1, chosen) for x in tables.layers]
    held = [np.array([name not in ("stored", "absent") for name in row]) for row in table]
    missed = [0.0] * len(table)
    if decoding.waits_for == "recent":
        missed = recent_misses(likely, names.count(fetched))
    elif decoding.waits_for == "held":
        missed = held_misses(likely, held)
    new = [fresh(q, float(tables.statistic(p, "reuse"))) for p, q in enumerate(likely)]
    missed = [a * b for a, b in zip(missed, new, strict=True)]
    read = moved = 0.0
    for p, (layer, row, q) in enumerate(zip(bundle.layers, table, likely, strict=True)):
        sizes = {
            name: bundle.manifest.version(name).resident_size(layer.matrices)
            for name in {*row, fetched}
            if name not in ("stored", "absent")
        }
        sizes |= {} if waits else {"absent": 0}  # not fetched
        read += sum(float(n) * sizes.get(name, sizes[fetched]) for n, name in zip(q, row, strict=True))
        moved += missed[p] * bundle.layer_file(fetched, p).extent_size(0)
    several = max(1.0, sum(missed) / len(missed))
    prefetch = getattr(policy.options, "prefetch", "no") == "yes" and waits
    version = fetched if waits else usual
    several_versions = len(placements) > 1 or "absent" in names
    if on_demand:  # what the first map lacks may come later
        several_versions = any(len(ladder) > 2 for ladder in policy.options.ladders(bundle.versions))
    moves = decoding.moves and several_versions
    limit = policy.options.bytes_per_second if moves else 0.0
    if limit:  # a smaller copy counts as FLOOR bytes
        limit *= min(1.0, bundle.layer_file(placements[0], 0).extent_size(0) / FLOOR)
    return TokenBytes(len(table), version, several, dense, round(read), round(moved), prefetch, limit)


def speed(token: TokenBytes, rates: Rates) -> Speed:
    """Return the seconds of a token.

    Kernels slower than the memory keep the processor busy: the difference counts as its time.
    """
    memory = (token.dense + token.experts) / rates.memory
    slower = token.experts * max(0.0, 1 / rates.kernels - 1 / rates.memory)
    processor = slower + token.layers * rates.layer
    disk = token.fetched / rates.disk
    if token.prefetch:
        disk = max(WAITED * disk, AHEAD * disk - memory - processor)
    return Speed(memory, processor, disk)


def while_moving(found: Speed, token: TokenBytes, rates: Rates, threads: int, cores: int) -> Speed:
    """Return the seconds of a token while experts move to other versions, as after a text has shifted.

    One thread moves them. Where it and the threads of passes are more than the cores, each gets its share of these.
    """
    busy = 1.0 if token.moved is None else min(1.0, token.moved / rates.moves)
    share = max(1.0, (threads + busy) / max(threads, cores))
    return replace(found, memory=found.memory * share, processor=found.processor * share)


def chances(tokens: Floats, chosen: int) -> Floats:
    """Return how likely a token is to choose each expert of a layer, from calibration's counts [experts].

    They sum to `chosen`; none is above 1, and what is above goes to the others.
    """
    out: Floats = np.zeros(len(tokens))
    chosen = min(chosen, len(tokens))
    left = np.ones(len(tokens), bool)
    while left.any():
        part = np.where(left, tokens, 0.0)
        out[left] = (part / part.sum() * (chosen - (~left).sum()))[left]
        if not (over := left & (out > 1)).any():
            break
        out[over], left = 1.0, left & ~over
    return out


def fresh(chances: Floats, reuse: float) -> float:
    """Return the share of a layer's choices that do not follow from the token before.

    `reuse` is the measured share of experts that the token before used too; independent tokens would share the sum of
    squared chances by themselves. What is above that is locality, and always finds its experts there.
    """
    alone = float(np.square(chances).sum() / chances.sum())
    return 1.0 if alone >= 1 else float(np.clip((1 - reuse) / (1 - alone), 0.0, 1.0))


def held_misses(chances: Sequence[Floats], held: Sequence[npt.NDArray[np.bool_]]) -> list[float]:
    """Return the experts of each layer that a token lacks, if a fixed set is held: [layers]."""
    return [float(q[~there].sum()) for q, there in zip(chances, held, strict=True)]


def recent_misses(chances: Sequence[Floats], capacity: float) -> list[float]:
    """Return the experts of each layer that a token lacks, if the last used are held, `capacity` in all layers.

    Che's approximation: an expert stays for the same time t after its last use, and t is that with which as many are
    expected there as fit.
    """
    every = np.concatenate(chances)
    if capacity >= (every > 0).sum():
        return [0.0] * len(chances)
    low = 0.0
    high = 1.0
    while np.sum(1 - np.exp(-every * high)) < capacity and high < 1e12:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if np.sum(1 - np.exp(-every * middle)) < capacity else (low, middle)
    return [float((q * np.exp(-q * low)).sum()) for q in chances]
