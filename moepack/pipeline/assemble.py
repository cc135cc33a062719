"""The last stage: make a bundle by copying and linking finished pieces. It computes only digests and the allocation."""

from __future__ import annotations

import contextlib
import json
import platform
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from moepack.pack.errors import InputError
from moepack.pack.layer_file import Layer
from moepack.pack.manifest import Allocation, ExpertFileEntry, Manifest
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.safetensors_file import merge, read_header
from moepack.pack.spec import (
    HINT,
    DenseMatrix,
    ExpertLayer,
    Matrix,
    Version,
    dense_file,
    dense_layers,
    expert_file,
    lossless,
)
from moepack.pack.tables import FEW_TOKENS, TABLES, CalibrationTables, read_tables, write_tables
from moepack.pack.tables import metadata as metadata_of
from moepack.pack.writer import BundleWriter
from moepack.quantize import methods
from moepack.shared.progress import Reporter

from .allocate import DenseCosts, LayerCosts, allocate
from .artifacts import SHARD, RunRecord, finished, quantised_recipe, run_record, save
from .model_card import carried, hub_commit, hub_id, model_card
from .recipe import Allocate, Recipe
from .released import keep_released
from .saved import write_saved
from .tasks.layer import LOSSES, join_losses
from .tasks.logits import logits_tables
from .work import WorkDirectory, dense_name, expert_name

LOSSES_OF_EXPERTS = "losses.safetensors"
JOINED = "joined"  # the work directory's folder for losses that are joined from several stages


@dataclass(frozen=True, slots=True)
class BuildReport:
    """The result of a build."""

    bundle: Path  # the directory
    calibration_tokens: int
    methods: dict[str, dict[str, int]]  # version -> method -> experts that it made
    unused_tensors: int  # tensors of the checkpoint that the model lacks
    dense: tuple[str, ...] = ()  # versions of dense matrices
    unchanged: bool = False  # whether the bundle had all versions before


@dataclass(frozen=True, slots=True)
class Chosen:
    """The versions that a bundle gets, and where they come from."""

    stages: Mapping[Version, str]  # version of experts -> the stage that made it; the most precise first
    recipe: Recipe  # the recipe that would make all of these versions
    dense: Mapping[Version, str]  # like `stages`, for dense matrices


def quantised_settings(work: WorkDirectory) -> JsonObject:
    """The settings of the quantize stage. Raises InputError if the stage has not begun."""
    found: JsonObject | None = work.settings().get("quantize")
    if found is None:
        raise InputError(f"{work.path}: is not quantised yet: run moepack quantize first")
    return found


def assemble(
    work: WorkDirectory,
    target: Path,
    reporter: Reporter,
    chosen: Chosen | None = None,
    keep: Sequence[str] | None = None,
) -> BuildReport:
    """Make the bundle at `target` from a finished work directory.

    `chosen`: the versions, by default those of the quantize stage. `keep`: files that stay from a bundle that is
    replaced; None where `target` is new or empty.
    """
    record = run_record(work)
    quantised = quantised_settings(work)
    if chosen is None:
        made, dense_made = ([Version.read(v) for v in quantised.get(k) or ()] for k in ("versions", "dense"))
        how = quantised["allocation"] and Allocate(**quantised["allocation"])
        recipe = replace(quantised_recipe(work), allocation=how)
        chosen = Chosen(dict.fromkeys(made, "quantize"), recipe, dict.fromkeys(dense_made, "quantize"))
    layers = expert_layers(record)
    for part in (None, *range(record["decoder_layers"])):
        finished(work, "calibrate", part)
    entries = {
        (v, x.index): ExpertFileEntry(**finished(work, stage, x.index)["entries"][v.name])
        for v, stage in chosen.stages.items()
        for x in layers
    }
    parts = _dense_parts(work, record["dense"], chosen.dense) if chosen.dense else []
    dense = tuple(m for _, matrices, _ in parts for m in matrices)
    allocation = chosen.recipe.allocation
    logits: dict[int, Path] = {}
    if allocation is not None and allocation.weight == "logits":
        logits = logits_tables(work, record, layers, chosen.stages, JOINED, reporter)
    leave_out = {f"{m.module}.{name}" for m in dense for name in ("weight", "bias")}
    sources = _dense_sources(work, record["decoder_layers"], leave_out)
    placed = [
        (dense_file(v.name, part), work.piece(stage, part, dense_name(v.name)), files[v.name])
        for part, _, files in parts
        for v, stage in chosen.dense.items()
    ] + [
        (expert_file(v.name, x.index), work.piece(stage, x.index, expert_name(v.name)), entries[v, x.index])
        for x in layers
        for v, stage in chosen.stages.items()
    ]
    reporter.stage("pack", len(placed) + 3)
    with BundleWriter(target, keep) as writer:
        writer.check_room([source for _, source, _ in placed], sum(sources.values()))
        reporter.step("dense tensors")
        _dense(writer, sources, leave_out, layers[0])
        reporter.step("tables")
        tables = _tables(work, writer, layers, parts, chosen, logits)
        for name, source, entry in placed:
            reporter.step(name)
            writer.adopt(name, source, entry)
        _config(Path(record["checkpoint"]), record["untied"], writer)
        exact = lossless(tuple(chosen.dense))
        own = {m.module: exact for m in dense} if exact else {}
        keeps_mtp = record["model"].get("mtp") == "keep"
        keep_released(Path(record["checkpoint"]), writer, lossless(tuple(chosen.stages)), own, keeps_mtp)
        manifest = Manifest(
            {**record["model"], "decoder_layers": record["decoder_layers"]},
            layers,
            tuple(chosen.stages),
            {},
            {},
            _provenance(work, record, chosen.recipe, quantised, tables),
            _allocation(work, layers, chosen, tables, dense),
            dense=dense,
            dense_versions=tuple(chosen.dense) if dense else (),
        )
        card = model_card(writer.with_files(manifest), tables, [v.name for v in chosen.stages])
        writer.path("README.md").write_text(card, encoding="utf-8")  # not in the manifest: people edit it
        reporter.step("manifest")
        writer.finish(manifest)
    return report(target, record, made_by(tables), manifest.dense_versions)


def report(
    target: Path,
    record: RunRecord,
    methods: dict[str, dict[str, int]],
    dense: Sequence[Version],
    unchanged: bool = False,
) -> BuildReport:
    """Make the report on the bundle at `target`, from the record of the run that made it (`run_record`)."""
    tokens = record["samples"] * record["length"]
    return BuildReport(target, tokens, methods, record["unused"], tuple(v.name for v in dense), unchanged)


def expert_layers(record: RunRecord) -> tuple[ExpertLayer, ...]:
    """The layers with experts, from the record of a run (`run_record`)."""
    return tuple(
        ExpertLayer(x["index"], x["module"], x["experts"], tuple(Matrix(**m) for m in x["matrices"]))
        for x in record["expert_layers"]
    )


_DenseFiles = tuple[int | None, tuple[DenseMatrix, ...], dict[str, ExpertFileEntry]]


def _dense_parts(work: WorkDirectory, wanted: Sequence[int | None], stages: Mapping[Version, str]) -> list[_DenseFiles]:
    """For each part with dense matrices: the part, its matrices, and the entry of its file at each version."""
    out: list[_DenseFiles] = []
    for part in wanted:
        notes = {v.name: finished(work, stage, part) for v, stage in stages.items()}
        dense = {name: note["dense"] for name, note in notes.items() if "dense" in note}
        if dense:
            matrices = next(iter(dense.values()))["matrices"]  # those that calibration called; the same in every stage
            found = (DenseMatrix(m["layer"], m["module"], Matrix(**m["matrix"])) for m in matrices)
            entries = {name: ExpertFileEntry(**note["entries"][name]) for name, note in dense.items()}
            out.append((part, tuple(found), entries))
    return out


def _dense_sources(work: WorkDirectory, decoder_layers: int, leave_out: Container[str]) -> dict[Path, int]:
    """The files of dense tensors, with their bytes without the tensors `leave_out`."""
    parts = [work.piece("calibrate", i, "dense.safetensors") for i in (None, *range(decoder_layers))]
    parts += sorted(parts[0].parent.glob("mtp-*.safetensors"))
    tensors = {part: read_header(part).tensors for part in parts}
    return {p: sum(t.end - t.begin for n, t in found.items() if n not in leave_out) for p, found in tensors.items()}


def _dense(writer: BundleWriter, sources: Mapping[Path, int], leave_out: Container[str], first: ExpertLayer) -> None:
    """Write dense tensors, except `leave_out`, in files of at most SHARD bytes; add a tripwire.

    The tripwire is a tensor of the wrong shape under the name of an expert parameter. A process without moepack would
    fill the experts with random numbers; the tripwire makes loading fail, with a report of unknown names. In that
    report, the name of a second tensor (HINT) says what to do. The runtime skips both by name.
    """
    import torch

    tripwire = writer.path("tripwire.safetensors")
    names = (f"{first.module}.down_proj", HINT)
    with tripwire.open("wb") as file:
        write_saved(file, {name: torch.zeros(1, dtype=torch.bfloat16) for name in names}, {})
    groups: list[list[Path]] = [[tripwire]]
    held = 0
    for part, size in sources.items():
        if held and held + size > SHARD:
            groups.append([])
            held = 0
        groups[-1].append(part)
        held += size
    places: dict[str, str] = {}
    total = 0
    for i, group in enumerate(groups):
        name = f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else "model.safetensors"
        tensors = merge([(p, "") for p in group], writer.path(name), {"format": "pt"}, leave_out)
        places |= dict.fromkeys(tensors, name)
        total += sum(t.end - t.begin for t in tensors.values())
        writer.add(name)
    if len(groups) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        writer.path("model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
        writer.add("model.safetensors.index.json")
    tripwire.unlink()


def _tables(
    work: WorkDirectory,
    writer: BundleWriter,
    layers: Sequence[ExpertLayer],
    parts: Sequence[_DenseFiles],
    chosen: Chosen,
    logits: Mapping[int, Path],
) -> CalibrationTables:
    joined = work.piece(JOINED, None, "all-dense-losses.safetensors")
    if parts:
        settings = work.settings()
        columns = [(stage, settings[stage]["dense"].index(v.record())) for v, stage in chosen.dense.items()]
        join_losses([[(work.piece(s, part, LOSSES), column) for s, column in columns] for part, _, _ in parts], joined)
    write_tables(
        writer.path(TABLES),
        {
            x.index: (
                work.piece("calibrate", x.index, "statistics.safetensors"),
                _losses(work, x.index, chosen.stages),
                *([logits[x.index]] if logits else []),
            )
            for x in layers
        },
        (joined, [v.name for v in chosen.dense]) if parts else None,
    )
    writer.add(TABLES)
    return read_tables(writer.path(TABLES), layers, matrices=sum(len(matrices) for _, matrices, _ in parts))


def _losses(work: WorkDirectory, layer: int, stages: Mapping[Version, str]) -> Path:
    """The file of a layer's losses at these versions. Writes a joined file where several stages hold the losses."""
    from safetensors import safe_open

    found = {}
    held = dict[str, tuple[str, ...]]()
    for stage in sorted(set(stages.values())):
        path = work.piece(stage, layer, LOSSES_OF_EXPERTS)
        with safe_open(path, framework="pt") as f:
            held[stage] = tuple(f.metadata()["versions"].split(","))
            found[stage] = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    names = tuple(v.name for v in stages)
    if list(held.values()) == [names]:
        return path
    import torch

    columns = [(found[stage], held[stage].index(v.name)) for v, stage in stages.items()]
    joined = {k: torch.stack([table[k][:, at] for table, at in columns], 1) for k in columns[0][0]}
    path = work.piece(JOINED, layer, LOSSES_OF_EXPERTS)
    save(path, joined, metadata_of(names, methods.numbered()))
    return path


def _config(checkpoint: Path, separate: bool, writer: BundleWriter) -> None:
    from moepack.calibrate.checkpoint import companions, untied

    config = json.loads((checkpoint / "config.json").read_text())
    if separate:
        config = untied(config)
    config["quantization_config"] = {"quant_method": "moepack"}
    writer.path("config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    writer.add("config.json")
    for name in companions(checkpoint):
        writer.path(name).write_bytes((checkpoint / name).read_bytes())
        writer.add(name)


def made_by(tables: CalibrationTables) -> dict[str, dict[str, int]]:
    """Version -> method -> the number of experts that the method made. Versions that no method made are left out."""
    counts = {v: {m: n for m, n in tables.made_by(v).items() if m != tables.methods[0]} for v in tables.versions}
    return {v: dict(sorted(c.items())) for v, c in counts.items() if c}


def _allocation(
    work: WorkDirectory,
    layers: Sequence[ExpertLayer],
    chosen: Chosen,
    tables: CalibrationTables,
    matrices: tuple[DenseMatrix, ...],
) -> Allocation | None:
    """Make the map of versions that the recipe's `allocation` asks for; None without one."""
    how = chosen.recipe.allocation
    stages = chosen.stages
    costs = []
    if how is None:
        return None
    versions = tuple(stages)
    columns = tables.columns([v.name for v in versions])
    for layer, table in zip(layers, tables.layers, strict=True):
        extents = [_extents(work.piece(s, layer.index, expert_name(v.name)), layer) for v, s in stages.items()]
        costs.append(LayerCosts.of(table, columns, [list(row) for row in zip(*extents, strict=True)]))
    if not how.dense or tables.dense is None:
        return allocate(how, layers, versions, costs)
    rows = []
    for part in dense_layers(matrices):
        sizes = [_extents(work.piece(s, part.index, dense_name(v.name)), part) for v, s in chosen.dense.items()]
        rows += [list(row) for row in zip(*sizes, strict=True)]
    weights = [m.matrix.weights for m in matrices]
    both = DenseCosts.of(weights, [v.name for v in chosen.dense], tables.dense, rows)
    return allocate(how, layers, versions, costs, both)


def _extents(path: Path, layer: Layer) -> list[float]:
    tensors = read_header(path).tensors
    found = (tensors[layer.extent_name(e)] for e in range(layer.extents))
    return [float(t.end - t.begin) for t in found]


def _provenance(
    work: WorkDirectory,
    record: RunRecord,
    recipe: Recipe,
    quantised: JsonObject,
    tables: CalibrationTables,
) -> dict[str, object]:
    tools = {"python": platform.python_version()}
    for package in ("moepack", "torch", "transformers", *(x.name for x in methods.libraries())):
        with contextlib.suppress(metadata.PackageNotFoundError):
            tools[package] = metadata.version(package)
    source = Path(record["checkpoint"])
    checkpoint = {"name": Path(record["name"]).name, "files": work.settings()["calibrate"]["checkpoint"]}
    known = {"id": hub_id(source), "revision": hub_commit(source), "card": carried(source / "README.md")}
    checkpoint |= {key: value for key, value in known.items() if value}
    return {
        "checkpoint": checkpoint,
        "calibration": {
            "sources": record["sources"],
            "windows": record["windows"],
            "samples": record["samples"],
            "length": record["length"],
            "tokens_sha256": record["digest"],
            "few_tokens": {"below": FEW_TOKENS, "experts": sum(tables.few().values())},
        },
        "method": quantised["method"],
        "recipe": recipe.text,
        "tools": tools,
    }
