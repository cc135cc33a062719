"""The local executor: it runs tasks in this process, several at once on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.runtime.devices.glibc import trim

from ..bound import MemoryPlan, workers
from ..tasks.experts import ExpertBatchTask, make_expert_batch
from ..tasks.layer import Advance, LayerInputs, LayerWork, Note, write_layer
from ..tasks.result import TaskResult, save_result
from ..tasks.row_shards import RowShardTask, make_row_shard

if TYPE_CHECKING:
    import torch

    from .worker import WorkerCheckpoint


class Local:
    """An executor that runs tasks in this process. A part of the model is finished when `submit` returns."""

    reads = False  # whether the executor reads weights from the checkpoint itself; if not, `submit` takes them
    left = 0  # experts and row shards that were submitted and are not finished

    def __init__(self) -> None:
        self._done: list[Note] = []

    def begin(self, source: WorkerCheckpoint, folder: Path, device: torch.device, how: MemoryPlan) -> None:
        """Set the checkpoint, the work directory, the device, and how many tasks may run at once in this process."""
        self._device = device
        self._how = how

    def submit(self, work: LayerWork, inputs: LayerInputs, advance: Advance) -> None:
        """Submit a part's tasks, and return when another part can be submitted. Calls `advance` for finished work."""
        device = self._device
        missing = work.missing
        advance(sum(task.count for i, task in enumerate(work.tasks) if i not in missing))

        def one(i: int) -> int:
            save_result(_make(work.tasks[i], inputs, device), work.kept[i])
            return work.tasks[i].count

        dense = [i for i in missing if isinstance(work.tasks[i], RowShardTask)]
        batches = [i for i in missing if i not in dense]
        for tasks, bound in (
            (dense, self._how.row_shards),
            (batches, self._how.batches),
        ):
            most = workers(device, max(map(work.memory, tasks), default=1))
            _at_once(one, tasks, min(most, bound or most), advance)
        self._done.append((work.part, write_layer(work)))

    def finished(self, wait: bool) -> Iterator[Note]:
        """Yield the parts finished since the last call; with `wait`, all submitted parts as they finish."""
        while self._done:
            yield self._done.pop(0)

    def close(self) -> None:
        """Stop what the executor started, and drop unfinished work."""


def _make(task: RowShardTask | ExpertBatchTask, inputs: LayerInputs, device: torch.device) -> TaskResult:
    if isinstance(task, RowShardTask):
        assert inputs.moments is not None
        moments = inputs.moments.of(task.matrix.module)
        return make_row_shard(task, inputs.tensors, *moments, device, inputs.native_dense)
    from moepack.calibrate.held import release

    assert inputs.module is not None and inputs.weights is not None and inputs.observation is not None
    weights = inputs.weights.select(task.experts)
    made = make_expert_batch(task, inputs.module, weights, inputs.observation, device, inputs.native)
    for matrices in inputs.weights.weights:
        release(matrices)
    return made


def _at_once(one: Callable[[int], int], items: list[int], most: int, advance: Advance) -> None:
    """Call `one` for all items, `most` at a time; after an error no further call starts."""
    if min(most, len(items)) < 2:
        for i in items:
            advance(one(i))
            trim()
        return
    left = list(items)
    running = set[Future[int]]()
    with ThreadPoolExecutor(most, "moepack-batch") as pool:
        while left or running:
            while left and len(running) < most:
                running.add(pool.submit(one, left.pop(0)))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for future in done:
                advance(future.result())
            trim()
