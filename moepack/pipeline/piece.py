"""A piece: what one task of a build's quantising makes, as a file of the work directory.

What a piece is made of is the task's to say (expert_batch.py, dense_slice.py); it is kept under the address of that.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.codec.bits import Buffer

from .artifacts import save

if TYPE_CHECKING:
    import torch

# A piece is made on so many of torch's threads, everywhere: sums come out in another order with another number, and the
# bytes must not depend on who makes them. With one, a machine makes as many pieces at once as it has cores.
THREADS = 1


@dataclass(frozen=True)
class Piece:
    """A finished piece.

    Attributes:
        extents: version -> one extent an expert, or that of some rows of a dense matrix, uint8.
        payloads: version -> bytes of each extent without padding.
        losses: of an expert batch `moepack.quantize.pooling.MEASURED`, of rows of a dense matrix "error" and "power",
            float64, and "method", uint8, each [extents of a version, versions].
    """

    extents: dict[str, list[Buffer]]
    payloads: dict[str, list[int]]
    losses: dict[str, torch.Tensor]


@contextlib.contextmanager
def fixed_threads() -> Iterator[None]:
    """Inside, torch computes on THREADS threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def piece_tensors(made: Piece) -> dict[str, torch.Tensor]:
    """A finished piece as tensors, which `load_piece` reads out of a file."""
    import torch

    tensors = {f"losses.{k}": v for k, v in made.losses.items()}
    for name, extents in made.extents.items():
        tensors[f"payloads.{name}"] = torch.tensor(made.payloads[name], dtype=torch.int64)
        tensors |= {f"extents.{name}.{i}": torch.from_numpy(extent) for i, extent in enumerate(extents)}
    return tensors


def save_piece(made: Piece, path: Path) -> None:
    """Keep a finished piece. Two may be at it at once: one that a cluster gave up on, and another."""
    own = path.with_name(f"{path.stem}.{secrets.token_hex(4)}")
    save(own, piece_tensors(made))
    own.replace(path)


def load_piece(path: Path) -> Piece:
    """What `save_piece` kept."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    # Copied: they outlive the extents, and would keep the mapped file in memory.
    losses = {k.removeprefix("losses."): v.clone() for k, v in tensors.items() if k.startswith("losses.")}
    payloads = {k.removeprefix("payloads."): v.tolist() for k, v in tensors.items() if k.startswith("payloads.")}
    extents: dict[str, list[Buffer]] = {
        name: [tensors[f"extents.{name}.{i}"].numpy() for i in range(len(sizes))] for name, sizes in payloads.items()
    }
    return Piece(extents, payloads, losses)
