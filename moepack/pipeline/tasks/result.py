"""The result of a task, kept in a file of the work directory that is named by the digest of the task's inputs."""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.codec.bits import Buffer
from moepack.pack.errors import NotFiniteError

from ..artifacts import save

if TYPE_CHECKING:
    import torch

# The number of torch's threads for every task. Another number sums in another order, which rounds differently, and the
# bytes must not depend on the machine. With one thread a task, each core can run a task of its own.
THREADS = 1


@dataclass(frozen=True)
class TaskResult:
    """The extents and losses that a task made."""

    extents: dict[str, list[Buffer]]  # version -> extents, uint8: one for each expert, or a row shard's only one
    payloads: dict[str, list[int]]  # version -> bytes of each extent without padding
    # Name -> [extents of a version, versions]. An expert batch has the names `moepack.quantize.pooling.MEASURED`,
    # float64; a row shard has "error" and "power", float64; both have "method", uint8.
    losses: dict[str, torch.Tensor]

    def add(self, version: str, extent: Buffer, payload: int) -> None:
        """Append an extent and `payload`, its size in bytes without padding."""
        self.extents.setdefault(version, []).append(extent)
        self.payloads.setdefault(version, []).append(payload)


def check_numbers(what: str, scales: Iterable[torch.Tensor], losses: Iterable[float]) -> None:
    """Raise NotFiniteError unless the scales and losses of `what` are finite. Codes and zero points are integers."""
    from moepack.calibrate.finite import not_finite

    wrong = "scales" if any(not_finite(scale) for scale in scales) else ""
    if not all(map(math.isfinite, losses)):
        wrong = wrong or "losses"
    if wrong:
        why = "its weights or its inputs are too large for float32"
        raise NotFiniteError(what, f"gets {wrong} that are not finite: {why}")


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


def threads_on(device: torch.device) -> int | None:
    """THREADS for our own kernels, which compute on a CPU; None on another device."""
    return THREADS if device.type == "cpu" else None


def result_tensors(made: TaskResult) -> dict[str, torch.Tensor]:
    """Turn a result into the tensors that `load_result` reads from a file."""
    import torch

    tensors = {f"losses.{k}": v for k, v in made.losses.items()}
    for name, extents in made.extents.items():
        tensors[f"payloads.{name}"] = torch.tensor(made.payloads[name], dtype=torch.int64)
        tensors |= {f"extents.{name}.{i}": torch.from_numpy(extent) for i, extent in enumerate(extents)}
    return tensors


def save_result(made: TaskResult, path: Path) -> None:
    """Write a result, first under a temporary name: two workers may write the same result at once."""
    own = path.with_name(f"{path.stem}.{secrets.token_hex(4)}")
    save(own, result_tensors(made))
    own.replace(path)


def load_result(path: Path) -> TaskResult:
    """Read a result that `save_result` wrote."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    # Losses are copied: they outlive the extents, and would keep the mapped file in memory.
    losses = {k.removeprefix("losses."): v.clone() for k, v in tensors.items() if k.startswith("losses.")}
    payloads = {k.removeprefix("payloads."): v.tolist() for k, v in tensors.items() if k.startswith("payloads.")}
    extents: dict[str, list[Buffer]] = {
        name: [tensors[f"extents.{name}.{i}"].numpy() for i in range(len(sizes))] for name, sizes in payloads.items()
    }
    return TaskResult(extents, payloads, losses)
