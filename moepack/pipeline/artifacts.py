"""What a build's stages hand on to each other through the work directory: the run's record, tensors, activations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError, TargetError
from moepack.pack.safetensors_file import make_header, read_header
from moepack.pack.writer import sync

from .recipe import Recipe, parse_recipe
from .work import WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.forward import Observation


MOMENTS = "moments.safetensors"
DIGESTS = "digests.json"  # what is known of the checkpoint's files
RECIPE = "recipe.yaml"  # in a stage's folder: what it quantises by
SHARD = 4 << 30  # bytes of dense tensors in one file, at the most
_WRITTEN = 1 << 24  # bytes that are written at once: of what is mapped from a file, no more is in memory
_NAMES = {
    "torch.bool": "BOOL", "torch.uint8": "U8", "torch.int8": "I8", "torch.int16": "I16", "torch.uint16": "U16",
    "torch.int32": "I32", "torch.uint32": "U32", "torch.int64": "I64", "torch.uint64": "U64",
    "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32", "torch.float64": "F64",
    "torch.float8_e4m3fn": "F8_E4M3", "torch.float8_e5m2": "F8_E5M2", "torch.float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip


def run_record(directory: WorkDirectory) -> dict[str, Any]:
    """What the first stage noted of the run; InputError where it has not run."""
    try:
        record = dict(json.loads((directory.path / "run.json").read_text()))
        directory.settings()["calibrate"], record["recipe"], record["expert_layers"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{directory.path}: is not calibrated yet: run moepack calibrate first") from None
    return {"dense": []} | record  # which an older one has not


def digested(directory: WorkDirectory) -> dict[str, Any]:
    """What is known of the checkpoint's files."""
    try:
        known = json.loads((directory.path / DIGESTS).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def quantised_recipe(directory: WorkDirectory) -> Recipe:
    """The recipe that experts were quantised by last, which may be another than they were calibrated with."""
    path = directory.path / "quantize" / RECIPE
    if path.is_file():
        return parse_recipe(path.read_text(), str(path))
    return parse_recipe(run_record(directory)["recipe"], f"{directory.path / 'run.json'}: recipe")


def save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors so that the file is whole or absent."""
    import torch

    from moepack.calibrate.held import release

    # Wide elements first, as the format advises.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header = make_header({n: (_NAMES[str(tensors[n].dtype)], tuple(tensors[n].shape)) for n in order}, metadata or {})
    temporary = path.with_name(path.name + ".partial")
    try:
        with temporary.open("wb") as file:
            file.write(header)
            for name in order:
                whole = tensors[name].detach().cpu().contiguous()
                for part in whole.view(-1).view(torch.uint8).split(_WRITTEN):
                    file.write(part.numpy().data)
                    release(whole)
        sync(temporary)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise TargetError(f"{path}: cannot be written: {error.strerror}") from None
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
    from moepack.calibrate.held import mapped

    path = work.piece("calibrate", layer, "observation.safetensors")
    if not path.exists():
        raise not_calibrated(work, layer)
    with safe_open(path, framework="pt") as f:
        length = int(f.metadata()["length"])
        experts, gates = f.get_tensor("experts"), f.get_tensor("gates")
        dtype = f.get_slice("inputs")[:0].dtype
    entry = read_header(path).tensors["inputs"]
    return Observation(mapped(path, entry.begin, entry.shape, dtype), experts, gates, length)


def not_calibrated(work: WorkDirectory, layer: int) -> InputError:
    """What to say where calibrating did not come to a layer."""
    return InputError(f"{work.path}: layer {layer} is not calibrated: run moepack calibrate to its end")


def no_moments(work: WorkDirectory) -> InputError:
    """What to say where what dense matrices read is not there."""
    return InputError(
        f"{work.path}: was calibrated without dense, or what those matrices read was not kept: build with --keep, or "
        "run moepack calibrate, with dense: in the recipe and in another --work"
    )


def load_moments(work: WorkDirectory, part: int | None) -> DenseMoments:
    """What a part's dense matrices read, as the calibrate stage kept it."""
    from safetensors import safe_open

    from moepack.calibrate import dense

    path = work.piece("calibrate", part, MOMENTS)
    if not path.exists():
        raise no_moments(work)
    with safe_open(path, framework="pt") as f:
        return dense.load_moments({n: f.get_tensor(n) for n in f.keys()}, f.metadata())  # noqa: SIM118
