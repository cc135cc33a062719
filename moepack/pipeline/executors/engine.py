"""The executor protocol, and the executors that `--engine` names: `local`, in this process, or `ray`, on a cluster.

Both make the same bytes, because every task runs on a fixed number of threads (tasks/result.py).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from moepack.cluster import asked, reach
from moepack.pack.errors import InputError, MissingExtraError

from ..tasks.layer import Advance, LayerInputs, LayerWork, Note
from .local import Local

if TYPE_CHECKING:
    import torch

    from ..bound import MemoryPlan
    from .worker import WorkerCheckpoint

NAMES = ("local", "ray")


class Executor(Protocol):
    """Runs the tasks of a model's parts."""

    reads: bool  # whether it reads weights from the checkpoint itself; otherwise `submit` gets them

    @property
    def left(self) -> int:
        """Experts and row shards that were submitted and are not finished."""
        ...

    def begin(self, source: WorkerCheckpoint, folder: Path, device: torch.device, how: MemoryPlan) -> None:
        """Set the checkpoint, the work directory, the device, and how many tasks may run at once in this process."""
        ...

    def submit(self, work: LayerWork, inputs: LayerInputs, advance: Advance) -> None:
        """Take a part's tasks; return once there is room for another part. Calls `advance` with what is finished."""
        ...

    def finished(self, wait: bool) -> Iterator[Note]:
        """Yield the parts that were finished since; with `wait`, all submitted ones as they finish."""
        ...

    def close(self) -> None:
        """Stop what was started, and drop unfinished work."""
        ...


def check_engine(name: str, address: str | None) -> None:
    """Refuse an unknown executor or a cluster that does not answer, before any work. See `open_executor`."""
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
    from .on_ray import OnRay

    return OnRay(address)
