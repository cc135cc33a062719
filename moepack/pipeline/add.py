"""Versions added to a built bundle, or replaced, from what calibration left in the work directory.

Nothing is calibrated again, and nothing is quantised that the work directory has. What is missing goes through the pass
of a build into a stage of its own. Then the bundle is assembled from all stages, as a build of all these versions would
be, and replaces the old one in one step. docs/design/adding.md gives the reasons.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from moepack.pack.errors import InputError
from moepack.pack.manifest import MANIFEST
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import (
    LOSSLESS,
    Version,
    dense_file,
    dense_layers,
    encoding_of,
    expert_file,
    version_names,
)
from moepack.pack.writer import check_replaceable, check_target
from moepack.progress import Reporter
from moepack.runtime.load import check_device

from .artifacts import no_moments, quantised_recipe, run_record
from .assemble import BuildReport, Chosen, assemble, expert_layers, made_by, quantised_settings
from .executors.engine import check_engine, open_executor
from .model_card import model_card
from .recipe import Recipe, parse_recipe, with_versions
from .start import WAY, quantize_settings, resume
from .work import ADDED, WorkDirectory

_CARD = "README.md"
_PULLED = (".pulled.json", ".pulling")  # of a bundle that came from the Hub: the new one is another
# Settings that stages must share for their versions to stand side by side: those of the recipe, and all.
_BY_RECIPE = ("method", "min_tokens", "loss_tokens", "moments")
_ALIKE = (*_BY_RECIPE, "estimate of losses")
_DENSE_ALIKE = ("method",)  # for dense matrices

Versions = tuple[Version, ...]
Stages = dict[Version, str]  # version -> the stage that made it


def add(
    output: str | Path,
    work: str | Path,
    versions: Sequence[str],
    group_sizes: Mapping[str, int] | None = None,
    checkpoint: str | Path | None = None,
    fresh: bool = False,
    device: str = "cpu",
    engine: str = "local",
    address: str | None = None,
    reporter: Reporter | None = None,
    revision: str | None = None,
    memory: int | None = None,
    dense: Sequence[str] = (),
) -> BuildReport:
    """Add versions of experts or dense matrices to a bundle, or replace those that it has with other group sizes.

    The result is, byte for byte, a build of all these versions from the same statistics, with the same libraries and
    threads. Stopped at any moment, the bundle is the old or the new one. Other files there and an edited card stay.

    Args:
        output: the bundle; where there is none, one is made of the work directory's versions and these.
        work: the work directory that it was built in with `keep`, or calibrated in.
        versions, dense: names, of experts and of dense matrices. `dense` needs a calibration by a recipe with it.
        group_sizes: by name, where not the recipe's.
        checkpoint: the model directory or Hub id, compared with the work directory's.
        fresh: discard what an earlier call left in `work`.
        device, engine, address, reporter, revision, memory: as of `build`; MoepackError leaves the bundle unchanged.
    """
    reporter, target = reporter or Reporter(), Path(output)
    check_engine(engine, address)
    check_device(device)
    with contextlib.closing(WorkDirectory(Path(work))) as directory:
        record, made = run_record(directory), quantised_settings(directory)
        _check_checkpoint(checkpoint, revision, record, directory)
        old = _opened(target)
        recipe, wanted, dense_wanted = _wanted(directory, record, made, old, versions, dense, group_sizes or {})
        # A bundle from the Hub may hold fewer versions than its manifest names.
        asked = {(wanted, dense_wanted)}
        if old is not None and asked == {(b.versions, b.dense_versions) for b in (old, old.manifest)}:
            return _unchanged(target, old, record, wanted, dense_wanted, reporter)
        stages = _stages(directory, record, wanted, made, fresh, "versions")
        dense_stages = _stages(directory, record, dense_wanted, made, fresh, "dense")
        if old is not None:
            _check_recipe(directory, target, quantize_settings(recipe), made)
            _check_same(directory, old, stages, dense_stages)
        missing, dense_missing = (
            [v for v in wanted if v not in stages],
            [v for v in dense_wanted if v not in dense_stages],
        )
        if missing or dense_missing:
            stage, part = _missing_stage(recipe, missing, dense_missing)
            _check_estimate(directory, quantize_settings(part), made)
            walk = resume(directory, part, fresh, device, reporter, stage, memory)
            with contextlib.closing(open_executor(engine, address)) as executor:
                walk.layers(calibrate=False, quantize=True, executor=executor)
            stages |= dict.fromkeys(missing, stage)
            dense_stages |= dict.fromkeys(dense_missing, stage)
        chosen = Chosen({v: stages[v] for v in wanted}, recipe, {v: dense_stages[v] for v in dense_wanted})
        return assemble(directory, target, reporter, chosen, None if old is None else _others(old))


def _missing_stage(recipe: Recipe, missing: Sequence[Version], dense: Sequence[Version]) -> tuple[str, Recipe]:
    """The name of the stage that makes missing versions, and its recipe."""
    named = [f"{v.name}.{v.group_size}" for v in missing] + [f"dense-{v.name}.{v.group_size}" for v in dense]
    names, dense_names = (tuple(v.name for v in some) for some in (missing, dense))
    return ADDED + "-".join(named), replace(recipe, versions=names, allocation=None, dense=dense_names)


def _unchanged(
    target: Path, old: Bundle, record: Mapping[str, Any], wanted: Versions, dense: Versions, reporter: Reporter
) -> BuildReport:
    """The report of a bundle that stays as it is."""
    reporter.note(f"{target}: holds these versions already")
    methods = made_by(old.calibration())  # a shrunk one's tables have more versions
    methods = {v.name: methods[v.name] for v in wanted if v.name in methods}
    tokens = record["samples"] * record["length"]
    return BuildReport(target, tokens, methods, record["unused"], tuple(v.name for v in dense))


def parse_group_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Parse VERSION=SIZE.

    Raises:
        InputError: for another form.
    """
    out = {}
    for text in texts:
        name, equals, size = text.partition("=")
        if not equals or not size.isdecimal():
            raise InputError(f"--group-size {text}: write VERSION=SIZE, as w4=32")
        out[name] = int(size)
    return out


def _check_checkpoint(
    checkpoint: str | Path | None, revision: str | None, record: Mapping[str, Any], directory: WorkDirectory
) -> None:
    if checkpoint is None:
        return
    from moepack.calibrate.checkpoint import open_checkpoint

    path = str(Path(open_checkpoint(checkpoint, revision).path).absolute())
    if path != record["checkpoint"]:
        raise InputError(f"{directory.path}: is of {record['checkpoint']}, not of {path}: name another --work")


def _opened(target: Path) -> Bundle | None:
    """The bundle to replace; None where there is none yet."""
    if not (target / MANIFEST).is_file():
        check_target(target)
        return None
    check_replaceable(target)
    return open_bundle(target)


def _wanted(
    directory: WorkDirectory,
    record: Mapping[str, Any],
    made: Mapping[str, Any],
    old: Bundle | None,
    names: Sequence[str],
    dense: Sequence[str],
    sizes: Mapping[str, int],
) -> tuple[Recipe, Versions, Versions]:
    """The new bundle's recipe, and all its versions, of experts and of dense matrices, the most precise first.

    Raises:
        InputError: for versions that cannot be added, or a bundle of another work directory.
    """
    recipe = quantised_recipe(directory)
    if old is not None:
        recipe = _recipe_of(old, directory, record)
    elif made["versions"] != [v.record() for v in recipe.version_specs()]:
        raise InputError(f"{directory.path}: was quantised by another recipe than it was calibrated with")
    before = recipe.version_specs() if old is None else old.manifest.versions
    # A model may have no dense matrix that gets versions, whatever the recipe says.
    dense_before = old.manifest.dense_versions if old is not None and record["dense"] else recipe.dense_specs()
    if not (*names, *dense):
        raise InputError("name the versions to add, as w2")
    for name in (*names, *dense):
        if name not in version_names():
            raise InputError(f"version {name!r} is unknown: there are {', '.join(version_names())}")
    for name in sorted(set(sizes) - {*names, *dense}):
        raise InputError(
            f"--group-size {name}: is of no version that is added: name it with --add or --add-dense as well"
        )
    wanted = _merged(before, recipe, names, sizes)
    # The lossless version of dense matrices is made with every other.
    dense_wanted = _merged(dense_before, recipe, (LOSSLESS, *dense) if dense or dense_before else (), sizes)
    if dense_wanted and not directory.settings()["calibrate"].get("dense"):
        raise no_moments(directory)
    if dense and not record["dense"]:
        raise InputError(f"{directory.path}: --add-dense: the model has no dense matrices that get versions")
    return with_versions(recipe, wanted, dense_wanted), wanted, dense_wanted if record["dense"] else ()


def _recipe_of(old: Bundle, directory: WorkDirectory, record: Mapping[str, Any]) -> Recipe:
    """The recipe of a bundle, which has to be one of this work directory."""
    found = old.manifest.provenance
    calibration, checkpoint = (x if isinstance(x := found.get(k), dict) else {} for k in ("calibration", "checkpoint"))
    files = directory.settings()["calibrate"]["checkpoint"]
    if calibration.get("tokens_sha256") != record["digest"] or checkpoint.get("files") != files:
        raise InputError(
            f"{old.path}: was not made of what {directory.path} holds: name the --work that it was built in"
        )
    return parse_recipe(str(found.get("recipe")), f"{old.path / MANIFEST}: recipe")


def _merged(before: Sequence[Version], recipe: Recipe, names: Sequence[str], sizes: Mapping[str, int]) -> Versions:
    """Versions with some added or replaced, the most precise first."""
    wanted, own = {v.name: v for v in before}, recipe.quantize.group_size
    for name in names:
        possible = encoding_of(name).group_sizes
        size = sizes.get(name, own if isinstance(own, int) else own.get(name, 64))
        if possible and size not in possible:
            raise InputError(f"--group-size {name}={size}: groups are of {', '.join(map(str, possible))}")
        wanted[name] = Version.of(name, size)
    return tuple(wanted[name] for name in version_names() if name in wanted)


def _stages(
    directory: WorkDirectory,
    record: Mapping[str, Any],
    wanted: Versions,
    made: Mapping[str, Any],
    fresh: bool,
    kind: str,
) -> Stages:
    """The last stage that made each version, where it is finished; `kind` is "versions" or "dense", of the settings."""
    out: Stages = {}
    layers = [layer.index for layer in expert_layers(record)]
    alike = _ALIKE if kind == "versions" else (*_DENSE_ALIKE, WAY[0])
    here = {**made, WAY[0]: WAY[1]}
    for stage, how in directory.settings().items():
        if stage != "quantize" and (fresh or not stage.startswith(ADDED)):
            continue
        held = [Version.read(v) for v in how.get(kind) or ()]
        # An added stage that was stopped goes on as a whole: its dense matrices may be what is left of it.
        own = [*(layers if kind == "versions" else ()), *(record["dense"] if kind == "dense" else ())]
        if stage != "quantize":
            own = [*(layers if how["versions"] else ()), *(record["dense"] if how.get("dense") else ())]
        if all(how.get(k) == here.get(k) for k in alike) and all(directory.done(stage, i) is not None for i in own):
            out |= {v: stage for v in wanted if v in held}
    return out


def _check_recipe(directory: WorkDirectory, target: Path, asked: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """Refuse a work directory that was quantised again by another recipe than the bundle's."""
    for key in _BY_RECIPE:
        if asked.get(key) != made.get(key):
            raise InputError(
                f"{directory.path}: was quantised with {key} {made.get(key)}, {target} with {asked.get(key)}, and "
                "losses would not compare: quantise it by the bundle's recipe (moepack quantize --fresh), or name "
                "another --work"
            )


def _check_same(directory: WorkDirectory, old: Bundle, stages: Stages, dense_stages: Stages) -> None:
    """Refuse a work directory whose files of the bundle's versions are not the bundle's, by their digests."""
    manifest = old.manifest
    found = [
        (expert_file(v.name, layer.index), v.name, directory.done(stage, layer.index) or {})
        for v, stage in stages.items() if v in manifest.versions for layer in old.layers
    ] + [
        (dense_file(v.name, layer.index), v.name, (directory.done(stage, layer.index) or {}).get("dense", {}))
        for v, stage in dense_stages.items() if v in manifest.dense_versions for layer in dense_layers(manifest.dense)
    ]  # fmt: skip
    for file, name, note in found:
        if file in manifest.expert_files and note.get("entries", {}).get(name) != asdict(manifest.expert_files[file]):
            raise InputError(
                f"{directory.path}: its {file} is not the one of {old.path}: it was built anew since, by other "
                "settings or on another machine; name the --work that the bundle was built in"
            )


def _check_estimate(directory: WorkDirectory, how: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    was, now = (x.get("estimate of losses") for x in (made, how))
    if how["versions"] and was != now:
        raise InputError(
            f"{directory.path}: was quantised by a moepack that measures losses in another way ({was}, now {now}): "
            "they would not compare; build anew"
        )


def _others(old: Bundle) -> list[str]:
    """Files of a bundle's directory that are not the bundle's: its successor keeps them."""
    own = {MANIFEST, *old.manifest.files, *old.manifest.expert_files}
    names = []
    for folder, folders, files in os.walk(old.path):
        here = Path(folder).relative_to(old.path)
        folders[:] = [name for name in folders if (here / name).as_posix() not in _PULLED]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        names += [(here / name).as_posix() for name in (*files, *links)]
    out = sorted(name for name in names if name not in own and name not in _PULLED)
    return out if _edited(old) else [name for name in out if name != _CARD]


def _edited(old: Bundle) -> bool:
    """Whether the model card was edited."""
    try:
        text = (old.path / _CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return (old.path / _CARD).exists()
    return text != model_card(old.manifest, old.calibration(), [v.name for v in old.manifest.versions])
