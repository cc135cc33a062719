"""The Ray executor: it runs tasks on a Ray cluster, which exists already or is started on this machine.

This process sends each layer's tokens and moments once, and a few hundred bytes a task. It receives results only where
workers do not see the work directory. A task requests THREADS cores, its memory, and a GPU if the build computes on a
GPU. A task whose worker dies runs again. Every machine needs moepack[build,ray], the checkpoint at the same path and
the same kind of processor.
"""

from __future__ import annotations

import hashlib
import pickle
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.writer import sync
from moepack.shared.cluster import connect

from ..tasks.experts import ExpertBatchTask
from ..tasks.layer import Advance, LayerInputs, LayerWork, Note, write_layer
from ..tasks.result import THREADS
from ..tasks.row_shards import RowShardTask
from .worker import DirectoryProbe, SharedTensors, WorkerCheckpoint, finish_layer, run_task

if TYPE_CHECKING:
    import torch

    from ..bound import MemoryPlan

PROCESS = 1 << 30  # bytes of an idle worker: Python, torch, transformers
RETRIES = 8  # times a task runs again when its worker dies
AHEAD = 2  # calibration waits while this many tasks are running or queued per slot (room for one task)
SHARE = 0.5  # the most of this node's object store that tokens and moments of unfinished layers take


@dataclass
class Traffic:
    """Bytes that went through this process so far."""

    tokens: int = 0  # observations, put into the object store
    moments: int = 0  # moments of dense matrices, put into the object store
    orders: int = 0  # all else that was sent to tasks
    answers: int = 0  # answers of tasks, without results
    results: int = 0  # results that workers could not write into the work directory


@dataclass
class _LayerInFlight:
    work: LayerWork
    advance: Advance
    put: dict[int | None, object] = field(default_factory=dict)  # group of dense matrices (None: experts) -> reference
    bytes: int = 0  # of the part's tokens and moments, in the object store until the tasks are finished
    running: dict[Iterator[object], int] = field(default_factory=dict)  # Ray's task -> index in work.tasks
    writing: Iterator[object] | None = None  # Ray's task that writes the part's files
    here: bool = False  # a result came over the network, so this process writes the part's files
    note: JsonObject | None = None


class OnRay:
    """An executor that runs tasks on a Ray cluster. `Local` describes the methods.

    Calibration runs ahead while fewer than AHEAD tasks per slot are unfinished, or only one layer is. The tokens and
    moments of unfinished layers and the next one take at most SHARE of this node's object store.
    """

    reads = True

    def __init__(self, address: str | None) -> None:
        self.traffic = Traffic()
        self._ray, self._started = connect(address)
        self._layers: list[_LayerInFlight] = []
        self._slots = 1
        self._probe: DirectoryProbe | None = None

    def begin(self, source: WorkerCheckpoint, folder: Path, device: torch.device, how: MemoryPlan) -> None:
        """See `Local`."""
        ray = self._ray
        self._probe = DirectoryProbe.leave(folder.absolute())
        self._source = ray.put(source)
        self._gpus = int(device.type == "cuda")
        self.traffic.orders += len(pickle.dumps(source))
        nodes = [n for n in ray.nodes() if n["Alive"]]
        here = ray.get_runtime_context().get_node_id()
        self._nodes: list[Mapping[str, float]] = [n["Resources"] for n in nodes]
        self._store = sum(n["Resources"].get("object_store_memory", 0.0) for n in nodes if n["NodeID"] == here)

    @property
    def left(self) -> int:
        """See `Local`."""
        return sum(layer.work.tasks[i].count for layer in self._layers for i in layer.running.values())

    def submit(self, work: LayerWork, inputs: LayerInputs, advance: Advance) -> None:
        """See `Local`."""
        ray = self._ray
        layer = _LayerInFlight(work, advance)
        missing = work.missing
        self._layers.append(layer)
        advance(sum(task.count for i, task in enumerate(work.tasks) if i not in missing))
        if missing:
            memory = sorted(map(work.memory, missing))
            self._slots = slots(self._nodes, needs(memory[len(memory) // 2], self._gpus))
            need = needs(memory[-1], self._gpus)
            if not slots(self._nodes, need):
                parts = f"{need['CPU']:g} core, {need['memory'] / 2**30:.1f} GiB" + ", a GPU" * self._gpus
                raise InputError(f"Ray: a task of this build needs {parts}, and no node of the cluster has that")
            groups = {i: _group(work.tasks[i], inputs) for i in missing}
            sent = {group: _sent(work.tasks[i], inputs) for i, group in groups.items()}
            layer.bytes = sum(what.bytes for what in sent.values())
            while self._full(layer.bytes):
                self._step(None)
            for group, what in sent.items():
                if group is None:
                    self.traffic.tokens += what.bytes
                else:
                    self.traffic.moments += what.bytes
                layer.put[group] = ray.put(what)
            del sent, what
            for i, group in groups.items():
                task = work.tasks[i]
                need = needs(work.memory(i), self._gpus)
                options = {"num_cpus": need["CPU"], "memory": need["memory"], "num_gpus": self._gpus}
                layer.running[self._remote(run_task, options, (task, work.kept[i]), layer.put[group])] = i
        self._write(layer)
        while self._full(layer.bytes):
            self._step(None)

    def finished(self, wait: bool) -> Iterator[Note]:
        """See `Local`."""
        while True:
            for layer in [x for x in self._layers if x.note is not None]:
                self._layers.remove(layer)
                assert layer.note is not None
                yield layer.work.part, layer.note
            if not self._layers or not self._step(None if wait else 0):
                return

    def close(self) -> None:
        """Cancel running tasks and leave the cluster; shut down a cluster that was started here."""
        for layer in self._layers:
            for task in layer.running:
                self._ray.cancel(task)
        self._layers.clear()
        if self._probe is not None:
            self._probe.file.unlink(missing_ok=True)
        if self._started:
            self._ray.shutdown()

    def _remote(
        self, function: Callable[..., object], options: Mapping[str, object], what: object, *more: object
    ) -> Iterator[object]:
        self.traffic.orders += len(pickle.dumps((what, self._probe)))
        task = self._ray.remote(function).options(num_returns="streaming", max_retries=RETRIES, **options)
        made: Iterator[object] = task.remote(what, self._source, self._probe, *more)
        return made

    def _full(self, more: int) -> bool:
        """Whether the next layer, of `more` bytes of tokens and moments, has to wait."""
        busy = [layer for layer in self._layers if layer.running]
        out = sum(len(layer.running) for layer in busy)
        held = sum(layer.bytes for layer in busy)
        crowded = len(busy) > 1 and out >= AHEAD * self._slots
        return bool(busy) and (crowded or held + more > SHARE * self._store)

    def _step(self, timeout: float | None) -> bool:
        """Wait up to `timeout` seconds (None: no limit) for a task's answer and take it; return whether one came."""
        tasks = {task: layer for layer in self._layers for task in (*layer.running, layer.writing) if task is not None}
        if not tasks:
            return False
        ready, _ = self._ray.wait(list(tasks), num_returns=1, timeout=timeout)
        for task in ready:
            layer = tasks[task]
            if task in layer.running:
                self._made(layer, task)
            else:
                self._written(layer, task)
        return bool(ready)

    def _made(self, layer: _LayerInFlight, task: Iterator[object]) -> None:
        """Take a task's answer. If it carries the result, check the bytes and write them to the work directory."""
        i = layer.running[task]
        path = layer.work.kept[i]
        own = path.with_name(f"{path.stem}.{secrets.token_hex(4)}")
        digest = hashlib.sha256()
        expected = ""
        with own.open("wb") as file:
            for reference in task:
                answer = self._get(reference)
                if isinstance(answer, str):
                    self.traffic.answers += len(answer)
                    expected = answer
                else:
                    self.traffic.results += answer.nbytes
                    digest.update(answer.data)
                    file.write(answer.data)
        if expected:
            if expected != digest.hexdigest():
                own.unlink()
                raise InputError(f"Ray: {path.name} was changed in transfer: run the command again to continue")
            sync(own)
            own.replace(path)
            layer.here = True
        else:
            own.unlink()
        del layer.running[task]
        layer.advance(layer.work.tasks[i].count)
        self._write(layer)

    def _write(self, layer: _LayerInFlight) -> None:
        """If all results of a part are there, write the part's files here, or start a Ray task that writes them."""
        if layer.running:
            return
        layer.put.clear()
        layer.bytes = 0
        if layer.here:
            layer.note = write_layer(layer.work)
        else:
            layer.writing = self._remote(finish_layer, {"num_cpus": THREADS}, layer.work)

    def _written(self, layer: _LayerInFlight, task: Iterator[object]) -> None:
        note = self._get(next(task))
        self.traffic.answers += len(pickle.dumps(note))
        layer.writing = None
        layer.note = write_layer(layer.work) if note is None else note

    def _get(self, reference: object) -> Any:
        ray = self._ray
        try:
            return ray.get(reference)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            raise cause if isinstance(cause, Exception) else error from None
        except ray.exceptions.RayError as error:
            raise InputError(f"Ray gave up on a task: {str(error).strip().splitlines()[0]}") from None


def _group(task: RowShardTask | ExpertBatchTask, inputs: LayerInputs) -> int | None:
    return inputs.moments.group[task.matrix.module] if inputs.moments and isinstance(task, RowShardTask) else None


def _sent(task: RowShardTask | ExpertBatchTask, inputs: LayerInputs) -> SharedTensors:
    if isinstance(task, RowShardTask):
        assert inputs.moments is not None
        return SharedTensors.of(*inputs.moments.of(task.matrix.module))
    seen = inputs.observation
    assert seen is not None
    return SharedTensors.of(seen.inputs, seen.experts, seen.gates, length=seen.length)


def needs(memory: int, gpus: int) -> dict[str, float]:
    """The resources that a task of `memory` bytes requests, by Ray's names."""
    return {"CPU": float(THREADS), "memory": float(PROCESS + memory)} | ({"GPU": 1.0} if gpus else {})


def slots(nodes: Sequence[Mapping[str, float]], need: Mapping[str, float]) -> int:
    """Return how many tasks, each with the resources `need`, run at once on these nodes."""
    return sum(min(int(node.get(name, 0.0) // wanted) for name, wanted in need.items()) for node in nodes)
