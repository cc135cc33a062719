"""One streaming pass over a checkpoint's decoder layers: calibrate, quantise, or both, into a work directory.

For each decoder layer: load, run the calibration batches, have every expert and every dense matrix that gets versions
quantised and measured, free. At any time one layer at the most, the calibration activations and a bounded amount of
second moments are in memory; an executor that quantises elsewhere says how far calibration goes ahead of it. What is
done is not redone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.memory import bound_kernel_caches
from moepack.pack.errors import InputError
from moepack.pack.spec import DenseLayer, DenseMatrix
from moepack.progress import Reporter
from moepack.runtime.devices.glibc import reusing, trim

from .artifacts import (
    MOMENTS,
    digested,
    load_hidden,
    load_moments,
    load_observation,
    no_moments,
    not_calibrated,
    save,
)
from .bound import Placement
from .dense_part import DensePart
from .dense_slice import DenseTask, dense_tasks, moments_digest
from .enough import advice, few_tokens
from .executors import Executor, Local
from .expert_batch import ExpertBatchTask, batch_settings, observation_digest
from .layer_work import Given, LayerWork
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
        self._experts = stream.expert_layers if recipe.versions else {}  # those that get versions
        stream.experts_in = directory.path if how.experts_on_disk else None
        self._inner = "experts and slices of dense matrices" if dense else "experts"  # what progress counts
        self._objects: dict[int | None, tuple[Path, ...]] = {}  # of parts at hand: they go once these are done
        self._notes: dict[int | None, dict[str, Any]] = {}  # what is to be noted of these, as far as it is known
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
        from moepack.calibrate.stream import AT_ONCE

        stream, work = self._stream, self._work
        source = WeightSource(str(Path(stream.checkpoint.path).absolute()), digested(work))
        work.tidy()
        self._executor.begin(source, work.path, stream.device, self._how)
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
            hidden_in, seen_in = (work.path if it else None for it in (how.hidden_on_disk, how.seen_on_disk))
            between = reusing if how.reuse else contextlib.nullcontext
            walk = CalibrationPass(stream, self._ids, how.batch_size, dtype, hidden_in, seen_in, between)
        if walk is not None and (first < total or not work.done("calibrate", None)):
            for left in work.piece("calibrate", None, "").glob("mtp-*.safetensors"):  # by a run that was killed
                left.unlink()
            for k, group in enumerate(stream.mtp_groups(AT_ONCE) if self._recipe.mtp == "keep" else ()):
                save(work.piece("calibrate", None, f"mtp-{k:05d}.safetensors"), group)
                group.clear()  # before the next is read
                trim()
            rest = stream.load(None)
            save(work.piece("calibrate", None, "dense.safetensors"), rest)
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
            has_experts = i in self._experts
            made = quantize and i in pending and (has_experts or i in self._dense)
            dense: dict[str, torch.Tensor] = {}
            experts, observation, moments = None, None, None
            if not self._experts and not self._executor.reads:
                dense = stream.tensors(i, stream.dense_names(i))
            elif walks or not self._executor.reads:
                tensors = stream.load(i)
                dense, experts = stream.split(i, tensors)
                del tensors
            if walk is not None and walks:
                observation, moments = self._calibrate_layer(walk, i, dense, dtype, reporter, keep or not quantize)
            stream.free(i)
            if made:
                if has_experts:
                    observation = observation or load_observation(work, i)
                self._quantise_layer(i, dense, moments, experts, observation, reporter)
            del dense, experts, observation, moments
            self._take(wait=False)
            if walk is not None and walks:
                self._keep_hidden(walk, i)
            trim()  # without it glibc keeps about a layer's worth more after every layer
        if None in self._dense:
            self._head(walk, dtype, quantize, reporter)
        reporter.inner(self._inner, self._executor.left)
        self._take(wait=True)
        if calibrate:
            total = sum(layer.experts for layer in stream.expert_layers.values())
            if said := advice(few_tokens(work, stream), total):
                reporter.note(said)
        work.tidy()  # a worker that was killed left what it was writing
        reporter.step("done")

    def _take(self, wait: bool) -> None:
        """Declare parts quantised that the executor has done."""
        for part, note in self._executor.finished(wait):
            self._notes.pop(part)
            self._finish(part, note)
            for path in self._objects.pop(part):
                path.unlink(missing_ok=True)
            self._drop_hidden()

    def _head(self, walk: CalibrationPass | None, dtype: torch.dtype, quantize: bool, reporter: Reporter) -> None:
        """What lies behind the last layer: its moments, and with `quantize` its versions."""
        from moepack.calibrate.dense import watch_part

        work, stream = self._work, self._stream
        made = quantize and work.done(self._stage, None) is None
        watches = walk is not None and not work.piece("calibrate", None, MOMENTS).exists()
        if not watches and not made:
            return
        tensors = stream.load(None) if watches or not self._executor.reads else {}
        moments = None
        if walk is not None and watches:
            if not walk.hidden:
                walk.restore(load_hidden(work.piece("calibrate", len(stream.layers) - 1, _HIDDEN)))
            stream.to_compute(None, dtype)
            watch = watch_part(stream, self._dense[None], walk.windows, walk.length)
            walk.run_head(watch)
            moments = watch.moments()
            self._keep_moments(None, moments)
        stream.free(None)
        if made:
            self._quantise_layer(None, tensors, moments, None, None, reporter)

    def _keep_moments(self, part: int | None, moments: DenseMoments) -> None:
        from moepack.calibrate.dense import save_moments

        save(self._work.piece("calibrate", part, MOMENTS), *save_moments(moments))

    def _finish(self, part: int | None, note: dict[str, Any]) -> None:
        """Declare a part quantised."""
        self._work.mark(self._stage, part, note)

    def check_observed(self) -> None:
        """Refuse to quantise anew, before anything is thrown away, what was not calibrated to its end, or of which what
        its experts saw or its dense matrices read was not kept.

        Raises:
            InputError: with the first part that is so.
        """
        work = self._work
        for part in (*range(len(self._stream.layers)), None):
            if part is not None and work.done("calibrate", part) is None:
                raise not_calibrated(work, part)
            if part in self._dense and not work.settings()["calibrate"].get("dense"):
                raise no_moments(work)
            if part is not None and not self._observed(part):
                what = "its experts saw" if part in self._experts else "its dense matrices read"
                raise InputError(
                    f"{work.path}: layer {part}: what {what} was not kept: build with --keep, or run moepack calibrate "
                    "with --fresh in another --work"
                )
            if part in self._dense and not work.piece("calibrate", part, MOMENTS).exists():
                raise no_moments(work)  # behind the last layer: calibrate makes them from what it kept

    def _observed(self, layer: int) -> bool:
        """Whether the calibrate stage finished a layer and kept what its experts saw."""
        kept = self._work.piece("calibrate", layer, "observation.safetensors").exists()
        seen = layer not in self._dense or self._work.piece("calibrate", layer, MOMENTS).exists()
        has_experts = layer in self._experts
        return self._work.done("calibrate", layer) is not None and seen and (kept or not has_experts)

    def _finished(self, layer: int, calibrate: bool, quantize: bool) -> bool:
        quantised = layer in self._experts or layer in self._dense
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
        in_flight = min((i for i in self._objects if i is not None), default=self._walked + 1)
        kept = [path for i in range(in_flight) if (path := self._work.piece("calibrate", i, _HIDDEN)).exists()]
        for path in kept[:-1]:
            path.unlink()

    def _before(self, part: int | None) -> int:
        """Dense matrices of the layers before a part: these are quantised, or being so."""
        before = range(len(self._stream.layers) if part is None else part)
        notes = [self._notes.get(i) or self._work.done(self._stage, i) or {} for i in before]
        return sum(len(note["dense"]["matrices"]) for note in notes if "dense" in note)

    def _called(self, part: int | None, moments: DenseMoments, reporter: Reporter) -> tuple[DenseMatrix, ...]:
        """A part's dense matrices that get versions. Those that calibration never called stay as they are: something
        else may read their weights."""
        called = tuple(m for m in self._dense[part] if m.module in moments.group)
        if len(called) < len(self._dense[part]):
            odd = next(m.module for m in self._dense[part] if m.module not in moments.group)
            reporter.note(f"{odd} was never called: it stays as it is in the checkpoint")
        return called

    def _quantise_layer(
        self,
        part: int | None,
        tensors: dict[str, torch.Tensor],
        moments: DenseMoments | None,
        experts: ExpertWeights | None,
        observation: Observation | None,
        reporter: Reporter,
    ) -> None:
        """Give a part to the executor: its dense matrices, and where experts saw something its experts."""
        from moepack.quantize.expert_batch import expert_batches

        identity = json.dumps(self._work.settings()["calibrate"]["checkpoint"], sort_keys=True)
        checkpoint, device = hashlib.sha256(identity.encode()).hexdigest(), self._stream.device.type
        tasks: list[DenseTask | ExpertBatchTask] = []
        addresses: list[str] = []
        dense = layer = module = None
        if part in self._dense:
            moments = moments or load_moments(self._work, part)
            if called := self._called(part, moments, reporter):
                signal = tuple(moments.signal[m.module] for m in called)
                described = DenseLayer(part, self._before(part), called)
                dense = DensePart(described, self._recipe.dense_specs(), signal, moments.tokens)
                digests = [moments_digest(*pair) for pair in zip(moments.learn, moments.held, strict=True)]
                for task in dense_tasks(called, self._recipe, checkpoint, device):
                    tasks.append(task)
                    addresses.append(task.address(digests[moments.group[task.matrix.module]]))
        if part is not None and observation is not None:
            layer, module = self._experts[part], self._stream.experts_module(part)
            settings, observed = batch_settings(self._recipe), observation_digest(observation)
            for some in expert_batches(layer, settings):
                batch = ExpertBatchTask(checkpoint, part, some, self._recipe.version_specs(), settings, device)
                tasks.append(batch)
                addresses.append(batch.address(observed))
        if not tasks:
            self._finish(part, {})
            return
        kept = tuple(self._work.object(address).absolute() for address in addresses)
        folder = self._work.piece(self._stage, part, "").absolute()
        self._objects[part], self._notes[part] = kept, {} if dense is None else {"dense": dense.note}
        reporter.inner(self._inner, self._executor.left + sum(task.count for task in tasks))
        given = Given(observation, module, experts, moments, tensors)
        self._executor.submit(LayerWork(part, tuple(tasks), kept, folder, layer, dense), given, reporter.advance)
