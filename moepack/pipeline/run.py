"""One streaming pass over a checkpoint's decoder layers: calibrate, quantise, or both, into a work directory.

For each decoder layer: load, run the calibration batches, have every expert quantised at every width and measured,
free. At any time one layer, the calibration activations and a bounded amount of second moments are in memory; an
executor that quantises elsewhere says how far calibration goes ahead of it. What is done is not redone.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.memory import bound_kernel_caches
from moepack.pack.spec import DenseLayer, DenseMatrix
from moepack.progress import Reporter
from moepack.runtime.devices.glibc import trim

from .artifacts import MOMENTS, SHARD, digested, load_hidden, load_moments, load_observation, save
from .bound import Placement
from .dense_part import quantise_dense
from .enough import advice, few_tokens
from .executors import Executor, Local
from .expert_batch import ExpertBatchTask, batch_settings, observation_digest
from .layer_work import LayerWork
from .recipe import Recipe
from .remote import Source as WeightSource
from .work import WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import CalibrationPass, Observation
    from moepack.calibrate.stream import StreamedModel


Dense = dict[int | None, list[DenseMatrix]]  # part -> the matrices that get versions

_HIDDEN = "hidden.safetensors"

EVERY = 4  # layers, after which the activations are kept: a build that was killed runs at most three of them again


class Run:
    """The walk over the layers: the checkpoint's skeleton, the recipe, the work directory."""

    def __init__(
        self,
        directory: WorkDirectory,
        stream: StreamedModel,
        recipe: Recipe,
        ids: torch.Tensor | None,
        dense: Dense,
        how: Placement,
        stage: str = "quantize",
        keep: bool = True,
    ) -> None:
        self._stage = stage  # of the work directory, where what is quantised goes
        self._work, self._stream, self._recipe, self._ids, self._keep = directory, stream, recipe, ids, keep
        self._executor: Executor = Local()
        self._how, self._dense = how, dense
        stream.experts_in = directory.path if how.experts_on_disk else None
        self._objects: dict[int, tuple[Path, ...]] = {}  # of layers at hand: they go once these are done
        self._notes: dict[int, dict[str, Any]] = {}  # what is to be noted of these layers, as far as it is known
        self._walked = -1  # the last layer that was calibrated

    def layers(
        self,
        calibrate: bool,
        quantize: bool,
        reporter: Reporter,
        executor: Executor | None = None,
        keep: bool = False,
    ) -> None:
        """Go through the decoder layers once, with `executor` in place of the local one.

        What the experts saw is kept where nothing is quantised, or with `keep`.
        """
        self._executor = executor or self._executor
        bound_kernel_caches()
        import torch

        from moepack.calibrate.forward import CalibrationPass

        stream, work = self._stream, self._work
        source = WeightSource(str(Path(stream.checkpoint.path).absolute()), digested(work))
        work.tidy()
        self._executor.begin(source, work.path, stream.device, self._how.workers)
        dtype = getattr(torch, self._recipe.calibration.dtype)
        walk: CalibrationPass | None = None
        total = len(stream.layers)
        pending = [i for i in range(total) if not self._finished(i, calibrate, quantize)]
        # What an earlier `calibrate` kept of a layer is enough to quantise it.
        first = next((i for i in pending if not (quantize and self._observed(i))), total)
        while 0 < first < total and not work.piece("calibrate", first - 1, _HIDDEN).exists():
            first -= 1  # to activations that somebody kept
        if calibrate and self._ids is not None:
            how = self._how
            on_disk = [work.path if it else None for it in (how.hidden_on_disk, how.seen_on_disk)]
            walk = CalibrationPass(stream, self._ids, how.batch_size, dtype, *on_disk)
        if walk is not None and (first < total or not work.done("calibrate", None)):
            rest = stream.load(None)
            save(work.piece("calibrate", None, "dense.safetensors"), rest)
            for k, group in enumerate(stream.mtp_groups(SHARD) if self._recipe.mtp == "keep" else ()):
                save(work.piece("calibrate", None, f"mtp-{k:05d}.safetensors"), group)
            work.mark("calibrate", None, {})
            if first < total:
                stream.to_compute(None, dtype)
                walk.start()
            del rest
            stream.free(None)
            if first:
                walk.restore(load_hidden(work.piece("calibrate", first - 1, _HIDDEN)))
        names = {(True, True): "calibrate and quantise", (True, False): "calibrate", (False, True): "quantise"}
        reporter.stage(names[calibrate, quantize], total)
        for i in range(total):
            reporter.step(f"layer {i}")
            walks = walk is not None and i >= first  # from there on through every layer, to have its activations
            if not walks and i not in pending:
                continue
            has_experts = i in stream.expert_layers
            made = quantize and i in pending and (has_experts or i in self._dense)
            dense: dict[str, torch.Tensor] = {}
            experts, observation, moments = None, None, None
            if walks or not self._executor.reads or i in self._dense:
                tensors = stream.load(i)
                dense, experts = stream.split(i, tensors)
                del tensors
            if walk is not None and walks:
                observation, moments = self._calibrate_layer(walk, i, dense, dtype, reporter, keep or not quantize)
            stream.free(i)
            if made:
                self._notes[i] = self._quantise_dense(i, dense, moments, reporter)
                if has_experts:
                    self._quantise_layer(i, experts, observation or load_observation(work, i), reporter)
                else:
                    self._finish(i, self._notes.pop(i))
            del dense, experts, observation, moments
            self._take(wait=False)
            if walk is not None and walks:
                self._keep_hidden(walk, i)
            trim()  # without it glibc keeps about a layer's worth more after every layer
        reporter.inner("experts", self._executor.left)
        self._take(wait=True)
        if None in self._dense:
            self._head(walk, dtype, quantize, reporter)
        if calibrate:
            total = sum(layer.experts for layer in stream.expert_layers.values())
            if said := advice(few_tokens(work, stream), total):
                reporter.note(said)
        work.tidy()  # a worker that was killed left what it was writing
        reporter.step("done")

    def _take(self, wait: bool) -> None:
        """Declare layers quantised that the executor has done."""
        for layer, note in self._executor.finished(wait):
            self._finish(layer, self._notes.pop(layer) | note)
            for path in self._objects.pop(layer):
                path.unlink(missing_ok=True)
            self._drop_hidden()

    def _head(self, walk: CalibrationPass | None, dtype: torch.dtype, quantize: bool, reporter: Reporter) -> None:
        """What lies behind the last layer: its moments, and with `quantize` its versions."""
        from moepack.calibrate.dense import watch_part

        work, stream = self._work, self._stream
        kept = work.piece("calibrate", None, MOMENTS)
        if (kept.exists() or walk is None) and (not quantize or work.done(self._stage, None) is not None):
            return
        tensors = stream.load(None)
        moments = None
        if walk is not None and not kept.exists():
            if not walk.hidden:
                walk.restore(load_hidden(work.piece("calibrate", len(stream.layers) - 1, _HIDDEN)))
            stream.to_compute(None, dtype)
            watch = watch_part(stream, self._dense[None], walk.windows, walk.length)
            walk.run_head(watch)
            moments = watch.moments()
            self._keep_moments(None, moments)
        stream.free(None)
        if quantize and work.done(self._stage, None) is None:
            self._finish(None, self._quantise_dense(None, tensors, moments, reporter))

    def _keep_moments(self, part: int | None, moments: DenseMoments) -> None:
        from moepack.calibrate.dense import save_moments

        save(self._work.piece("calibrate", part, MOMENTS), *save_moments(moments))

    def _finish(self, part: int | None, note: dict[str, Any]) -> None:
        """Declare a part quantised."""
        self._work.mark(self._stage, part, note)

    def unobserved(self) -> int | None:
        """The first layer with experts of which what they saw was not kept."""
        return next((i for i in self._stream.expert_layers if not self._observed(i)), None)

    def _observed(self, layer: int) -> bool:
        """Whether the calibrate stage finished a layer and kept what its experts saw."""
        kept = self._work.piece("calibrate", layer, "observation.safetensors").exists()
        seen = layer not in self._dense or self._work.piece("calibrate", layer, MOMENTS).exists()
        has_experts = layer in self._stream.expert_layers
        return self._work.done("calibrate", layer) is not None and seen and (kept or not has_experts)

    def _finished(self, layer: int, calibrate: bool, quantize: bool) -> bool:
        quantised = layer in self._stream.expert_layers or layer in self._dense
        calibrated = not calibrate or self._work.done("calibrate", layer) is not None
        return calibrated and (not quantize or not quantised or self._work.done(self._stage, layer) is not None)

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
        """Persist the live activations now and then, and declare the layer done."""
        if self._keep and ((layer + 1) % EVERY == 0 or layer + 1 == len(self._stream.layers)):
            hidden = {f"{b:06d}": batch for b, batch in enumerate(walk.hidden)}
            save(self._work.piece("calibrate", layer, _HIDDEN), hidden)
        self._work.mark("calibrate", layer, {})
        self._walked = layer
        self._drop_hidden()

    def _drop_hidden(self) -> None:
        """Remove activations that no resumed run would start from: it goes back from the first layer in flight to the
        last ones that were kept."""
        in_flight = min(self._objects, default=self._walked + 1)
        kept = [path for i in range(in_flight) if (path := self._work.piece("calibrate", i, _HIDDEN)).exists()]
        for path in kept[:-1]:
            path.unlink()

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
                lambda name: self._work.piece(self._stage, part, name), reporter.advance,
            )
        }  # fmt: skip

    def _before(self, part: int | None) -> int:
        """Dense matrices of the layers before a part: these are quantised, or their experts are being."""
        before = range(len(self._stream.layers) if part is None else part)
        notes = [self._notes.get(i) or self._work.done(self._stage, i) or {} for i in before]
        return sum(len(note["dense"]["matrices"]) for note in notes if "dense" in note)

    def _quantise_layer(
        self, index: int, experts: ExpertWeights | None, observation: Observation, reporter: Reporter
    ) -> None:
        """Give a layer to the executor."""
        from moepack.quantize.expert_batch import expert_batches

        layer, settings = self._stream.expert_layers[index], batch_settings(self._recipe)
        identity = json.dumps(self._work.settings()["calibrate"]["checkpoint"], sort_keys=True)
        checkpoint, observed = hashlib.sha256(identity.encode()).hexdigest(), observation_digest(observation)
        versions, device = self._recipe.version_specs(), self._stream.device.type
        tasks = tuple(
            ExpertBatchTask(checkpoint, index, part, versions, settings, device)
            for part in expert_batches(layer, settings)
        )
        kept = tuple(self._work.object(task.address(observed)).absolute() for task in tasks)
        folder = self._work.piece(self._stage, index, "").absolute()
        self._objects[index] = kept
        reporter.inner("experts", self._executor.left + layer.experts)
        module = self._stream.experts_module(index)
        self._executor.submit(LayerWork(layer, tasks, kept, folder), observation, module, experts, reporter.advance)
