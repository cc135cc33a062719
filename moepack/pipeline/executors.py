"""Executors: where a build's pieces are made. `local` makes them here; `ray` sends them to a Ray cluster.

Both make the same bytes: a piece is made on a fixed number of threads (piece.py). The local one is done with a
part when it was given it; Ray goes on while the next ones are calibrated, as far as its bounds let it (ray_executor).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moepack.cluster import asked, reach
from moepack.pack.errors import InputError, MissingExtraError
from moepack.runtime.devices.glibc import trim

from .bound import Placement, workers
from .dense_slice import DenseTask, make_slice
from .expert_batch import ExpertBatchTask, make_batch
from .layer_work import Advance, Given, LayerWork, Note, write_layer
from .piece import Piece, save_piece

if TYPE_CHECKING:
    import torch

    from .remote import Source

NAMES = ("local", "ray")


class Executor(Protocol):
    """Makes the parts of a model.

    Attributes:
        reads: whether it reads weights from the checkpoint itself; else it is given them.
    """

    reads: bool

    @property
    def left(self) -> int:
        """Experts and slices of parts that were taken which are not made yet."""
        ...

    def begin(self, source: Source, folder: Path, device: torch.device, how: Placement) -> None:
        """Be told of the checkpoint, of a folder that finished pieces are kept in, of where to compute, and how many
        pieces may be made at once in this process."""
        ...

    def submit(self, work: LayerWork, given: Given, advance: Advance) -> None:
        """Take a part; returns once there is room for another. `advance` is told of what is done."""
        ...

    def finished(self, wait: bool) -> Iterator[Note]:
        """The parts that became done; with `wait` all that were taken, as they become so."""
        ...

    def close(self) -> None:
        """Let go of what was started, and of what is not done."""
        ...


def check_engine(name: str, address: str | None) -> None:
    """See that there is such an executor, and that its cluster answers, before any work. See `open_executor`."""
    if name not in NAMES:
        raise InputError(f"engine {name!r} is unknown: there are {', '.join(NAMES)}")
    if name == "local" and address is not None:
        raise InputError("--address is a Ray cluster's: say --engine ray as well")
    if name == "ray" and importlib.util.find_spec("ray") is None:
        raise MissingExtraError("ray", "ray")
    if name == "ray":
        reach(asked(address))


def open_executor(name: str, address: str | None) -> Executor:
    """The executor that `--engine` names; `address` is a Ray cluster's.

    Raises:
        InputError: for an unknown one, or a cluster that does not answer.
        MissingExtraError: when Ray is not installed.
    """
    check_engine(name, address)
    if name == "local":
        return Local()
    from .ray_executor import OnRay

    return OnRay(address)


class Local:
    """In this process, on a CPU several pieces of a part at once (`workers`)."""

    reads = False

    left = 0

    def __init__(self) -> None:
        self._done: list[Note] = []
        self._device: torch.device | None = None
        self._batches = self._slices = 0

    def begin(self, source: Source, folder: Path, device: torch.device, how: Placement) -> None:
        """See `Executor`."""
        self._device, self._batches, self._slices = device, how.batches, how.slices

    def submit(self, work: LayerWork, given: Given, advance: Advance) -> None:
        """See `Executor`."""
        device, missing = self._device, work.missing
        assert device is not None
        advance(sum(task.count for i, task in enumerate(work.tasks) if i not in missing))

        def one(i: int) -> int:
            save_piece(_make(work.tasks[i], given, device), work.kept[i])
            return work.tasks[i].count

        dense = [i for i in missing if isinstance(work.tasks[i], DenseTask)]
        batches = [i for i in missing if i not in dense]
        for pieces, bound in ((dense, self._slices), (batches, self._batches)):  # those of a kind take about as much
            most = workers(device, max(map(work.memory, pieces), default=1))
            _at_once(one, pieces, min(most, bound or most), advance)
        self._done.append((work.part, write_layer(work)))

    def finished(self, wait: bool) -> Iterator[Note]:
        """See `Executor`."""
        while self._done:
            yield self._done.pop(0)

    def close(self) -> None:
        """Nothing was started."""


def _make(task: DenseTask | ExpertBatchTask, given: Given, device: torch.device) -> Piece:
    if isinstance(task, DenseTask):
        assert given.moments is not None
        return make_slice(task, given.tensors, *given.moments.of(task.matrix.module), device)
    from moepack.calibrate.held import release

    assert given.weights is not None and given.observation is not None
    made = make_batch(task, given.module, given.weights.select(task.experts), given.observation, device)
    for matrices in given.weights.weights:
        release(matrices)
    return made


def _at_once(one: Callable[[int], int], items: list[int], most: int, advance: Advance) -> None:
    """Do `one` of all items, `most` at a time; after an error no further one is begun."""
    if min(most, len(items)) < 2:
        for i in items:
            advance(one(i))
            trim()
        return
    left, running = list(items), set[Future[int]]()
    with ThreadPoolExecutor(most, "moepack-batch") as pool:
        while left or running:
            while left and len(running) < most:
                running.add(pool.submit(one, left.pop(0)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                advance(future.result())
            trim()
