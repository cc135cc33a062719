"""What a stage gives: rows by name, each measured on its own, beside what was predicted of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .devices import named

if TYPE_CHECKING:
    import torch

NEAR = 1.5  # a time or a rate within this factor is as predicted
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

    def predicted(self, *path: str) -> float | None:
        """A number of the committed predictions for this GPU; `None` where there is none."""
        from . import predictions

        gpu = named(self.gpu)
        found: Any = predictions.kept()["predictions"].get(gpu.name) if gpu is not None else None
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return float(found) if isinstance(found, int | float) else None

    @property
    def small(self) -> bool:
        """Whether sizes are to be small: without a GPU, too."""
        return self.quick or not self.on_gpu


@dataclass(frozen=True, slots=True)
class Measured:
    """A value, and what it is held to: a prediction (a time or a rate is near it), or a limit that it must not pass."""

    value: float
    unit: str
    prediction: float | None = None
    limit: float | None = None
    more: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Entry:
    """How a row is measured. `on_cpu` says that it is also run where no GPU is; `needs` why it cannot be run at all."""

    work: Callable[[], Measured]
    on_cpu: bool = False
    needs: str = ""


Rows = dict[str, Entry]


def shown(name: str, found: Measured, on_gpu: bool) -> dict[str, Any]:
    """A finished row, with its ratio and its verdict."""
    held = found.limit if found.limit is not None else found.prediction
    ratio = found.value / held if held else None
    if found.limit is not None:
        verdict = "holds" if found.value <= found.limit else "FAILS"
    elif not on_gpu:
        verdict = "runs"
    elif ratio is None:
        verdict = "measured"
    elif 1 / NEAR <= ratio <= NEAR:
        verdict = "as predicted"
    else:
        verdict = "above the prediction" if ratio > 1 else "below the prediction"
    row = {
        "row": name,
        "value": found.value,
        "unit": found.unit,
        "prediction": held,
        "ratio": ratio,
        "verdict": verdict,
    }
    return row | ({"more": found.more} if found.more else {})


def without(name: str, verdict: str) -> dict[str, Any]:
    """A row that has no value, and why."""
    return {"row": name, "value": None, "unit": "", "prediction": None, "ratio": None, "verdict": verdict}


def write(out: Path | None, document: dict[str, Any]) -> None:
    """Write what there is so far, whole or not at all."""
    if out is not None:
        aside = out.with_name(out.name + ".partial")
        aside.write_text(json.dumps(document, indent=1) + "\n")
        aside.rename(out)
