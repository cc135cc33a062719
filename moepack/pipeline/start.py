"""Open a `LayerWalk` from a checkpoint, a recipe and a text, or from a calibrated work directory.

Bad input is refused before any layer is read. The work directory gets the settings that later runs must share.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.spec import EXPERT_DTYPES, LOSSLESS, Version, lossless, lossy
from moepack.pack.writer import replace_file
from moepack.quantize import methods
from moepack.runtime.planning.config import longest_context
from moepack.shared.progress import SILENT, Reporter
from moepack.shared.version import __version__

from .allocate import check_allocation
from .artifacts import PROBE, RECIPE, RunRecord, run_record, save, watched
from .bound import MAPPED, MemoryPlan, place
from .needs import Dense, needs_of
from .recipe import Recipe, TextSource, parse_recipe, unused_group_sizes, with_native, with_text
from .released import announce
from .run import LayerWalk
from .tasks.result import THREADS
from .work import DIGESTS, WorkDirectory

if TYPE_CHECKING:
    from moepack.calibrate.checkpoint import Checkpoint
    from moepack.calibrate.stream import StreamedModel
    from moepack.calibrate.text.windows import Windows

WAY = "way of quantising dense matrices", f"slices on {THREADS} thread"  # another way would make other bytes


def calibration_text(
    checkpoint: Checkpoint, recipe: Recipe, calibration: Sequence[str | Path]
) -> tuple[list[str], Windows]:
    """Read the calibration text; return the names of its sources, and its windows.

    There are `samples` windows, no longer than the model's position limit.
    `calibration`: files or Hub data sets in place of the recipe's.
    """
    from moepack.calibrate.text import windows as data
    from moepack.families.tokenizer import load_tokenizer

    how = recipe.calibration
    tokenizer = load_tokenizer(checkpoint.path)
    sources = [TextSource(str(s)) for s in calibration] or how.data
    names = [s.source for s in sources]
    weights = [s.weight for s in sources]
    count, length = window_shape(checkpoint, recipe)
    return names, data.calibration_windows(names, tokenizer, count, length, how.seed, weights)


def note_unused(recipe: Recipe, reporter: Reporter) -> None:
    """Tell the reporter of group sizes that no version of a recipe takes."""
    if unused := unused_group_sizes(recipe):
        reporter.note(unused)


def note_shorter(checkpoint: Checkpoint, recipe: Recipe, reporter: Reporter) -> None:
    """Tell the reporter where the model's longest context makes a recipe's windows shorter."""
    asked = recipe.calibration.length
    length = window_shape(checkpoint, recipe)[1]
    if length < asked:
        reporter.note(f"calibration.length: {length:,} tokens, the model's longest context, not {asked:,}")


def window_shape(checkpoint: Checkpoint, recipe: Recipe) -> tuple[int, int]:
    """The most windows that a recipe takes, and tokens of one."""
    how = recipe.calibration
    return how.samples, min(how.length, longest_context(checkpoint.config) or how.length)


def start(
    directory: WorkDirectory,
    checkpoint: str | Path,
    recipe: Recipe,
    calibration: Sequence[str | Path],
    fresh: bool,
    device: str,
    reporter: Reporter,
    revision: str | None = None,
    memory: int | None = None,
    keep: bool = True,
) -> LayerWalk:
    """Open a walk that calibrates, in `memory` bytes. `keep` saves activations, from which another run can resume."""
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.text.documents import check_source

    note_unused(recipe, reporter)
    recipe = with_text(recipe)
    for text in calibration if Path(checkpoint).is_dir() else ():
        check_source(str(text))  # before transformers is imported
    with reporter.hub_bars():
        opened = open_checkpoint(checkpoint, revision)

    from moepack.calibrate.logits import probe
    from moepack.calibrate.stream import StreamedModel

    stream = StreamedModel(opened, device)
    if memory is not None and recipe.allocation is not None and recipe.allocation.weight == "logits":
        raise InputError("allocation.weight: logits takes a pass that --memory does not count: leave one of them out")
    keeps_mtp = recipe.mtp == "keep" and bool(stream.mtp)
    recipe, dense = named(stream, recipe, reporter)
    methods.check_libraries(recipe.quantize.method, lossy(recipe.version_specs()))
    announce(stream, recipe, [m for part in dense.values() for m in part], reporter)
    if stream.expert_dtype != "BF16" and LOSSLESS in recipe.versions:
        reporter.note(f"the {LOSSLESS} version holds {EXPERT_DTYPES[stream.expert_dtype]}")
    settings = recipe.calibration
    note_shorter(opened, recipe, reporter)
    sources, windows = calibration_text(opened, recipe, calibration)
    count, length = windows.ids.shape
    how = _fit(directory, stream, recipe, dense, memory, count, length, fresh, reporter=reporter)
    identity = _identity(directory, opened, reporter)
    if len(windows.ids) < settings.samples:
        reporter.note(f"the calibration text fills {len(windows.ids)} of {settings.samples} samples")
    directory.begin(
        "calibrate",
        {
            "checkpoint": identity,
            "calibration tokens": windows.digest,
            "batch_size": how.batch_size,
            "dtype": settings.dtype,
            "moepack": __version__,
            "dense": watched(recipe),
            "mtp": recipe.mtp if keeps_mtp else None,
        },
        fresh,
        {
            "checkpoint": opened.name,
            "text": [Path(source).name for source in sources],
            **{name: getattr(settings, name) for name in ("samples", "length", "seed")},
        },
    )
    record = _record(stream, recipe, sources, windows, keeps_mtp)
    record["dense"] = list(dense)
    replace_file(directory.path / "run.json", json.dumps(record, indent=1).encode())
    _begin_quantize(directory, "quantize", recipe, fresh)
    save(directory.piece("calibrate", None, PROBE), {"ids": probe(windows.ids)})
    return LayerWalk(directory, stream, recipe, windows.ids, dense, how, reporter, keep=keep)


def _record(
    stream: StreamedModel, recipe: Recipe, sources: Sequence[str], windows: Windows, keeps_mtp: bool
) -> RunRecord:
    from moepack.calibrate.dense import native_dense

    opened = stream.checkpoint
    record: RunRecord = {
        "checkpoint": str(Path(opened.path).absolute()),
        "name": opened.name,
        "recipe": recipe.text,
        "sources": [Path(s).name for s in sources],
        "windows": list(windows.taken),
        "samples": len(windows.ids),
        "length": windows.ids.shape[1],
        "digest": windows.digest,
        "untied": stream.untied,
        "unused": len(stream.unused) + (0 if keeps_mtp else len(stream.mtp)),
        "model": {
            "model_type": opened.config.model_type,
            "architecture": type(stream.model).__name__,
            "expert_dtype": stream.expert_dtype,
            **({"mtp": recipe.mtp} if keeps_mtp else {}),
        },
        "decoder_layers": len(stream.layers),
        "expert_layers": [asdict(layer) for layer in stream.expert_layers.values()],
    }
    if recipe.keeps_released:
        record["native"] = stream.native.record()
        record["native_dense"] = native_dense(stream).record()
    return record


def resume(
    directory: WorkDirectory,
    recipe: Recipe | None,
    fresh: bool,
    device: str,
    reporter: Reporter,
    stage: str = "quantize",
    memory: int | None = None,
) -> LayerWalk:
    """Open a walk that quantises in the stage `stage`, from a calibrated work directory, in `memory` bytes."""
    from moepack.calibrate.checkpoint import open_checkpoint

    where = run_record(directory)
    first = parse_recipe(where["recipe"], f"{directory.path / 'run.json'}: recipe")
    if recipe is not None and stage == "quantize":
        note_unused(recipe, reporter)
    recipe = recipe or first
    if (recipe.calibration, recipe.mtp) != (first.calibration, first.mtp):
        reporter.note("the work directory is calibrated already: this recipe's calibration and mtp are ignored")
        recipe = replace(recipe, calibration=first.calibration, mtp=first.mtp)
    opened = open_checkpoint(where["checkpoint"])

    from moepack.calibrate.stream import StreamedModel  # imports torch

    stream = StreamedModel(opened, device)
    if stage == "quantize" or recipe.versions:  # a recipe of dense matrices alone has no valid text
        recipe = with_text(recipe)
    recipe, dense = named(stream, recipe)
    how = _fit(directory, stream, recipe, dense, memory, where["samples"], where["length"], walks=False)
    was = directory.settings()["calibrate"]["checkpoint"]
    now = _identity(directory, opened, reporter)
    if now != was:
        other = next(name for name in sorted({*was, *now}) if was.get(name) != now.get(name))
        raise InputError(
            f"{where['checkpoint']}: {other} is not what {directory.path} was calibrated with: name another --work"
        )
    walk = LayerWalk(directory, stream, recipe, None, dense, how, reporter, stage)
    if fresh or stage != "quantize":
        walk.check_observed()
    _begin_quantize(directory, stage, recipe, fresh)
    return walk


def _identity(directory: WorkDirectory, checkpoint: Checkpoint, reporter: Reporter) -> dict[str, str]:
    from moepack.calibrate.identity import identity

    reporter.stage("read the checkpoint", 1)
    reporter.step(checkpoint.name)
    reporter.inner("bytes", checkpoint.bytes)
    digests, kept = identity(checkpoint, directory.read(directory.path / DIGESTS) or {}, reporter.advance)
    replace_file(directory.path / DIGESTS, json.dumps(kept, indent=1).encode())
    return digests


def named(
    stream: StreamedModel, recipe: Recipe, reporter: Reporter = SILENT, announced: Version | None = None
) -> tuple[Recipe, Dense]:
    """The recipe with released versions by name, and the dense matrices that get versions, by part.

    `announced` is the experts' released version, if not their tensors but the configuration tells. Raises InputError as
    `with_native` does, and for an allocation that cannot be met.
    """
    from moepack.calibrate.dense import dense_matrices, native_dense

    if recipe.keeps_released:
        recipe = with_native(recipe, announced or stream.native, native_dense(stream))
    kept = every = dense_matrices(stream) if recipe.dense else ()
    exact = lossless(recipe.dense_specs())
    if exact is not None and exact.released:
        encoded = stream.checkpoint.encoded
        native = stream.dense_versions
        kept = tuple(m for m in every if native.get(m.module) == exact)
        rest = [m.module for m in every if m not in kept]
        if not recipe.fits_dense:
            rest = [m for m in rest if any(key in encoded for key in stream.weights_of(f"{m}.weight"))]
        if rest:
            reporter.note(
                f"{len(rest)} matrices outside the experts, as {rest[0]}, stay in BF16: of these matrices, those that "
                f"the checkpoint has as {exact.name} get versions"
            )
    found: Dense = {}
    for matrix in kept:
        found.setdefault(matrix.layer, []).append(matrix)
    layers = list(stream.expert_layers.values())
    check_allocation(recipe.allocation, layers, recipe.version_specs(), kept, recipe.dense_specs())
    return recipe, found


def _fit(
    directory: WorkDirectory,
    stream: StreamedModel,
    recipe: Recipe,
    dense: Dense,
    memory: int | None,
    windows: int,
    length: int,
    fresh: bool = False,
    walks: bool = True,
    reporter: Reporter = SILENT,
) -> MemoryPlan:
    """Plan a build in `memory` bytes, or raise InputError. None keeps an earlier run's batch size and sets no bound."""
    size = recipe.calibration.batch_size
    if memory is None:
        if walks and not fresh and (begun := _begun(directory, recipe)) != size:
            reporter.note(f"goes on with {begun} windows at once, as an earlier --memory set")
            size = begun
        if not walks:
            return MemoryPlan(size)
        needs = needs_of(stream, recipe, windows, length, dense)
        return MemoryPlan(size, reuse=place(needs, size, None).reuse)
    needs = needs_of(stream, recipe, windows, length, dense, bounded=True)
    if not walks:  # observations are mapped from the first stage's files, and no dtype is converted
        needs = replace(needs, outside=0, layer=needs.waiting, layer_on_disk=needs.waiting_on_disk)
        return place(replace(needs, hidden=0, window=0, forward=0, seen=MAPPED), 1, memory)
    # Take an earlier run's batch size if it fits: the bits of the activations depend on it.
    earlier = {} if fresh else directory.settings().get("calibrate", {})
    before = earlier.get("batch_size", size)
    how = place(needs, min(size, before), memory)
    if how.batch_size < before <= size and directory.holds("calibrate"):
        raise InputError(
            f"{directory.path}: was begun with {before} windows at once, and --memory leaves room for "
            f"{how.batch_size}: give it more, name another --work, or start over with --fresh"
        )
    if how != place(needs, size, None):
        on_disk = f"; on disk, {how.on_disk}" if how.on_disk else ""
        shards = f" or {how.row_shards} row shards of dense matrices" if dense else ""
        at_once = f"{how.batch_size} windows, {how.batches} expert batches{shards}"
        reporter.note(f"to stay in --memory: at once {at_once}{on_disk}")
    return how


def _begun(directory: WorkDirectory, recipe: Recipe) -> int:
    """The batch size of an earlier run, perhaps lowered by --memory; the recipe's if that run's recipe had another."""
    size = recipe.calibration.batch_size
    try:
        before = parse_recipe(run_record(directory)["recipe"], "run.json")
    except InputError:  # no earlier run, or a recipe of another moepack
        return size
    begun = directory.settings()["calibrate"]
    return int(begun["batch_size"]) if before.calibration.batch_size == size else size


def quantize_settings(recipe: Recipe) -> dict[str, object]:
    """The settings of a stage that quantises, which a later run must share."""
    from moepack.quantize.losses import ESTIMATE

    by_recipe = asdict(recipe.quantize)
    del by_recipe["group_size"], by_recipe["scale_bits"]  # each version's record has them
    return by_recipe | {
        "versions": [v.record() for v in recipe.version_specs()],
        "estimate of losses": ESTIMATE,
        "allocation": None if recipe.allocation is None else asdict(recipe.allocation),
        "dense": [v.record() for v in recipe.dense_specs()] or None,
        WAY[0]: WAY[1] if recipe.dense else None,
    }


def _begin_quantize(directory: WorkDirectory, stage: str, recipe: Recipe, fresh: bool) -> None:
    directory.begin(stage, quantize_settings(recipe), fresh)
    if stage == "quantize":
        replace_file(directory.path / stage / RECIPE, recipe.text.encode())
