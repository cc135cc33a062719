"""One streaming pass over a checkpoint's decoder layers: calibrate, quantise, or both, into a work directory.

For each decoder layer: load, run the calibration batches, quantise every expert at every width, measure, write, free.
At any time one layer, the calibration activations and a bounded amount of second moments are in memory. What is done is
not redone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.memory import bound_kernel_caches
from moepack.pack.errors import InputError
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.spec import EXPERT_DTYPES, LOSSLESS, DenseLayer
from moepack.pack.tables import metadata
from moepack.progress import Reporter
from moepack.quantize import methods
from moepack.runtime.devices.glibc import trim
from moepack.version import __version__

from .allocate import check_allocation
from .artifacts import MOMENTS, load_hidden, load_moments, load_observation, run_record, save
from .dense_part import quantise_dense
from .executors import Executor, Local
from .expert_batch import ExpertBatchTask, bare, batch_settings, load_batch, observation_digest, save_batch
from .recipe import Recipe, parse_recipe
from .work import WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.checkpoint import Checkpoint
    from moepack.calibrate.data import Windows
    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import CalibrationPass, Observation
    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.spec import DenseMatrix, Version


def calibration_text(
    checkpoint: Checkpoint, recipe: Recipe, calibration: Sequence[str | Path]
) -> tuple[list[str], Windows]:
    """The sources that a model is calibrated on, and their windows, no longer than the model was made for.

    Args:
        checkpoint: the model.
        recipe: what is wanted.
        calibration: files or Hub data sets in place of the recipe's.
    """
    from moepack.calibrate import data

    how = recipe.calibration
    tokenizer = data.load_tokenizer(checkpoint.path)
    sources = [str(s) for s in calibration] or list(how.data)
    limit = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None) or how.length
    return sources, data.calibration_windows(sources, tokenizer, how.samples, min(how.length, limit), how.seed)


def _identity(directory: WorkDirectory, checkpoint: Checkpoint, reporter: Reporter) -> dict[str, str]:
    """The digests of a checkpoint's files; what was read of them stays in the work directory."""
    from moepack.calibrate.identity import identity

    file = directory.path / "digests.json"
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError):
        known = {}
    reporter.stage("read the checkpoint", 1)
    reporter.step(checkpoint.name)
    reporter.inner("bytes", checkpoint.bytes)
    digests, kept = identity(checkpoint, known if isinstance(known, dict) else {}, reporter.advance)
    directory.write(file, json.dumps(kept, indent=1).encode())
    return digests


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
        self._executor: Executor = Local()
        self._objects: list[Path] = []  # of the layer at hand: they go once it is done
        self._dense: dict[int | None, list[DenseMatrix]] = {}
        if recipe.dense:
            from moepack.calibrate.dense import dense_matrices

            for matrix in dense_matrices(stream):
                self._dense.setdefault(matrix.layer, []).append(matrix)

    @staticmethod
    def start(
        directory: WorkDirectory,
        checkpoint: str | Path,
        recipe: Recipe,
        calibration: Sequence[str | Path],
        fresh: bool,
        device: str,
        reporter: Reporter,
        revision: str | None = None,
    ) -> Run:
        """Open everything a calibration needs, before any work is done."""
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.calibrate.stream import StreamedModel

        with reporter.hub_bars():
            opened = open_checkpoint(checkpoint, revision)
        stream = StreamedModel(opened, device)
        if stream.unused:
            reporter.note(
                f"{len(stream.unused)} tensors of the checkpoint have no place in the model, and are left out"
            )
        if stream.expert_dtype != "BF16":
            reporter.note(f"the {LOSSLESS} version holds {EXPERT_DTYPES[stream.expert_dtype]}")
        settings = recipe.calibration
        sources, windows = calibration_text(opened, recipe, calibration)
        if len(windows.ids) < settings.samples:
            reporter.note(f"the calibration text fills {len(windows.ids)} of {settings.samples} samples")
        directory.begin(
            "calibrate",
            {
                "checkpoint": _identity(directory, opened, reporter),
                "calibration tokens": windows.digest,
                "batch_size": settings.batch_size,
                "dtype": settings.dtype,
                "moepack": __version__,
                "dense": bool(recipe.dense) or None,
            },
            fresh,
        )
        where = {
            "checkpoint": str(Path(opened.path).absolute()),
            "name": opened.name,
            "recipe": recipe.text,
            "sources": [Path(s).name for s in sources],
            "samples": len(windows.ids),
            "length": windows.ids.shape[1],
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
        run = Run(directory, stream, recipe, windows.ids)
        where["dense"] = list(run._dense)
        directory.write(directory.path / "run.json", json.dumps(where, indent=1).encode())
        run._begin_quantize(fresh)
        return run

    @staticmethod
    def resume(directory: WorkDirectory, recipe: Recipe | None, fresh: bool, device: str, reporter: Reporter) -> Run:
        """Open a calibrated work directory for the second stage."""
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.calibrate.stream import StreamedModel

        where = run_record(directory)
        if recipe is None:
            recipe = parse_recipe(where["recipe"], f"{directory.path / 'run.json'}: recipe")
        opened = open_checkpoint(where["checkpoint"])
        was, now = directory.settings()["calibrate"]["checkpoint"], _identity(directory, opened, reporter)
        if now != was:
            other = next(name for name in sorted({*was, *now}) if was.get(name) != now.get(name))
            raise InputError(
                f"{where['checkpoint']}: {other} is not what {directory.path} was calibrated with: name another --work"
            )
        run = Run(directory, StreamedModel(opened, device), recipe, None)
        run._begin_quantize(fresh)
        return run

    def _begin_quantize(self, fresh: bool) -> None:
        from moepack.quantize.losses import ESTIMATE

        q = self._recipe.quantize
        how, versions = self._recipe.allocation, self._recipe.version_specs()
        dense = [m for matrices in self._dense.values() for m in matrices]
        layers = list(self._stream.expert_layers.values())
        check_allocation(how, layers, versions, dense, self._recipe.dense_specs())
        self._work.begin(
            "quantize",
            {
                "versions": [asdict(v) for v in versions],
                "method": q.method,
                "min_tokens": q.min_tokens,
                "loss_tokens": q.loss_tokens,
                "moments": q.moments,
                "estimate of losses": ESTIMATE,
                "allocation": None if how is None else asdict(how),
                "dense": [asdict(v) for v in self._recipe.dense_specs()] or None,
            },
            fresh,
        )

    def layers(self, calibrate: bool, quantize: bool, reporter: Reporter, executor: Executor | None = None) -> None:
        """Go through the decoder layers once, with `executor` in place of the local one."""
        self._executor = executor or self._executor
        bound_kernel_caches()
        import torch

        from moepack.calibrate.forward import CalibrationPass

        stream, work = self._stream, self._work
        dtype = getattr(torch, self._recipe.calibration.dtype)
        walk: CalibrationPass | None = None
        total = len(stream.layers)
        pending = [i for i in range(total) if not self._finished(i, calibrate, quantize)]
        # What an earlier `calibrate` kept of a layer is enough to quantise it.
        first = next((i for i in pending if not (quantize and self._observed(i))), total)
        if 0 < first < total and not work.piece("calibrate", first - 1, "hidden.safetensors").exists():
            first = 0  # activations that nobody kept
        if calibrate and self._ids is not None:
            walk = CalibrationPass(stream, self._ids, self._recipe.calibration.batch_size, dtype)
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
            walks = walk is not None and i >= first  # from there on through every layer, to have its activations
            if not walks and i not in pending:
                continue
            tensors = stream.load(i)
            dense, experts = stream.split(i, tensors)
            del tensors
            observation, moments = None, None
            if walk is not None and walks:
                observation, moments = self._calibrate_layer(walk, i, dense, dtype, reporter, keep=not quantize)
            stream.free(i)
            if quantize and i in pending and (experts is not None or i in self._dense):
                note = self._quantise_dense(i, dense, moments, reporter)
                if experts is not None:
                    note |= self._quantise_layer(i, experts, observation or load_observation(work, i), reporter)
                self._finish(i, note)
            if walk is not None and walks:
                self._keep_hidden(walk, i)
            del dense, experts, observation, moments
            trim()  # without it glibc keeps about a layer's worth more after every layer
        if None in self._dense:
            self._head(walk, dtype, quantize, reporter)
        reporter.step("done")

    def _head(self, walk: CalibrationPass | None, dtype: torch.dtype, quantize: bool, reporter: Reporter) -> None:
        """What lies behind the last layer: its moments, and with `quantize` its versions."""
        from moepack.calibrate.dense import watch_part

        work, stream = self._work, self._stream
        kept = work.piece("calibrate", None, MOMENTS)
        if (kept.exists() or walk is None) and (not quantize or work.done("quantize", None) is not None):
            return
        tensors = stream.load(None)
        moments = None
        if walk is not None and not kept.exists():
            walk.hidden = walk.hidden or load_hidden(
                work.piece("calibrate", len(stream.layers) - 1, "hidden.safetensors")
            )
            stream.to_compute(None, dtype)
            watch = watch_part(stream, self._dense[None], walk.windows, walk.length)
            walk.run_head(watch)
            moments = watch.moments()
            self._keep_moments(None, moments)
        stream.free(None)
        if quantize and work.done("quantize", None) is None:
            self._finish(None, self._quantise_dense(None, tensors, moments, reporter))

    def _keep_moments(self, part: int | None, moments: DenseMoments) -> None:
        from moepack.calibrate.dense import save_moments

        save(self._work.piece("calibrate", part, MOMENTS), *save_moments(moments))

    def _finish(self, part: int | None, note: dict[str, Any]) -> None:
        """Declare a part quantised."""
        self._work.mark("quantize", part, note)
        for path in self._objects:
            path.unlink()
        self._objects.clear()

    def _observed(self, layer: int) -> bool:
        """Whether the calibrate stage finished a layer and kept what its experts saw."""
        kept = self._work.piece("calibrate", layer, "observation.safetensors").exists()
        seen = layer not in self._dense or self._work.piece("calibrate", layer, MOMENTS).exists()
        has_experts = layer in self._stream.expert_layers
        return self._work.done("calibrate", layer) is not None and seen and (kept or not has_experts)

    def _finished(self, layer: int, calibrate: bool, quantize: bool) -> bool:
        quantised = layer in self._stream.expert_layers or layer in self._dense
        calibrated = not calibrate or self._work.done("calibrate", layer) is not None
        return calibrated and (not quantize or not quantised or self._work.done("quantize", layer) is not None)

    def _calibrate_layer(
        self,
        walk: Any,
        layer: int,
        dense: dict[str, torch.Tensor],
        dtype: torch.dtype,
        reporter: Reporter,
        keep: bool,
    ) -> tuple[Observation | None, DenseMoments | None]:
        from moepack.calibrate.dense import watch_part
        from moepack.calibrate.statistics import routing_statistics

        save(self._work.piece("calibrate", layer, "dense.safetensors"), dense)
        self._stream.to_compute(layer, dtype)
        reporter.inner("tokens", sum(h.shape[0] * h.shape[1] for h in walk.hidden))
        matrices = self._dense.get(layer)
        watch = watch_part(self._stream, matrices, walk.windows, walk.length) if matrices else None
        observation: Observation | None = walk.run_layer(layer, reporter.advance, watch)
        moments = None if watch is None else watch.moments()
        if moments is not None and keep:
            self._keep_moments(layer, moments)
        if observation is not None:
            statistics = routing_statistics(observation, self._stream.expert_layers[layer].experts)
            save(self._work.piece("calibrate", layer, "statistics.safetensors"), statistics)
            if keep:
                seen = {"inputs": observation.inputs, "experts": observation.experts, "gates": observation.gates}
                path = self._work.piece("calibrate", layer, "observation.safetensors")
                save(path, seen, {"length": str(observation.length)})
        return observation, moments

    def _keep_hidden(self, walk: Any, layer: int) -> None:
        """Persist the live activations, then declare the layer done: regenerated ones would not be the same bits."""
        save(
            self._work.piece("calibrate", layer, "hidden.safetensors"),
            {f"{b:06d}": hidden for b, hidden in enumerate(walk.hidden)},
        )
        self._work.mark("calibrate", layer, {})
        if layer:
            self._work.piece("calibrate", layer - 1, "hidden.safetensors").unlink(missing_ok=True)

    def _quantise_dense(
        self, part: int | None, tensors: dict[str, torch.Tensor], moments: DenseMoments | None, reporter: Reporter
    ) -> dict[str, Any]:
        """Make the files of a part's dense matrices; nothing where none has versions. Those that calibration never
        called stay as they are: something else may read their weights."""
        matrices = self._dense.get(part)
        if not matrices:
            return {}
        moments = moments or load_moments(self._work, part)
        called = tuple(m for m in matrices if m.module in moments.group)
        if len(called) < len(matrices):
            odd = next(m.module for m in matrices if m.module not in moments.group)
            reporter.note(f"{odd} was never called: it stays as it is in the checkpoint")
        if not called:
            return {}
        reporter.inner("dense matrices", len(called))
        return {
            "dense": quantise_dense(
                DenseLayer(part, self._before(part), called), tensors, moments, self._recipe.dense_specs(),
                self._recipe.quantize.method, self._stream.device,
                lambda name: self._work.piece("quantize", part, name), reporter.advance,
            )
        }  # fmt: skip

    def _before(self, part: int | None) -> int:
        """Dense matrices of the layers before a part: these are quantised."""
        notes = [
            self._work.done("quantize", i) or {} for i in range(len(self._stream.layers) if part is None else part)
        ]
        return sum(len(note["dense"]["matrices"]) for note in notes if "dense" in note)

    def _quantise_layer(
        self, index: int, experts: ExpertWeights, observation: Observation, reporter: Reporter
    ) -> dict[str, Any]:
        """Make every expert batch that is not there yet, then the layer's files of all of them."""
        import torch

        from moepack.quantize.pooling import pooled

        versions, work = self._recipe.version_specs(), self._work
        tasks = self._tasks(index, experts, versions)
        observed = observation_digest(observation)
        kept = [work.object(task.address(observed)) for task in tasks]
        missing = [i for i, path in enumerate(kept) if not path.exists()]
        reporter.inner("experts", experts.layer.experts)
        reporter.advance(sum(len(t.experts) for i, t in enumerate(tasks) if i not in missing))
        for i, made in zip(missing, self._executor.run([tasks[i] for i in missing], observation), strict=True):
            save_batch(made, kept[i])
            trim()
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
                batch = load_batch(path)
                losses.append(batch.losses)
                for name, writer in writers.items():
                    for extent, payload in zip(batch.extents[name], batch.payloads[name], strict=True):
                        writer.add(extent, payload)
        measured = {k: torch.cat([part[k] for part in losses]) for k in losses[0]}
        table = pooled(measured) | {"method": measured["method"]}
        columns = metadata([v.name for v in versions], methods.numbered())
        save(work.piece("quantize", index, "losses.safetensors"), table, columns)
        self._objects = kept
        return {"entries": {n: asdict(w.entry) for n, w in writers.items() if w.entry}}

    def _tasks(self, index: int, experts: ExpertWeights, versions: tuple[Version, ...]) -> list[ExpertBatchTask]:
        import torch

        from moepack.quantize.expert_batch import expert_batches

        settings = batch_settings(self._recipe)
        module, device, threads = (
            bare(self._stream.experts_module(index)),
            str(self._stream.device),
            torch.get_num_threads(),
        )
        return [
            ExpertBatchTask(module, experts.select(part), index, part, versions, settings, device, threads)
            for part in expert_batches(experts.layer, settings)
        ]
