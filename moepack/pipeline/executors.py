"""Executors: where a build's expert batches are made. `local` makes them here; `ray` sends them to a Ray cluster.

Both give the same results in the same order: what a batch's bytes follow from travels with it (expert_batch.py), its
number of threads included. The cluster's machines need moepack[build,ray] and the same kind of processor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from moepack.cluster import connect
from moepack.pack.errors import InputError

from .expert_batch import ExpertBatchResult, ExpertBatchTask, make_batch

if TYPE_CHECKING:
    from moepack.calibrate.forward import Observation

NAMES = ("local", "ray")
RETRIES = 8  # times a batch is tried again when its worker dies


class Executor(Protocol):
    """Makes expert batches."""

    def run(self, tasks: Sequence[ExpertBatchTask], observation: Observation) -> Iterator[ExpertBatchResult]:
        """The results of the tasks, in their order."""
        ...

    def close(self) -> None:
        """Let go of what was started."""
        ...


def check_engine(name: str) -> None:
    """See that there is such an executor, before any work.

    Raises:
        InputError: when there is not.
    """
    if name not in NAMES:
        raise InputError(f"engine {name!r} is unknown: there are {', '.join(NAMES)}")


def open_executor(name: str, address: str | None) -> Executor:
    """The executor that `--engine` names; `address` is a Ray cluster's.

    Raises:
        InputError: for an unknown one, or a cluster that does not answer.
        MissingExtraError: when Ray is not installed.
    """
    check_engine(name)
    if name == "local":
        if address is not None:
            raise InputError("--address is a Ray cluster's: say --engine ray as well")
        return Local()
    return OnRay(address)


class Local:
    """One batch after another, in this process."""

    def run(self, tasks: Sequence[ExpertBatchTask], observation: Observation) -> Iterator[ExpertBatchResult]:
        """See `Executor`."""
        for task in tasks:
            yield make_batch(task, observation)

    def close(self) -> None:
        """Nothing was started."""


class OnRay:
    """Batches as tasks of a Ray cluster: an existing one, or one started on this machine and ended with the build.

    A layer's observation is put into the object store once; at most two batches a CPU are in flight, so that results
    wait in memory no more than the layer file can take them. A task whose worker dies is run again by Ray.
    """

    def __init__(self, address: str | None) -> None:
        self._ray, self._started = connect(address)
        resources: dict[str, float] = self._ray.cluster_resources()
        self._in_flight = max(2, 2 * int(resources.get("CPU", 1)))

    def run(self, tasks: Sequence[ExpertBatchTask], observation: Observation) -> Iterator[ExpertBatchResult]:
        """See `Executor`."""
        ray, waiting = self._ray, list(tasks)
        remote = ray.remote(make_batch)
        seen = ray.put(observation)
        running: list[Any] = []
        while waiting or running:
            while waiting and len(running) < self._in_flight:
                task = waiting.pop(0)
                task = replace(task, weights=task.weights.copied())
                resources = {"num_gpus": 1} if task.device.startswith("cuda") else {"num_cpus": task.threads}
                running.append(remote.options(max_retries=RETRIES, **resources).remote(task, seen))
            try:
                yield ray.get(running.pop(0))
            except ray.exceptions.RayTaskError as error:
                cause = error.cause
                raise cause if isinstance(cause, Exception) else error from None
            except ray.exceptions.RayError as error:
                raise InputError(f"Ray gave up on an expert batch: {str(error).strip().splitlines()[0]}") from None

    def close(self) -> None:
        """Leave the cluster; end it if it was started here."""
        if self._started:
            self._ray.shutdown()
