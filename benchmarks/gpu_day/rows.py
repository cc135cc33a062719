"""What a stage gives: rows by name, each measured on its own, some held to a limit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import Row

if TYPE_CHECKING:
    import torch

NO_GPU = "no CUDA device"


class Skipped(Exception):  # it is no error
    """A row that this machine cannot measure; the message says why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Where a stage runs. `quick` takes small sizes; on a CPU kernels are interpreted."""

    device: str
    quick: bool
    work: Path  # a directory that stages share, and runs with the same `--work`
    gpu: str = ""  # the GPU's name; none on a CPU
    capability: int = 0
    cache: int = 0  # bytes of the GPU's L2

    @property
    def on_gpu(self) -> bool:
        """Whether times mean something."""
        return self.device == "cuda"

    @property
    def torch(self) -> torch.device:
        """The device."""
        import torch

        return torch.device(self.device, 0) if self.on_gpu else torch.device(self.device)

    @property
    def small(self) -> bool:
        """Whether sizes are to be small: without a GPU, too."""
        return self.quick or not self.on_gpu


@dataclass(frozen=True, slots=True)
class Measured:
    """A value, and the limit that it must not pass, if it has one."""

    value: float
    unit: str
    limit: float | None = None
    more: Row = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """How a row is measured. `on_cpu` says that it is also run where no GPU is."""

    work: Callable[[], Measured]
    on_cpu: bool = False


Rows = dict[str, Entry]


def shown(name: str, found: Measured, on_gpu: bool) -> Row:
    """A finished row, with its verdict."""
    if found.limit is not None:
        verdict = "holds" if found.value <= found.limit else "FAILS"
    else:
        verdict = "measured" if on_gpu else "runs"
    row = {"row": name, "value": found.value, "unit": found.unit, "limit": found.limit, "verdict": verdict}
    return row | ({"more": found.more} if found.more else {})


def without(name: str, verdict: str) -> Row:
    """A row that has no value, and why."""
    return {"row": name, "value": None, "unit": "", "limit": None, "verdict": verdict}


def write(out: Path | None, document: Row) -> None:
    """Write what there is so far, whole or not at all."""
    if out is not None:
        aside = out.with_name(out.name + ".partial")
        aside.write_text(json.dumps(document, indent=1) + "\n")
        aside.rename(out)
