"""Add versions to a built bundle, or replace some, from the work directory's calibration.

Nothing is calibrated again, and no finished version is quantised again. A pass over the layers makes the missing
versions, as a stage of their own. The new bundle is then assembled from all stages, as after a build of all these
versions, and replaces the old one in one step. docs/design/adding.md gives the reasons.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from moepack.pack.errors import InputError
from moepack.pack.manifest import MANIFEST
from moepack.pack.manifest.strict_json import JsonObject
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
from moepack.runtime.load import check_device
from moepack.shared.progress import SILENT, Reporter

from .artifacts import RunRecord, check_watched, natives_of, quantised_recipe, run_record
from .assemble import BuildReport, Chosen, assemble, expert_layers, made_by, quantised_settings, report
from .executors.engine import check_engine, open_executor
from .model_card import model_card
from .recipe import NATIVE, Recipe, check_beside, parse_recipe, with_native, with_versions
from .start import WAY, quantize_settings, resume
from .work import ADDED, WorkDirectory, check_work

_CARD = "README.md"
_PULLED = (".pulled.json", ".pulling")  # records of a pull from the Hub, which do not hold for the new bundle
# Settings that stages must share, or losses would not compare: those of the recipe; then all, by kind of version.
_BY_RECIPE = ("method", "loss_tokens", "refine")
_ALIKE = {"versions": (*_BY_RECIPE, "estimate of losses"), "dense": ("method", WAY[0])}

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
    reporter: Reporter = SILENT,
    revision: str | None = None,
    memory: int | None = None,
    dense: Sequence[str] = (),
) -> BuildReport:
    """Add versions of experts or dense matrices to a bundle, or replace versions by others of another group size.

    The result equals, byte for byte, a build of all these versions from the same statistics, with the same libraries
    and threads. A stop at any moment leaves the old bundle or the new one. Other files and an edited card stay.

    Args:
        output: the bundle. If it does not exist, it is made with the work directory's versions and these.
        work: the work directory that the bundle was built in with `keep`, or that `calibrate` filled.
        versions, dense: names, of experts and of dense matrices. `dense` needs a calibration by a recipe with dense.
        group_sizes: version name -> group size, in place of the recipe's.
        checkpoint: the model directory or Hub id; refused if it is not the one of the work directory.
        fresh: discard what an earlier call left in `work`.
        device, engine, address, reporter, revision, memory: as in `build`. A MoepackError leaves the bundle unchanged.
    """
    target = Path(output)
    check_engine(engine, address)
    check_device(device)
    check_work(Path(work), target)
    with contextlib.closing(WorkDirectory(Path(work), reporter)) as directory:
        record = run_record(directory)
        made = quantised_settings(directory)
        _check_checkpoint(checkpoint, revision, record, directory)
        old = _opened(target)
        recipe, wanted = _wanted(directory, record, made, old, versions, dense, group_sizes or {})
        # A bundle from the Hub may hold fewer versions than its manifest names.
        asked = {tuple(wanted.values())}
        if old is not None and asked == {(b.versions, b.dense_versions) for b in (old, old.manifest)}:
            methods = made_by(old.calibration())  # a shrunk bundle's tables have more versions
            methods = {v.name: methods[v.name] for v in wanted["versions"] if v.name in methods}
            return report(target, record, methods, wanted["dense"], unchanged=True)
        stages = {kind: _stages(directory, record, kind, wanted[kind], made, fresh) for kind in _ALIKE}
        if old is not None:
            _check_recipe(directory, target, quantize_settings(recipe), made)
            _check_same(directory, old, stages)
        missing = {kind: tuple(v for v in wanted[kind] if v not in stages[kind]) for kind in _ALIKE}
        if any(missing.values()):
            stage, part = _missing_stage(recipe, missing)
            _check_estimate(directory, quantize_settings(part), made)
            walk = resume(directory, part, fresh, device, reporter, stage, memory)
            with contextlib.closing(open_executor(engine, address)) as executor:
                walk.layers(calibrate=False, quantize=True, executor=executor)
            for kind in _ALIKE:
                stages[kind] |= dict.fromkeys(missing[kind], stage)
        experts, matrices = ({v: stages[kind][v] for v in wanted[kind]} for kind in _ALIKE)
        chosen = Chosen(experts, recipe, matrices)
        return assemble(directory, target, reporter, chosen, None if old is None else _others(old))


def _missing_stage(recipe: Recipe, missing: Mapping[str, Versions]) -> tuple[str, Recipe]:
    prefix = {"versions": "", "dense": "dense-"}
    groups = [f"{prefix[kind]}{v.name}.{v.group_size}" for kind, some in missing.items() for v in some]
    names, dense_names = (tuple(v.name for v in some) for some in missing.values())
    if dense_names:  # says which matrices these are: those that the checkpoint has in this version
        dense_names = tuple(dict.fromkeys((*(n for n in recipe.dense if encoding_of(n).released), *dense_names)))
    return ADDED + "-".join(groups), replace(recipe, versions=names, allocation=None, dense=dense_names)


def parse_group_sizes(texts: Sequence[str]) -> dict[str, int]:
    """Parse texts of the form VERSION=SIZE. Raises InputError for any other text."""
    out = {}
    for text in texts:
        name, equals, size = text.partition("=")
        if not equals or not size.isdecimal():
            raise InputError(f"--group-size {text}: write VERSION=SIZE, as w4=32")
        out[name] = int(size)
    return out


def _check_checkpoint(
    checkpoint: str | Path | None, revision: str | None, record: RunRecord, directory: WorkDirectory
) -> None:
    if checkpoint is None:
        return
    from moepack.calibrate.checkpoint import open_checkpoint

    path = str(Path(open_checkpoint(checkpoint, revision).path).absolute())
    if path != record["checkpoint"]:
        raise InputError(f"{directory.path}: was made of {record['checkpoint']}, not of {path}: name another --work")


def _opened(target: Path) -> Bundle | None:
    if not (target / MANIFEST).is_file():
        check_target(target)
        return None
    check_replaceable(target)
    return open_bundle(target)


def _wanted(
    directory: WorkDirectory,
    record: RunRecord,
    made: JsonObject,
    old: Bundle | None,
    names: Sequence[str],
    dense: Sequence[str],
    sizes: Mapping[str, int],
) -> tuple[Recipe, dict[str, Versions]]:
    """The new bundle's recipe, and all its versions by kind, the most precise first.

    Raises:
        InputError: for versions that cannot be added, or a bundle that was made from another work directory.
    """
    recipe = quantised_recipe(directory)
    if old is not None:
        recipe = _recipe_of(old, directory, record)
    elif made["versions"] != [v.record() for v in recipe.version_specs()]:
        raise InputError(f"{directory.path}: was quantised by another recipe than it was calibrated with")
    before = recipe.version_specs() if old is None else old.manifest.versions
    # A recipe may name dense versions for a model that has no such matrices.
    dense_before = old.manifest.dense_versions if old is not None and record["dense"] else recipe.dense_specs()
    if not (*names, *dense):
        raise InputError("name the versions to add, for example w2")
    for name in (*names, *dense):
        if name not in (NATIVE, *version_names()):
            raise InputError(f"version {name!r} is unknown: there are {', '.join(version_names())}")
        if name == NATIVE or encoding_of(name).released:
            raise InputError(f"{name}: is made where a recipe's versions have {NATIVE}, in a new build")
    for native in before:
        if native.released:
            check_beside(native, names)
    for name in sorted(set(sizes) - {*names, *dense}):
        raise InputError(f"--group-size {name}: this version is not added: name it with --add or --add-dense as well")
    wanted = _merged(before, recipe, names, sizes, recipe.version)
    # Dense matrices that have any version have the lossless one too.
    exact = next((name for name in recipe.dense if encoding_of(name).released), LOSSLESS)
    dense_wanted = _merged(dense_before, recipe, (exact, *dense) if dense or dense_before else (), sizes, Version.of)
    if dense_wanted:
        check_watched(directory, replace(recipe, dense=tuple(v.name for v in dense_wanted)))
    if dense and not record["dense"]:
        raise InputError(f"{directory.path}: --add-dense: the model has no dense matrices that get versions")
    kept = {"versions": wanted, "dense": dense_wanted if record["dense"] else ()}
    return with_versions(recipe, wanted, dense_wanted), kept


def _recipe_of(old: Bundle, directory: WorkDirectory, record: RunRecord) -> Recipe:
    """The recipe of a bundle. Raises InputError for a bundle that was made from another work directory."""
    found = old.manifest.provenance
    calibration, checkpoint = (x if isinstance(x := found.get(k), dict) else {} for k in ("calibration", "checkpoint"))
    files = directory.settings()["calibrate"]["checkpoint"]
    if calibration.get("tokens_sha256") != record["digest"] or checkpoint.get("files") != files:
        raise InputError(
            f"{old.path}: was not made of what {directory.path} holds: name the --work that it was built in"
        )
    recipe = parse_recipe(str(found.get("recipe")), f"{old.path / MANIFEST}: recipe")
    return with_native(recipe, *natives_of(record))


def _merged(
    before: Sequence[Version],
    recipe: Recipe,
    names: Sequence[str],
    sizes: Mapping[str, int],
    made: Callable[[str, int], Version],
) -> Versions:
    """The versions `before`, with those in `names` added or replaced, the most precise first."""
    wanted = {v.name: v for v in before}
    for name in names:
        possible = encoding_of(name).group_sizes
        size = sizes.get(name, recipe.quantize.size(name))
        if possible and size not in possible:
            raise InputError(f"--group-size {name}={size}: groups are of {', '.join(map(str, possible))}")
        wanted[name] = made(name, size)
    return tuple(wanted[name] for name in version_names() if name in wanted)


def _stages(
    directory: WorkDirectory,
    record: RunRecord,
    kind: str,
    wanted: Versions,
    made: JsonObject,
    fresh: bool,
) -> Stages:
    """For each of the `wanted` versions of a kind that is made already, the last finished stage that made it."""
    out: Stages = {}
    parts: dict[str, Sequence[int | None]] = {
        "versions": [layer.index for layer in expert_layers(record)],
        "dense": record["dense"],
    }
    here = {**made, WAY[0]: WAY[1]}
    for stage, how in directory.settings().items():
        if stage != "quantize" and (fresh or not stage.startswith(ADDED)):
            continue
        # A stage that adds counts if all its kinds are finished: a stopped one is resumed as a whole.
        kinds = [kind] if stage == "quantize" else [k for k in parts if how.get(k)]
        finished = all(directory.done(stage, part) is not None for k in kinds for part in parts[k])
        if finished and all(how.get(k) == here.get(k) for k in _ALIKE[kind]):
            held = [Version.read(v) for v in how.get(kind) or ()]
            out |= {v: stage for v in wanted if v in held}
    return out


def _check_recipe(directory: WorkDirectory, target: Path, asked: Mapping[str, object], made: JsonObject) -> None:
    """Raise InputError if the work directory was quantised again since, by another recipe than the bundle's."""
    for key in _BY_RECIPE:
        if asked.get(key) != made.get(key):
            raise InputError(
                f"{directory.path}: was quantised with {key} {made.get(key)}, {target} with {asked.get(key)}, and "
                "losses would not compare: quantise it by the bundle's recipe (moepack quantize --fresh), or name "
                "another --work"
            )


def _check_same(directory: WorkDirectory, old: Bundle, stages: Mapping[str, Stages]) -> None:
    manifest = old.manifest
    found = [
        (expert_file(v.name, layer.index), v.name, directory.done(stage, layer.index) or {})
        for v, stage in stages["versions"].items()
        if v in manifest.versions
        for layer in old.layers
    ] + [
        (dense_file(v.name, layer.index), v.name, (directory.done(stage, layer.index) or {}).get("dense", {}))
        for v, stage in stages["dense"].items()
        if v in manifest.dense_versions
        for layer in dense_layers(manifest.dense)
    ]
    for file, name, note in found:
        if file in manifest.expert_files and note.get("entries", {}).get(name) != asdict(manifest.expert_files[file]):
            raise InputError(
                f"{directory.path}: its {file} is not the one of {old.path}: it was built anew since, by other "
                "settings or on another machine; name the --work that the bundle was built in"
            )


def _check_estimate(directory: WorkDirectory, how: JsonObject, made: JsonObject) -> None:
    was, now = (x.get("estimate of losses") for x in (made, how))
    if how["versions"] and was != now:
        raise InputError(
            f"{directory.path}: was quantised by a moepack that measures losses in another way ({was}, now {now}): "
            "they would not compare; build anew"
        )


def _others(old: Bundle) -> list[str]:
    """The names of files in a bundle's directory that are not part of the bundle. The new bundle keeps them."""
    own = {MANIFEST, *old.manifest.files, *old.manifest.expert_files}
    card = model_card(old.manifest, old.calibration(), [v.name for v in old.manifest.versions])
    with contextlib.suppress(OSError, UnicodeDecodeError):
        own |= {_CARD} if (old.path / _CARD).read_text(encoding="utf-8") == card else set()  # not edited
    names = []
    for folder, folders, files in os.walk(old.path):
        here = Path(folder).relative_to(old.path)
        folders[:] = [name for name in folders if (here / name).as_posix() not in _PULLED]
        links = [name for name in folders if (Path(folder) / name).is_symlink()]
        names += [(here / name).as_posix() for name in (*files, *links)]
    return sorted(name for name in names if name not in own and name not in _PULLED)
