"""What a worker on another machine is told, what it makes, and what it answers.

No weights travel to it: it reads those of its experts or its matrix from the checkpoint, once it has seen that the
files are the driver's. Tokens and moments come as NumPy arrays, which the workers of a node share. What it makes it
writes into the work directory, where that is the driver's too; else it answers with the bytes, in pieces. Knows nothing
of Ray.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
import socket
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import InputError

from .dense_slice import DenseTask, make_slice
from .expert_batch import ExpertBatchTask, make_batch
from .layer_work import LayerWork, write_layer
from .piece import Piece, piece_tensors, save_piece
from .work import PROBE

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.forward import Observation
    from moepack.calibrate.stream import StreamedModel

PIECE = 32 << 20  # bytes of an answer's pieces


@dataclass(frozen=True)
class Seen:
    """An observation in NumPy.

    Attributes:
        inputs: uint8 [tokens, bytes of a token].
        dtype: of the inputs, as torch names it.
        experts: int32 [tokens, top_k].
        gates: float32 [tokens, top_k].
        length: tokens of a window.
    """

    inputs: Buffer
    dtype: str
    experts: npt.NDArray[np.int32]
    gates: npt.NDArray[np.float32]
    length: int

    @staticmethod
    def of(observation: Observation) -> Seen:
        """The same memory where it can be."""
        import torch

        inputs = observation.inputs.contiguous()
        return Seen(
            inputs.view(torch.uint8).numpy(), str(inputs.dtype).removeprefix("torch."),
            observation.experts.numpy(), observation.gates.numpy(), observation.length,
        )  # fmt: skip

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        return self.inputs.nbytes + self.experts.nbytes + self.gates.nbytes

    def observation(self) -> Observation:
        """The observation, in the arrays' own memory; not to be written to."""
        import torch

        from moepack.calibrate.forward import Observation

        inputs = _tensor(self.inputs).view(getattr(torch, self.dtype))
        return Observation(inputs, _tensor(self.experts), _tensor(self.gates), self.length)


@dataclass(frozen=True)
class Moments:
    """What calibration brought to dense matrices that read the same, in NumPy.

    Attributes:
        learn, held: float32 [cols, cols]; see `moepack.calibrate.dense.DenseMoments`.
    """

    learn: npt.NDArray[np.float32]
    held: npt.NDArray[np.float32]

    @staticmethod
    def of(learn: torch.Tensor, held: torch.Tensor) -> Moments:
        """The same memory."""
        array = learn.numpy()
        return Moments(array, array if held is learn else held.numpy())

    @property
    def bytes(self) -> int:
        """Bytes of the arrays."""
        return self.learn.nbytes + self.held.nbytes * (self.held is not self.learn)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, in the arrays' own memory; not to be written to."""
        return _tensor(self.learn), _tensor(self.held)


@dataclass(frozen=True)
class Source:
    """A checkpoint, by the path that it has on every machine.

    Attributes:
        path: its directory.
        files: file name -> what `moepack.calibrate.identity.identity` keeps of it.
    """

    path: str
    files: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Probe:
    """A file with a word that nobody can guess: who reads it sees the driver's directory."""

    file: Path
    word: str

    @staticmethod
    def leave(folder: Path) -> Probe:
        """Write one."""
        probe = Probe(folder / f"{PROBE}{secrets.token_hex(8)}", secrets.token_hex(32))
        probe.file.write_text(probe.word)
        return probe

    def seen(self) -> bool:
        """Whether it is seen from here."""
        try:
            return self.file.read_text() == self.word
        except OSError:
            return False


@dataclass(frozen=True)
class Order:
    """What a worker is asked for: a piece, and where it belongs."""

    task: DenseTask | ExpertBatchTask
    path: Path


def make_piece(order: Order, source: Source, probe: Probe, seen: Seen | Moments) -> Iterator[Buffer | str]:
    """Make a piece. Yields its file in pieces of PIECE bytes and their SHA-256, or an empty word where it is written.

    Raises:
        InputError: when this machine does not see the checkpoint, or sees another one.
    """
    shared = probe.seen()
    if shared and order.path.exists():
        yield ""
        return
    made = _make(order.task, source, seen)
    if shared:
        save_piece(made, order.path)
        yield ""
        return
    from safetensors.torch import save

    data = np.frombuffer(save(piece_tensors(made)), np.uint8)
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]
    yield hashlib.sha256(data.data).hexdigest()


def _make(task: DenseTask | ExpertBatchTask, source: Source, seen: Seen | Moments) -> Piece:
    import torch

    stream, device = _stream(source.path), torch.device(task.device)

    def check(files: set[str]) -> None:
        for name in sorted({"config.json", *files}):
            _check(Path(source.path) / name, source.files[name])

    if isinstance(task, DenseTask):
        assert isinstance(seen, Moments)
        part = task.matrix.layer
        check(stream.tensor_files(part, task.names))
        return make_slice(task, stream.tensors(part, task.names), *seen.tensors(), device)
    assert isinstance(seen, Seen)
    check(stream.expert_files(task.layer, task.experts))
    weights = stream.experts(task.layer, task.experts)
    return make_batch(task, stream.experts_module(task.layer), weights, seen.observation(), device)


def finish_layer(work: LayerWork, source: Source, probe: Probe) -> Iterator[dict[str, Any] | None]:
    """Yields `write_layer`'s note; None where this machine does not see the work directory, or not yet all of it."""
    yield write_layer(work) if probe.seen() and not work.missing else None


@functools.lru_cache(maxsize=1)
def _stream(path: str) -> StreamedModel:
    """The checkpoint's skeleton; a worker makes many batches of one."""
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.stream import StreamedModel
    from moepack.memory import bound_kernel_caches

    bound_kernel_caches()
    if not Path(path).is_dir():
        raise InputError(f"{path}: is not on {socket.gethostname()}: every node has to see the checkpoint there")
    return StreamedModel(open_checkpoint(path))


def _check(path: Path, known: Mapping[str, Any]) -> None:
    try:
        now = path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read on {socket.gethostname()} ({error.strerror})") from None
    if not _same(path, (now.st_size, now.st_mtime_ns, now.st_ino), tuple(known.items())):
        raise InputError(f"{path}: is another file on {socket.gethostname()} than where the build was started")


@functools.lru_cache(maxsize=4096)
def _same(path: Path, state: tuple[int, ...], known: tuple[tuple[str, Any], ...]) -> bool:
    from moepack.calibrate.identity import is_known

    return is_known(path, dict(known))


def _tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writ")
        return torch.from_numpy(array)
