"""The pipeline: a checkpoint to a bundle in one streaming pass, or its stages one by one over a work directory.

For each decoder layer: load, run the calibration batches, quantise every expert at every width, measure, write, free.
At any time one layer, the calibration activations and a bounded amount of second moments are in memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.memory import bound_kernel_caches, give_back
from moepack.pack.errors import InputError, TargetError
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.spec import EXPERT_DTYPES, LOSSLESS
from moepack.pack.writer import check_target
from moepack.progress import Reporter
from moepack.version import __version__

from .allocate import check_allocation
from .artifacts import load_hidden, load_observation, run_record, save
from .assemble import Report, assemble
from .executors import Engine, Local, open_engine
from .expert_batch import GroupTask, bare, load_group, loss_metadata, observation_digest, save_group
from .recipe import Recipe, load_recipe, parse_recipe
from .work import WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation
    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.spec import Version


def build(
    checkpoint: str | Path,
    output: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    work: str | Path | None = None,
    fresh: bool = False,
    device: str = "cpu",
    engine: str = "local",
    address: str | None = None,
    reporter: Reporter | None = None,
) -> Report:
    """Make a bundle of a checkpoint.

    Args:
        checkpoint: a model directory or a Hub id.
        output: the bundle's directory; must be new or empty.
        recipe: a shipped recipe's name, a file, or a Recipe.
        calibration: files or Hub data sets in place of the recipe's.
        work: a directory that keeps finished pieces; a build that was killed resumes from it. A temporary one beside
            the output, removed afterwards, without it.
        fresh: throw away what `work` holds.
        device: where to compute, as torch names it.
        engine: where experts are quantised: "local", or "ray" for a Ray cluster; the bytes are the same.
        address: the Ray cluster's; without it one is started on this machine.
        reporter: who is told of progress.

    Raises:
        MoepackError: one line that says what is wrong and what to do; nothing is left at `output`.
    """
    reporter = reporter or Reporter()
    target = Path(output)
    check_target(target)
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    with_work = Path(work) if work is not None else _temporary_work(target)
    directory = WorkDirectory(with_work)
    try:
        run = Run.start(directory, checkpoint, recipe, calibration, fresh, device, reporter)
        with contextlib.closing(open_engine(engine, address)) as where:
            run.layers(calibrate=True, quantize=True, reporter=reporter, engine=where)
        return assemble(directory, target, reporter)
    finally:
        directory.close()
        if work is None:
            shutil.rmtree(with_work, ignore_errors=True)


def _temporary_work(target: Path) -> Path:
    parent = target.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=f".{target.name}.work-", dir=parent))
    except OSError as error:
        raise TargetError(f"{target}: cannot be written: {error.strerror}") from None


def calibrate(
    checkpoint: str | Path,
    work: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    fresh: bool = False,
    device: str = "cpu",
    reporter: Reporter | None = None,
) -> None:
    """The first stage: routing statistics, and what the experts saw, into a work directory. See `build`."""
    reporter = reporter or Reporter()
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    directory = WorkDirectory(Path(work))
    try:
        run = Run.start(directory, checkpoint, recipe, calibration, fresh, device, reporter)
        run.layers(calibrate=True, quantize=False, reporter=reporter)
    finally:
        directory.close()


def quantize(
    work: str | Path,
    recipe: str | Recipe | None = None,
    fresh: bool = False,
    device: str = "cpu",
    engine: str = "local",
    address: str | None = None,
    reporter: Reporter | None = None,
) -> None:
    """The second stage: every expert at every width, from a calibrated work directory. See `build`."""
    reporter = reporter or Reporter()
    directory = WorkDirectory(Path(work))
    try:
        run = Run.resume(directory, load_recipe(recipe) if isinstance(recipe, str) else recipe, fresh, device)
        with contextlib.closing(open_engine(engine, address)) as where:
            run.layers(calibrate=False, quantize=True, reporter=reporter, engine=where)
    finally:
        directory.close()


def pack(work: str | Path, output: str | Path, reporter: Reporter | None = None) -> Report:
    """The last stage: a bundle from a work directory whose experts are quantised. See `build`."""
    target = Path(output)
    check_target(target)
    directory = WorkDirectory(Path(work))
    try:
        return assemble(directory, target, reporter or Reporter())
    finally:
        directory.close()


class Run:
    """The stages' common ground: the checkpoint's skeleton, the recipe, the work directory."""

    def __init__(
        self,
        directory: WorkDirectory,
        stream: StreamedModel,
        recipe: Recipe,
        ids: torch.Tensor | None,
    ) -> None:
        self._work, self._stream, self._recipe, self._ids = directory, stream, recipe, ids
        self._engine: Engine = Local()

    @staticmethod
    def start(
        directory: WorkDirectory,
        checkpoint: str | Path,
        recipe: Recipe,
        calibration: Sequence[str | Path],
        fresh: bool,
        device: str,
        reporter: Reporter,
    ) -> Run:
        """Open everything a calibration needs, before any work is done."""
        from moepack.calibrate import data
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.calibrate.stream import StreamedModel

        with reporter.hub_bars():
            opened = open_checkpoint(checkpoint)
        stream = StreamedModel(opened, device)
        if stream.unused:
            reporter.note(
                f"{len(stream.unused)} tensors of the checkpoint have no place in the model, and are left out"
            )
        if stream.expert_dtype != "BF16":
            reporter.note(f"the {LOSSLESS} version holds {EXPERT_DTYPES[stream.expert_dtype]}")
        settings = recipe.calibration
        tokenizer = data.load_tokenizer(opened.path)
        sources = [str(s) for s in calibration] or list(settings.data)
        limit = getattr(opened.config.get_text_config(), "max_position_embeddings", None) or settings.length
        length = min(settings.length, limit)
        windows = data.calibration_windows(sources, tokenizer, settings.samples, length, settings.seed)
        if len(windows.ids) < settings.samples:
            reporter.note(f"the calibration text fills {len(windows.ids)} of {settings.samples} samples")
        directory.begin(
            "calibrate",
            {
                "checkpoint": opened.fingerprint(),
                "calibration tokens": windows.digest,
                "batch_size": settings.batch_size,
                "dtype": settings.dtype,
                "moepack": __version__,
            },
            fresh,
        )
        where = {
            "checkpoint": str(Path(opened.path).absolute()),
            "name": opened.name,
            "recipe": recipe.text,
            "sources": [Path(s).name for s in sources],
            "samples": len(windows.ids),
            "length": length,
            "digest": windows.digest,
            "unused": len(stream.unused),
            "model": {
                "model_type": opened.config.model_type,
                "architecture": type(stream.model).__name__,
                "expert_dtype": stream.expert_dtype,
            },
            "decoder_layers": len(stream.layers),
            "expert_layers": [asdict(layer) for layer in stream.expert_layers.values()],
        }
        directory.write(directory.path / "run.json", json.dumps(where, indent=1).encode())
        run = Run(directory, stream, recipe, windows.ids)
        run._begin_quantize(fresh)
        return run

    @staticmethod
    def resume(directory: WorkDirectory, recipe: Recipe | None, fresh: bool, device: str) -> Run:
        """Open a calibrated work directory for the second stage."""
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.calibrate.stream import StreamedModel

        where = run_record(directory)
        if recipe is None:
            recipe = parse_recipe(where["recipe"], f"{directory.path / 'run.json'}: recipe")
        opened = open_checkpoint(where["checkpoint"])
        if opened.fingerprint() != directory.settings()["calibrate"]["checkpoint"]:
            raise InputError(f"{where['checkpoint']}: is not the checkpoint that {directory.path} was calibrated with")
        run = Run(directory, StreamedModel(opened, device), recipe, None)
        run._begin_quantize(fresh)
        return run

    def _begin_quantize(self, fresh: bool) -> None:
        q = self._recipe.quantize
        how, versions = self._recipe.allocation, self._recipe.version_specs()
        check_allocation(how, list(self._stream.expert_layers.values()), versions)
        self._work.begin(
            "quantize",
            {
                "versions": [asdict(v) for v in versions],
                "method": q.method,
                "min_tokens": q.min_tokens,
                "loss_tokens": q.loss_tokens,
                "moments": q.moments,
                "allocation": None if how is None else asdict(how),
            },
            fresh,
        )

    def layers(self, calibrate: bool, quantize: bool, reporter: Reporter, engine: Engine | None = None) -> None:
        """Go through the decoder layers once, with `engine` in place of the local one. What is done is not redone."""
        self._engine = engine or self._engine
        bound_kernel_caches()
        import torch

        from moepack.calibrate.forward import CalibrationPass

        stream, work = self._stream, self._work
        dtype = getattr(torch, self._recipe.calibration.dtype)
        walk: CalibrationPass | None = None
        total = len(stream.layers)
        if calibrate and quantize and all(self._observed(i) for i in range(total)):
            calibrate = False  # an earlier `calibrate` did all of it
        if calibrate and self._ids is not None:
            walk = CalibrationPass(stream, self._ids, self._recipe.calibration.batch_size, dtype)
        first = 0
        while first < total and self._finished(first, calibrate, quantize):
            first += 1
        if walk is not None and (first < total or not work.done("calibrate", None)):
            rest = stream.load(None)
            save(work.piece("calibrate", None, "dense.safetensors"), rest)
            work.mark("calibrate", None, {})
            if first < total:
                stream.to_compute(None, dtype)
                walk.start()
            del rest
            stream.free(None)
            if first:
                walk.hidden = load_hidden(work.piece("calibrate", first - 1, "hidden.safetensors"))
        names = {(True, True): "calibrate and quantise", (True, False): "calibrate", (False, True): "quantise"}
        reporter.stage(names[calibrate, quantize], total)
        for i in range(total):
            reporter.step(f"layer {i}")
            if i < first or (walk is None and self._finished(i, calibrate, quantize)):
                continue  # a walk goes through every layer after the first unfinished one, to have its activations
            tensors = stream.load(i)
            dense, experts = stream.split(i, tensors)
            del tensors
            observation = None
            if walk is not None:
                observation = self._calibrate_layer(walk, i, dense, dtype, reporter, keep=not quantize)
            stream.free(i)
            if quantize and experts is not None:
                self._quantise_layer(i, experts, observation or load_observation(work, i), reporter)
            if walk is not None:
                self._keep_hidden(walk, i)
            del dense, experts, observation
            give_back()
        reporter.step("done")

    def _observed(self, layer: int) -> bool:
        """Whether the calibrate stage finished a layer and kept what its experts saw."""
        kept = self._work.piece("calibrate", layer, "observation.safetensors").exists()
        return self._work.done("calibrate", layer) is not None and (kept or layer not in self._stream.expert_layers)

    def _finished(self, layer: int, calibrate: bool, quantize: bool) -> bool:
        has_experts = layer in self._stream.expert_layers
        calibrated = not calibrate or self._work.done("calibrate", layer) is not None
        return calibrated and (not quantize or not has_experts or self._work.done("quantize", layer) is not None)

    def _calibrate_layer(
        self,
        walk: Any,
        layer: int,
        dense: dict[str, torch.Tensor],
        dtype: torch.dtype,
        reporter: Reporter,
        keep: bool,
    ) -> Observation | None:
        from moepack.calibrate.statistics import routing_statistics

        save(self._work.piece("calibrate", layer, "dense.safetensors"), dense)
        self._stream.to_compute(layer, dtype)
        reporter.inner("tokens", sum(h.shape[0] * h.shape[1] for h in walk.hidden))
        observation: Observation | None = walk.run_layer(layer, reporter.advance)
        if observation is not None:
            statistics = routing_statistics(observation, self._stream.expert_layers[layer].experts)
            save(self._work.piece("calibrate", layer, "statistics.safetensors"), statistics)
            if keep:
                seen = {"inputs": observation.inputs, "experts": observation.experts, "gates": observation.gates}
                path = self._work.piece("calibrate", layer, "observation.safetensors")
                save(path, seen, {"length": str(observation.length)})
        return observation

    def _keep_hidden(self, walk: Any, layer: int) -> None:
        """Persist the live activations, then declare the layer done: regenerated ones would not be the same bits."""
        save(
            self._work.piece("calibrate", layer, "hidden.safetensors"),
            {f"{b:06d}": hidden for b, hidden in enumerate(walk.hidden)},
        )
        self._work.mark("calibrate", layer, {})
        if layer:
            self._work.piece("calibrate", layer - 1, "hidden.safetensors").unlink(missing_ok=True)

    def _quantise_layer(self, index: int, experts: ExpertWeights, observation: Observation, reporter: Reporter) -> None:
        """Make every group that is not there yet, then the layer's files of all of them."""
        import torch

        versions, work = self._recipe.version_specs(), self._work
        tasks = self._tasks(index, experts, versions)
        observed = observation_digest(observation)
        kept = [work.object(task.address(observed)) for task in tasks]
        missing = [i for i, path in enumerate(kept) if not path.exists()]
        reporter.inner("experts", experts.layer.experts)
        reporter.advance(sum(len(t.experts) for i, t in enumerate(tasks) if i not in missing))
        for i, made in zip(missing, self._engine.run([tasks[i] for i in missing], observation), strict=True):
            save_group(made, kept[i])
            give_back()
            reporter.advance(len(tasks[i].experts))
        losses: list[dict[str, torch.Tensor]] = []
        with contextlib.ExitStack() as stack:
            writers = {
                v.name: stack.enter_context(
                    LayerFileWriter(work.piece("quantize", index, f"{v.name}.safetensors"), v.name, experts.layer)
                )
                for v in versions
            }
            for path in kept:
                group = load_group(path)
                losses.append(group.losses)
                for name, writer in writers.items():
                    for extent, payload in zip(group.extents[name], group.payloads[name], strict=True):
                        writer.add(extent, payload)
        table = {k: torch.cat([part[k] for part in losses]) for k in losses[0]}
        save(work.piece("quantize", index, "losses.safetensors"), table, loss_metadata(versions))
        work.mark("quantize", index, {"entries": {n: asdict(w.entry) for n, w in writers.items() if w.entry}})
        for path in kept:
            path.unlink()

    def _tasks(self, index: int, experts: ExpertWeights, versions: tuple[Version, ...]) -> list[GroupTask]:
        import torch

        from moepack.calibrate.quantise_layer import Settings, expert_groups

        q = self._recipe.quantize
        affine = tuple(v for v in versions if not v.is_lossless)
        settings = Settings(q.method, affine, q.min_tokens, q.loss_tokens, q.moments)
        module, device, threads = (
            bare(self._stream.experts_module(index)),
            str(self._stream.device),
            torch.get_num_threads(),
        )
        return [
            GroupTask(module, experts.select(g), index, g, versions, settings, device, threads)
            for g in expert_groups(experts.layer, settings)
        ]
