"""Versions added to what was built before, or replaced there, from what calibration left in the work directory: of the
experts, and of dense matrices.

Nothing is calibrated again, and nothing is quantised that the work directory has. What is added goes through the same
pass as in a build, into a stage of its own; the bundle is then put together of all stages, as a build of all these
versions would, and takes the old one's place in one step.
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
from .assemble import Chosen, Report, assemble, expert_layers, made_by, quantised_settings
from .executors import check_engine, open_executor
from .model_card import model_card
from .recipe import Recipe, parse_recipe, with_versions
from .start import WAY, quantize_settings, resume
from .work import ADDED, WorkDirectory

_CARD = "README.md"
_PULLED = (".pulled.json", ".pulling")  # of a bundle that came from the Hub: the new one is another
# What a stage was begun with that has to be the same for its versions to stand beside others: by the recipe, and all.
_BY_RECIPE = ("method", "min_tokens", "loss_tokens", "moments")
_ALIKE = (*_BY_RECIPE, "estimate of losses")
_DENSE_ALIKE = ("method",)  # the same, of dense matrices


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
) -> Report:
    """Add versions of experts or dense matrices to a bundle, or replace those that it has with other group sizes.

    The result is, byte for byte, what a build with all these versions makes of the same statistics, on as many threads
    and with the same libraries. Stopped at any moment, the bundle is the old or the new one, and run again it goes on.
    Files beside the bundle's own stay, and so does a model card that was edited.

    Args:
        output: the bundle; where there is none, one is made of the work directory's versions and these.
        work: the work directory that it was built in with `keep`, or calibrated in.
        versions: names of those of the experts to add.
        group_sizes: by name, where not the recipe's.
        checkpoint: the model directory or Hub id, to be compared with the one that `work` is of.
        fresh: throw away what an earlier call left in `work`.
        device, engine, address, reporter, revision, memory: as of `build`.
        dense: names of those of dense matrices to add; the calibration must have seen these, by a recipe with `dense`.

    Raises:
        MoepackError: one line that says what is wrong and what to do; the bundle is as it was.
    """
    reporter = reporter or Reporter()
    check_engine(engine, address)
    check_device(device)
    target = Path(output)
    with contextlib.closing(WorkDirectory(Path(work))) as directory:
        record, made = run_record(directory), quantised_settings(directory)
        if checkpoint is not None:
            _check_checkpoint(checkpoint, revision, record, directory)
        old = _opened(target)
        recipe = quantised_recipe(directory)
        if old is not None:
            recipe = _recipe_of(old, directory, record)
        elif made["versions"] != [v.record() for v in recipe.version_specs()]:
            raise InputError(f"{directory.path}: was quantised by another recipe than it was calibrated with")
        before = recipe.version_specs() if old is None else old.manifest.versions
        # A model may have no dense matrix that gets versions, whatever the recipe says.
        dense_before = old.manifest.dense_versions if old is not None and record["dense"] else recipe.dense_specs()
        sizes = group_sizes or {}
        _check_names(versions, dense, sizes)
        wanted = _wanted(before, recipe, versions, sizes)
        # The lossless one is always among those of dense matrices: it is made with every other.
        dense_wanted = _wanted(dense_before, recipe, (LOSSLESS, *dense) if dense or dense_before else (), sizes)
        _check_dense(directory, record, dense, dense_wanted)
        recipe = with_versions(recipe, wanted, dense_wanted)
        if not record["dense"]:
            dense_wanted = ()
        asked = wanted, dense_wanted
        # A bundle from the Hub may hold fewer versions than its manifest names.
        if old is not None and {(b.versions, b.dense_versions) for b in (old, old.manifest)} == {asked}:
            reporter.note(f"{target}: holds these versions already")
            tokens, methods = record["samples"] * record["length"], made_by(old.calibration())
            methods = {v.name: methods[v.name] for v in wanted if v.name in methods}  # a shrunk one's tables have more
            return Report(target, tokens, methods, record["unused"], tuple(v.name for v in dense_wanted))
        if old is not None:
            _check_recipe(directory, target, quantize_settings(recipe), made)
        stages = _stages(directory, record, wanted, made, fresh)
        dense_stages = _dense_stages(directory, record, dense_wanted, made, fresh)
        if old is not None:
            _check_same(directory, old, stages, dense_stages)
        missing = [v for v in wanted if v not in stages]
        dense_missing = [v for v in dense_wanted if v not in dense_stages]
        if missing or dense_missing:
            named = [f"{v.name}.{v.group_size}" for v in missing]
            stage = ADDED + "-".join(named + [f"dense-{v.name}.{v.group_size}" for v in dense_missing])
            part = replace(
                recipe,
                versions=tuple(v.name for v in missing),
                allocation=None,
                dense=tuple(v.name for v in dense_missing),
            )
            if missing:
                _check_estimate(directory, quantize_settings(part), made)
            run = resume(directory, part, fresh, device, reporter, stage, memory)
            with contextlib.closing(open_executor(engine, address)) as executor:
                run.layers(calibrate=False, quantize=True, reporter=reporter, executor=executor)
            stages |= dict.fromkeys(missing, stage)
            dense_stages |= dict.fromkeys(dense_missing, stage)
        chosen = Chosen({v: stages[v] for v in wanted}, recipe, {v: dense_stages[v] for v in dense_wanted})
        return assemble(directory, target, reporter, chosen, None if old is None else _others(old))


def parse_group_sizes(texts: Sequence[str]) -> dict[str, int]:
    """VERSION=SIZE, as the command line has it.

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
    checkpoint: str | Path, revision: str | None, record: Mapping[str, Any], directory: WorkDirectory
) -> None:
    from moepack.calibrate.checkpoint import open_checkpoint

    path = str(Path(open_checkpoint(checkpoint, revision).path).absolute())
    if path != record["checkpoint"]:
        raise InputError(f"{directory.path}: is of {record['checkpoint']}, not of {path}: name another --work")


def _opened(target: Path) -> Bundle | None:
    """The bundle to be replaced; None where there is none yet."""
    if not (target / MANIFEST).is_file():
        check_target(target)
        return None
    check_replaceable(target)
    return open_bundle(target)


def _recipe_of(old: Bundle, directory: WorkDirectory, record: Mapping[str, Any]) -> Recipe:
    """The recipe of a bundle, which is to be one of this work directory."""
    found = old.manifest.provenance
    calibration, checkpoint = (x if isinstance(x := found.get(k), dict) else {} for k in ("calibration", "checkpoint"))
    files = directory.settings()["calibrate"]["checkpoint"]
    if calibration.get("tokens_sha256") != record["digest"] or checkpoint.get("files") != files:
        raise InputError(
            f"{old.path}: was not made of what {directory.path} holds: name the --work that it was built in"
        )
    return parse_recipe(str(found.get("recipe")), f"{old.path / MANIFEST}: recipe")


def _check_names(versions: Sequence[str], dense: Sequence[str], sizes: Mapping[str, int]) -> None:
    """See that what is to be added is there to be had."""
    names = (*versions, *dense)
    if not names:
        raise InputError("name the versions to add, as w2")
    for name in names:
        if name not in version_names():
            raise InputError(f"version {name!r} is unknown: there are {', '.join(version_names())}")
    for name in sorted(set(sizes) - set(names)):
        raise InputError(
            f"--group-size {name}: is of no version that is added: name it with --add or --add-dense as well"
        )


def _check_dense(
    directory: WorkDirectory, record: Mapping[str, Any], added: Sequence[str], wanted: Sequence[Version]
) -> None:
    """See that there are dense matrices to be added to, and that calibrating saw what they read."""
    if wanted and not directory.settings()["calibrate"].get("dense"):
        raise no_moments(directory)
    if added and not record["dense"]:
        raise InputError(f"{directory.path}: --add-dense: the model has no dense matrices that get versions")


def _wanted(
    before: Sequence[Version], recipe: Recipe, names: Sequence[str], sizes: Mapping[str, int]
) -> tuple[Version, ...]:
    """All versions that the bundle is to have, the most precise first."""
    wanted, own = {v.name: v for v in before}, recipe.quantize.group_size
    for name in names:
        possible = encoding_of(name).group_sizes
        size = sizes.get(name, own if isinstance(own, int) else own.get(name, 64))
        if possible and size not in possible:
            raise InputError(f"--group-size {name}={size}: groups are of {', '.join(map(str, possible))}")
        wanted[name] = Version.of(name, size)
    return tuple(wanted[name] for name in version_names() if name in wanted)


def _stages(
    directory: WorkDirectory, record: Mapping[str, Any], wanted: Sequence[Version], made: Mapping[str, Any], fresh: bool
) -> dict[Version, str]:
    """Of the versions that the work directory has whole, the stage that made them, the last one begun."""
    out: dict[Version, str] = {}
    layers = [layer.index for layer in expert_layers(record)]
    for stage, how in directory.settings().items():
        if stage != "quantize" and (fresh or not stage.startswith(ADDED)):
            continue
        held = [Version.read(v) for v in how["versions"]]
        # One that was stopped goes on as a whole: its dense matrices may be what is left of it.
        parts = [*layers, *(record["dense"] if stage != "quantize" and how.get("dense") else ())]
        if all(how.get(k) == made.get(k) for k in _ALIKE) and all(directory.done(stage, i) is not None for i in parts):
            out |= {v: stage for v in wanted if v in held}
    return out


def _dense_stages(
    directory: WorkDirectory, record: Mapping[str, Any], wanted: Sequence[Version], made: Mapping[str, Any], fresh: bool
) -> dict[Version, str]:
    """Of the versions of dense matrices that the work directory has whole, the last stage that made them."""
    out: dict[Version, str] = {}
    for stage, how in directory.settings().items():
        if stage != "quantize" and (fresh or not stage.startswith(ADDED)):
            continue
        held = [Version.read(v) for v in how.get("dense") or ()]
        alike = held and all(how.get(k) == made.get(k) for k in _DENSE_ALIKE) and how.get(WAY[0]) == WAY[1]
        if alike and all(directory.done(stage, part) is not None for part in record["dense"]):
            out |= {v: stage for v in wanted if v in held}
    return out


def _check_recipe(directory: WorkDirectory, target: Path, asked: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """See that experts were not quantised again since by another recipe than the bundle's."""
    for key in _BY_RECIPE:
        if asked.get(key) != made.get(key):
            raise InputError(
                f"{directory.path}: was quantised with {key} {made.get(key)}, {target} with {asked.get(key)}, and "
                "losses would not compare: quantise it by the bundle's recipe (moepack quantize --fresh), or name "
                "another --work"
            )


def _check_same(
    directory: WorkDirectory, old: Bundle, stages: Mapping[Version, str], dense_stages: Mapping[Version, str]
) -> None:
    """See that what the work directory has of a bundle's versions is what the bundle has."""
    held, kept, dense_kept = old.manifest.expert_files, old.manifest.versions, old.manifest.dense_versions
    found: list[tuple[str, str, Mapping[str, Any]]] = []
    for version, stage in ((v, s) for v, s in stages.items() if v in kept):
        for i in (layer.index for layer in old.layers):
            found.append((expert_file(version.name, i), version.name, directory.done(stage, i) or {}))
    for version, stage in ((v, s) for v, s in dense_stages.items() if v in dense_kept):
        for part in (layer.index for layer in dense_layers(old.manifest.dense)):
            made = directory.done(stage, part) or {}
            found.append((dense_file(version.name, part), version.name, made.get("dense", {})))
    for file, name, note in found:
        if file in held and note.get("entries", {}).get(name) != asdict(held[file]):
            raise InputError(
                f"{directory.path}: its {file} is not the one of {old.path}: it was built anew since, by other "
                "settings or on another machine; name the --work that the bundle was built in"
            )


def _check_estimate(directory: WorkDirectory, how: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    was, now = (x.get("estimate of losses") for x in (made, how))
    if was != now:
        raise InputError(
            f"{directory.path}: was quantised by a moepack that measures losses in another way ({was}, now {now}): "
            "they would not compare; build anew"
        )


def _others(old: Bundle) -> list[str]:
    """Files of a bundle's directory that its successor keeps: those that are none of the bundle's own."""
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
    """Whether the model card is another than the bundle was built with."""
    try:
        text = (old.path / _CARD).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return (old.path / _CARD).exists()
    return text != model_card(old.manifest, old.calibration(), [v.name for v in old.manifest.versions])
