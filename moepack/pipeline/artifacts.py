"""What a build's stages hand on to each other through the work directory: the run's record, tensors, activations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError, TargetError
from moepack.pack.writer import sync

from .work import WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.forward import Observation


MOMENTS = "moments.safetensors"


def run_record(directory: WorkDirectory) -> dict[str, Any]:
    """What the first stage noted of the run; InputError where it has not run."""
    try:
        record = json.loads((directory.path / "run.json").read_text())
    except (OSError, ValueError):
        raise InputError(f"{directory.path}: is not calibrated yet: run moepack calibrate first") from None
    return dict(record)


def save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors so that the file is whole or absent."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".partial")
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, metadata)
        sync(temporary)
    except SafetensorError as error:  # the library reports a full disk so, and not as an OSError
        temporary.unlink(missing_ok=True)
        raise TargetError(f"{path}: cannot be written: {error}") from None
    temporary.rename(path)


def load_hidden(path: Path) -> Iterator[torch.Tensor]:
    """The live activations that `save` wrote, one tensor a batch, each read when it is asked for."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        names = sorted(f.keys())
    for name in names:  # opened anew for each: what was read of a file stays in memory while it is open
        with safe_open(path, framework="pt") as f:
            yield f.get_tensor(name)


def load_observation(work: WorkDirectory, layer: int) -> Observation:
    """What a layer's experts saw, as the calibrate stage kept it."""
    from safetensors import safe_open

    from moepack.calibrate.forward import Observation

    path = work.piece("calibrate", layer, "observation.safetensors")
    if not path.exists():
        raise InputError(f"{work.path}: layer {layer} is not calibrated: run moepack calibrate to its end")
    with safe_open(path, framework="pt") as f:
        length = int(f.metadata()["length"])
        return Observation(f.get_tensor("inputs"), f.get_tensor("experts"), f.get_tensor("gates"), length)


def load_moments(work: WorkDirectory, part: int | None) -> DenseMoments:
    """What a part's dense matrices read, as the calibrate stage kept it."""
    from safetensors import safe_open

    from moepack.calibrate import dense

    path = work.piece("calibrate", part, MOMENTS)
    if not path.exists():
        raise InputError(f"{work.path}: was calibrated without dense: run moepack calibrate with this recipe")
    with safe_open(path, framework="pt") as f:
        return dense.load_moments({n: f.get_tensor(n) for n in f.keys()}, f.metadata())  # noqa: SIM118
