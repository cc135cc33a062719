"""The result of a task, as a file of the work directory under the address of its inputs."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.codec.bits import Buffer

from ..artifacts import save

if TYPE_CHECKING:
    import torch

# Every task runs on this many of torch's threads. Sums in another order would round differently, and the bytes must not
# depend on the machine. With one thread, a machine runs as many tasks at once as it has cores.
THREADS = 1


@dataclass(frozen=True)
class TaskResult:
    """The extents and losses that a task made."""

    extents: dict[str, list[Buffer]]  # version -> one extent an expert, or a row shard's, uint8
    payloads: dict[str, list[int]]  # version -> bytes of each extent without padding
    # [extents of a version, versions]: float64 `moepack.quantize.pooling.MEASURED` of an expert batch, "error" and
    # "power" of a row shard; uint8 "method"
    losses: dict[str, torch.Tensor]

    def add(self, version: str, extent: Buffer, payload: int) -> None:
        """Append an extent and its bytes without padding."""
        self.extents.setdefault(version, []).append(extent)
        self.payloads.setdefault(version, []).append(payload)


@contextlib.contextmanager
def fixed_threads() -> Iterator[None]:
    """Have torch compute on THREADS threads inside the context."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def result_tensors(made: TaskResult) -> dict[str, torch.Tensor]:
    """A result as the tensors that `load_result` reads from a file."""
    import torch

    tensors = {f"losses.{k}": v for k, v in made.losses.items()}
    for name, extents in made.extents.items():
        tensors[f"payloads.{name}"] = torch.tensor(made.payloads[name], dtype=torch.int64)
        tensors |= {f"extents.{name}.{i}": torch.from_numpy(extent) for i, extent in enumerate(extents)}
    return tensors


def save_result(made: TaskResult, path: Path) -> None:
    """Write a result under a temporary name first: two workers may write the same result at once."""
    own = path.with_name(f"{path.stem}.{secrets.token_hex(4)}")
    save(own, result_tensors(made))
    own.replace(path)


def load_result(path: Path) -> TaskResult:
    """Read a result that `save_result` wrote."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    # Copied, because they outlive the extents and would keep the mapped file in memory.
    losses = {k.removeprefix("losses."): v.clone() for k, v in tensors.items() if k.startswith("losses.")}
    payloads = {k.removeprefix("payloads."): v.tolist() for k, v in tensors.items() if k.startswith("payloads.")}
    extents: dict[str, list[Buffer]] = {
        name: [tensors[f"extents.{name}.{i}"].numpy() for i in range(len(sizes))] for name, sizes in payloads.items()
    }
    return TaskResult(extents, payloads, losses)
