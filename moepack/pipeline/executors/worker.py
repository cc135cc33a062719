"""What a worker process of a cluster does. This module does not use Ray.

No weights travel: the worker checks that its checkpoint files equal the driver's (the process that runs the build), and
reads a task's weights from them. Tokens and moments come as NumPy arrays, which the workers of a node share. A worker
that sees the driver's work directory writes its result there; any other returns the bytes, in chunks.
"""

from __future__ import annotations

import functools
import hashlib
import io
import secrets
import socket
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import InputError

from ..saved import write_saved
from ..tasks.experts import ExpertBatchTask, make_expert_batch
from ..tasks.layer import LayerWork, write_layer
from ..tasks.result import TaskResult, result_tensors, save_result
from ..tasks.row_shards import RowShardTask, make_row_shard
from ..work import PROBE

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.stream import StreamedModel

ANSWER = 32 << 20  # bytes of a chunk of an answer


@dataclass(frozen=True)
class SharedTensors:
    """An observation's inputs, experts and gates, or a matrix's two moments (`DenseMoments.of`), as NumPy arrays."""

    arrays: tuple[Buffer, ...]  # uint8 [first axis, bytes of the other axes]; a tensor given twice is one array
    dtypes: tuple[str, ...]  # torch's names
    length: int = 0  # tokens of an observation's window

    @staticmethod
    def of(*tensors: torch.Tensor, length: int = 0) -> SharedTensors:
        """Make arrays from tensors. An array shares the memory of a contiguous tensor."""
        import torch

        array = {id(t): t.contiguous().view(torch.uint8).numpy() for t in tensors}
        names = tuple(str(t.dtype).removeprefix("torch.") for t in tensors)
        return SharedTensors(tuple(array[id(t)] for t in tensors), names, length)

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        return sum({id(a): a.nbytes for a in self.arrays}.values())

    def tensors(self) -> list[torch.Tensor]:
        """Make tensors that share the arrays' memory; they must not be written to."""
        import torch

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writ")
            pairs = zip(self.arrays, self.dtypes, strict=True)
            return [torch.from_numpy(a).view(getattr(torch, dtype)) for a, dtype in pairs]


@dataclass(frozen=True)
class WorkerCheckpoint:
    """A checkpoint's path, the same on every machine, and what identifies its files."""

    path: str
    files: Mapping[str, Mapping[str, object]]  # file name -> its entry of `moepack.calibrate.identity.identity`


@dataclass(frozen=True)
class DirectoryProbe:
    """A file with a random word: a machine that reads it sees the driver's work directory."""

    file: Path
    word: str

    @staticmethod
    def leave(folder: Path) -> DirectoryProbe:
        """Write a new probe into `folder`."""
        probe = DirectoryProbe(folder / f"{PROBE}{secrets.token_hex(8)}", secrets.token_hex(32))
        probe.file.write_text(probe.word)
        return probe

    def seen(self) -> bool:
        """Whether this machine sees the probe."""
        try:
            return self.file.read_text() == self.word
        except OSError:
            return False


WorkerOrder = tuple[RowShardTask | ExpertBatchTask, Path]  # a task, and the file for its result


def run_task(
    order: WorkerOrder, source: WorkerCheckpoint, probe: DirectoryProbe, shared: SharedTensors
) -> Iterator[Buffer | str]:
    """Run a task. Yield "" once its result is in the work directory.

    A machine that does not see that directory yields the result's file in chunks of ANSWER bytes, then their SHA-256.

    Raises:
        InputError: when this machine does not see the driver's checkpoint.
    """
    task, path = order
    sees = probe.seen()
    if not (sees and path.exists()):
        made = _make(task, source, shared)
        if not sees:
            file = io.BytesIO()
            write_saved(file, result_tensors(made), {})
            data = np.frombuffer(file.getbuffer(), np.uint8)
            for start in range(0, len(data), ANSWER):
                yield data[start : start + ANSWER]
            yield hashlib.sha256(data.data).hexdigest()
            return
        save_result(made, path)
    yield ""


def _make(task: RowShardTask | ExpertBatchTask, source: WorkerCheckpoint, shared: SharedTensors) -> TaskResult:
    import torch

    from moepack.calibrate.forward import Observation

    stream = _stream(source.path)
    device = torch.device(task.device)

    def check(files: set[str]) -> None:
        for name in sorted({"config.json", *files}):
            _check(Path(source.path) / name, source.files[name])

    if isinstance(task, RowShardTask):
        part = task.matrix.layer
        check(stream.tensor_files(part, task.names))
        learn, held = shared.tensors()
        tensors = stream.tensors(part, task.names)
        return make_row_shard(task, tensors, learn, held, device, stream.native_dense)
    check(stream.expert_files(task.layer, task.experts))
    weights, (inputs, experts, gates) = stream.experts(task.layer, task.experts), shared.tensors()
    observation = Observation(inputs, experts, gates, shared.length)
    native = functools.partial(stream.native_experts, task.layer)
    return make_expert_batch(task, stream.experts_module(task.layer), weights, observation, device, native)


def finish_layer(
    work: LayerWork, source: WorkerCheckpoint, probe: DirectoryProbe
) -> Iterator[dict[str, object] | None]:
    """Write a part's files and yield the note; yield None if this machine does not see all results of its tasks."""
    yield write_layer(work) if probe.seen() and not work.missing else None


@functools.lru_cache(maxsize=1)
def _stream(path: str) -> StreamedModel:
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.stream import StreamedModel
    from moepack.shared.memory import bound_kernel_caches

    bound_kernel_caches()
    if not Path(path).is_dir():
        raise InputError(f"{path}: is not on {socket.gethostname()}: every node has to see the checkpoint there")
    return StreamedModel(open_checkpoint(path))


def _check(path: Path, known: Mapping[str, object]) -> None:
    try:
        now = path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read on {socket.gethostname()} ({error.strerror})") from None
    if not _same(path, (now.st_size, now.st_mtime_ns, now.st_ino), tuple(known.items())):
        raise InputError(f"{path}: is another file on {socket.gethostname()} than where the build was started")


@functools.lru_cache(maxsize=4096)
def _same(path: Path, state: tuple[int, ...], known: tuple[tuple[str, str | int], ...]) -> bool:
    from moepack.calibrate.identity import is_known

    return is_known(path, dict(known))
