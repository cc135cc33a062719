"""Executors: where a build's expert batches are made. `local` makes them here; `ray` sends them to a Ray cluster.

Both make the same bytes: a batch is made on a fixed number of threads (expert_batch.py). The local one is done with a
layer when it was given it; Ray goes on while the next ones are calibrated, as far as its bounds let it (ray_executor).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from moepack.cluster import asked, reach
from moepack.pack.errors import InputError, MissingExtraError
from moepack.runtime.devices.glibc import trim

from .expert_batch import make_batch, save_batch
from .layer_work import Advance, LayerWork, Note, write_layer

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation

    from .remote import Source

NAMES = ("local", "ray")


class Executor(Protocol):
    """Makes layers.

    Attributes:
        reads: whether it reads weights from the checkpoint itself; else it is given them.
    """

    reads: bool

    @property
    def left(self) -> int:
        """Experts of layers that were taken which are not made yet."""
        ...

    def begin(self, source: Source, folder: Path, device: torch.device, most: int) -> None:
        """Be told of the checkpoint, of a folder that finished pieces are kept in, of where to compute, and how many
        batches may be made at once in this process; 0 leaves that to the executor."""
        ...

    def submit(
        self, work: LayerWork, observation: Observation, module: Any, weights: ExpertWeights | None, advance: Advance
    ) -> None:
        """Take a layer; returns once there is room for another. `advance` is told of experts that are done."""
        ...

    def finished(self, wait: bool) -> Iterator[Note]:
        """The layers that became done; with `wait` all that were taken, as they become so."""
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
    """In this process, on a CPU several batches of a layer at once (`workers`)."""

    reads = False

    left = 0

    def __init__(self) -> None:
        self._done: list[Note] = []
        self._device: torch.device | None = None
        self._most = 0

    def begin(self, source: Source, folder: Path, device: torch.device, most: int) -> None:
        """See `Executor`."""
        self._device, self._most = device, most

    def submit(
        self, work: LayerWork, observation: Observation, module: Any, weights: ExpertWeights | None, advance: Advance
    ) -> None:
        """See `Executor`."""
        from moepack.calibrate.held import release

        device = self._device
        assert weights is not None and device is not None

        missing = work.missing
        advance(sum(len(task.experts) for i, task in enumerate(work.tasks) if i not in missing))

        def one(i: int) -> int:
            task = work.tasks[i]
            save_batch(make_batch(task, module, weights.select(task.experts), observation, device), work.kept[i])
            for matrices in weights.weights:
                release(matrices)
            return len(task.experts)

        _at_once(one, missing, self._most or workers(device, work.batch_memory), advance)
        self._done.append((work.layer.index, write_layer(work)))

    def finished(self, wait: bool) -> Iterator[Note]:
        """See `Executor`."""
        while self._done:
            yield self._done.pop(0)

    def close(self) -> None:
        """Nothing was started."""


def workers(device: torch.device, need: int) -> int:
    """Batches of `need` bytes that are made here at once: one on a GPU, which has no cores to share out; on a CPU one a
    thread of torch's, as far as half of the memory that is available holds them. Their number changes no byte."""
    import psutil
    import torch

    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), int(psutil.virtual_memory().available // 2 // need)))


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
