"""A build on a cluster as a few queues: what it takes from the times of its pieces. Pure; measures nothing.

What is simulated, and so assumed:

- One process calibrates layer after layer, on half of the first node's cores; the others quantise. When it is through,
  its cores quantise too.
- A batch is one core's. It waits for a core, fetches its layer's tokens where its node does not have them, reads its
  weights, computes, writes. Cores of nodes that have a layer's tokens are preferred.
- The shared filesystem, and the first node's link, serve one after another at a fixed rate. A layer's files are written
  once its batches are there: these are read, and written again.
- Calibration waits while `AHEAD` batches a core are given out, of more than one layer, or while the tokens of another
  layer would not fit.
- Cores are alike and do not slow one another; nothing dies. Calibration gets faster in proportion to its cores.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from moepack.pipeline.executors.on_ray import AHEAD

INFINITE = float("inf")


@dataclass(frozen=True, slots=True)
class Job:
    """A build by its pieces. Seconds are one core's.

    Attributes:
        layers, batches: layers with experts, and batches of one.
        calibrate: seconds a layer.
        quantise: seconds a batch.
        tokens: bytes of what a layer's experts saw.
        weights: bytes that a batch reads.
        made: bytes that a batch writes.
    """

    layers: int
    batches: int
    calibrate: float
    quantise: float
    tokens: float = 0.0
    weights: float = 0.0
    made: float = 0.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines.

    Attributes:
        nodes, cores: of the cluster, and of a node.
        disk: bytes a second of the filesystem that all share.
        network: bytes a second of a node's link.
        store: bytes of tokens of unfinished layers that the first node holds.
    """

    nodes: int
    cores: int
    disk: float = INFINITE
    network: float = INFINITE
    store: float = INFINITE


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a simulation says, in seconds.

    Attributes:
        seconds: until the last layer's files are there.
        calibrated: until calibration was through.
        floors: what each resource alone would take; of the network, for what this schedule sent.
    """

    seconds: float
    calibrated: float
    floors: dict[str, float]

    @property
    def bound(self) -> str:
        """The resource that has the highest floor."""
        return max(self.floors, key=self.floors.__getitem__)


class _Server:
    """Something that serves one after another."""

    def __init__(self, rate: float) -> None:
        self._rate, self._free, self.busy = rate, 0.0, 0.0

    def serve(self, now: float, size: float) -> float:
        """When `size` bytes asked for now are through."""
        self.busy += size / self._rate
        self._free = max(now, self._free) + size / self._rate
        return self._free


class _Build:
    """The state of a simulated build."""

    def __init__(self, job: Job, cluster: Cluster) -> None:
        self.job, self.cluster = job, cluster
        self._helping = max(1, cluster.cores // 2)  # cores that calibrate
        self._idle = [max(0, cluster.cores - self._helping), *(cluster.cores for _ in range(cluster.nodes - 1))]
        self._limit = AHEAD * max(1, sum(self._idle))
        self._disk, self.link = _Server(cluster.disk), _Server(cluster.network)
        self._waiting: deque[int] = deque()  # batches by their layers
        self._out = 0
        self._left: dict[int, int] = {}  # layer -> batches of it that are not made
        self._arrived: dict[tuple[int, int], float] = {}  # (node, layer) -> when its tokens are there
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        self._next = 0
        self._stopped = False
        self.calibrated = self.end = 0.0

    def run(self) -> None:
        """Until nothing happens any more."""
        self._calibrate(0.0)
        while self._events:
            now, _, happens = heapq.heappop(self._events)
            happens(now)

    def _at(self, time: float, happens: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), happens))

    def _calibrate(self, now: float) -> None:
        self._at(now + self.job.calibrate / self._helping, self._submit)

    def _submit(self, now: float) -> None:
        layer, self._next = self._next, self._next + 1
        self._left[layer] = self.job.batches
        self._out += self.job.batches
        self._waiting.extend([layer] * self.job.batches)
        self._stopped = True
        if self._next == self.job.layers:
            self.calibrated, self._stopped = now, False
            self._idle[0] += self._helping
        self._room(now)
        self._give_out(now)

    def _room(self, now: float) -> None:
        fits = (len(self._left) + 1) * self.job.tokens <= self.cluster.store
        if self._stopped and (not self._left or (fits and (self._out < self._limit or len(self._left) == 1))):
            self._stopped = False
            self._calibrate(now)

    def _give_out(self, now: float) -> None:
        while self._waiting and any(self._idle):
            layer = self._waiting.popleft()
            free = [n for n, idle in enumerate(self._idle) if idle]
            node = next((n for n in free if n == 0 or (n, layer) in self._arrived), free[0])
            self._idle[node] -= 1
            there = self._arrived.get((node, layer), now if node == 0 else None)
            if there is None:
                there = self._arrived[node, layer] = self.link.serve(now, self.job.tokens)
            self._at(max(now, there), lambda t, node=node, layer=layer: self._read(t, node, layer))  # type: ignore[misc]

    def _read(self, now: float, node: int, layer: int) -> None:
        ready = self._disk.serve(now, self.job.weights) + self.job.quantise
        self._at(ready, lambda t: self._at(self._disk.serve(t, self.job.made), lambda u: self._made(u, node, layer)))

    def _made(self, now: float, node: int, layer: int) -> None:
        self._idle[node] += 1
        self._out -= 1
        self._left[layer] -= 1
        if not self._left[layer]:
            del self._left[layer]
            self.end = max(self.end, self._disk.serve(now, 2 * self.job.batches * self.job.made))
        self._room(now)
        self._give_out(now)


def simulate(job: Job, cluster: Cluster) -> Outcome:
    """Go through a build on a cluster."""
    build = _Build(job, cluster)
    build.run()
    batches = job.layers * job.batches
    floors = {
        "calibration": job.layers * job.calibrate / max(1, cluster.cores // 2),
        "cores": (batches * job.quantise + job.layers * job.calibrate) / (cluster.nodes * cluster.cores),
        "disk": batches * (job.weights + 3 * job.made) / cluster.disk,
        "network": build.link.busy,
    }
    return Outcome(build.end, build.calibrated, floors)
