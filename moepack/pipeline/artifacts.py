"""Write and read what a stage leaves in the work directory for later ones: the run's record, tensors, activations."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from moepack.pack.errors import InputError
from moepack.pack.files import in_one_step
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.safetensors_file import read_header
from moepack.pack.spec import LOSSLESS, Version

from .recipe import Recipe, parse_recipe, with_native
from .saved import write_saved
from .work import WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.forward import Observation

MOMENTS = "moments.safetensors"
PROBE = "probe.safetensors"  # the text of `moepack.calibrate.logits`, token ids
RECIPE = "recipe.yaml"  # in a stage's folder: the recipe that it quantises by
SHARD = 4 << 30  # the most bytes of dense tensors in one file


class RunRecord(TypedDict):
    """The record of a calibration, stored in run.json."""

    checkpoint: str  # its directory
    name: str
    recipe: str  # the recipe's text
    sources: list[str]
    windows: list[int]  # taken of each source
    samples: int
    length: int
    digest: str  # of the windows
    untied: bool
    unused: int  # tensors of the checkpoint that the bundle leaves out
    model: dict[str, str]
    decoder_layers: int
    expert_layers: list[JsonObject]
    dense: NotRequired[list[int | None]]  # parts with dense matrices that have versions
    # Records of the versions that hold experts and dense matrices as released; absent if the recipe keeps none.
    native: NotRequired[JsonObject]
    native_dense: NotRequired[JsonObject]


def run_record(directory: WorkDirectory) -> RunRecord:
    """Read run.json, the record of the run, from the calibrate stage. Raises InputError if that stage has not run."""
    try:
        record: RunRecord = json.loads((directory.path / "run.json").read_text())
        directory.settings()["calibrate"], record["recipe"], record["expert_layers"]
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{directory.path}: is not calibrated yet: run moepack calibrate first") from None
    return record


def natives_of(record: RunRecord) -> tuple[Version, Version]:
    """The versions that hold experts and dense matrices as released, from the record of the run."""
    if "native" not in record:  # the recipe keeps nothing as released
        return Version.of(LOSSLESS), Version.of(LOSSLESS)
    return Version.read(record["native"]), Version.read(record["native_dense"])


def quantised_recipe(directory: WorkDirectory) -> Recipe:
    """The recipe of the last quantize stage, which may differ from the calibration's."""
    path = directory.path / "quantize" / RECIPE
    record = run_record(directory)
    text = record["recipe"]
    where = f"{directory.path / 'run.json'}: recipe"
    if path.is_file():
        text = path.read_text()
        where = str(path)
    return with_native(parse_recipe(text, where), *natives_of(record))


def save(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors to a safetensors file. A killed process leaves a whole file at `path`, or none."""
    with in_one_step(path) as file:
        write_saved(file, tensors, metadata or {})


def load_hidden(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the activations that `save` wrote, by name in its order, each read on demand."""
    from safetensors import safe_open

    with safe_open(path, framework="pt") as f:
        names = sorted(f.keys())
    for name in names:  # reopened for each: an open file keeps in memory what was read
        with safe_open(path, framework="pt") as f:
            yield name, f.get_tensor(name)


def load_observation(work: WorkDirectory, layer: int) -> Observation:
    """Load the observation of a layer's experts that the calibrate stage kept."""
    from safetensors import safe_open

    from moepack.calibrate.forward import Observation
    from moepack.calibrate.held import mapped

    path = work.piece("calibrate", layer, "observation.safetensors")
    if not path.exists():
        raise unfinished(work, "calibrate", layer)
    with safe_open(path, framework="pt") as f:
        length = int(f.metadata()["length"])
        experts = f.get_tensor("experts")
        gates = f.get_tensor("gates")
        dtype = f.get_slice("inputs")[:0].dtype
    entry = read_header(path).tensors["inputs"]
    return Observation(mapped(path, entry.begin, entry.shape, dtype), experts, gates, length)


def finished(work: WorkDirectory, stage: str, part: int | None) -> JsonObject:
    """The note of a finished piece: a stage's work on one part. Raises InputError if the piece is not finished."""
    note = work.done(stage, part)
    if note is None:
        raise unfinished(work, stage, part)
    return note


def unfinished(work: WorkDirectory, stage: str, part: int | None) -> InputError:
    """Make the error for a piece that a stage did not finish."""
    done, command = ("calibrated", "calibrate") if stage == "calibrate" else ("quantised", "quantize")
    where = "the part outside the layers" if part is None else f"layer {part}"
    return InputError(f"{work.path}: {where} is not {done}: run moepack {command} to its end")


def watched(recipe: Recipe) -> bool | str | None:
    """Return what calibration records of dense matrices: True for moments, "calls" for calls only, None for nothing."""
    return (recipe.fits_dense or "calls") if recipe.dense else None


def check_watched(work: WorkDirectory, recipe: Recipe) -> None:
    """Raise InputError if calibration did not keep what a recipe's versions of dense matrices are made from."""
    if work.settings()["calibrate"].get("dense") not in (True, watched(recipe)):
        raise no_moments(work)


def no_moments(work: WorkDirectory) -> InputError:
    """Make the error for missing second moments of dense matrices' inputs."""
    return InputError(
        f"{work.path}: was calibrated without dense, or without keeping the moments of its matrices: build with "
        "--keep, or run moepack calibrate, with dense: in the recipe and in another --work"
    )


def load_moments(work: WorkDirectory, part: int | None) -> DenseMoments:
    """Load the second moments that the calibrate stage kept for a part's dense matrices."""
    from safetensors import safe_open

    from moepack.calibrate import dense

    path = work.piece("calibrate", part, MOMENTS)
    if not path.exists():
        raise no_moments(work)
    with safe_open(path, framework="pt") as f:
        return dense.load_moments({n: f.get_tensor(n) for n in f.keys()}, f.metadata())  # noqa: SIM118
