"""One streaming pass over a checkpoint's decoder layers: calibrate, quantise, or both, into a work directory.

Each decoder layer is loaded; calibration batches run through it; its experts and dense matrices go to the executor; it
is freed. A part is a decoder layer, or what lies outside the layers (part None); finished parts are skipped. Memory
holds one layer, the calibration activations, and second moments of bounded size. An executor on other machines bounds
how far calibration runs ahead of quantising.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.spec import DenseLayer, DenseMatrix
from moepack.pack.writer import check_room
from moepack.runtime.devices.glibc import reusing, trim
from moepack.shared.memory import bound_kernel_caches
from moepack.shared.progress import Reporter

from .artifacts import (
    MOMENTS,
    check_watched,
    finished,
    load_hidden,
    load_moments,
    load_observation,
    no_moments,
    save,
)
from .bound import MemoryPlan
from .executors.local import Local
from .executors.worker import WorkerCheckpoint
from .few_tokens import advice, few_tokens
from .needs import Dense
from .recipe import Recipe
from .saved import is_as_saved
from .tasks.experts import ExpertBatchTask, batch_settings, observation_digest
from .tasks.layer import DenseWork, LayerInputs, LayerWork
from .tasks.row_shards import RowShardTask, moments_digest, row_shard_tasks
from .work import DIGESTS, HIDDEN, WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.forward import CalibrationPass, Observation
    from moepack.calibrate.native import NativeWeight
    from moepack.calibrate.stream import StreamedModel

    from .executors.on_ray import OnRay

EVERY = 4  # layers from one save of the activations to the next: a killed build repeats at most three layers


class LayerWalk:
    """One walk over the layers of a checkpoint. The results go into a work directory."""

    def __init__(
        self,
        directory: WorkDirectory,
        stream: StreamedModel,
        recipe: Recipe,
        ids: torch.Tensor | None,
        dense: Dense,
        how: MemoryPlan,
        reporter: Reporter,
        stage: str = "quantize",
        keep: bool = True,
    ) -> None:
        """Prepare a walk. `ids`: the calibration windows, int64 [windows, length]; None where nothing is calibrated.

        `dense`: the matrices that get versions, by part. `stage`: the stage that quantises. `keep`: save activations
        between layers, from which another run can resume.
        """
        self._work = directory
        self._stream = stream
        self._recipe = recipe
        self._ids = ids
        self._how = how
        self._dense = dense
        self._reporter = reporter
        self._stage = stage
        self._keep = keep
        self._executor: Local | OnRay = Local()
        self._dtype = recipe.calibration.torch_dtype
        self._experts = stream.expert_layers if recipe.versions else {}  # layers whose experts get versions
        stream.experts_in = directory.path if how.experts_on_disk else None
        self._inner = "experts and row shards of dense matrices" if dense else "experts"  # the unit of progress
        self._objects: dict[int | None, tuple[Path, ...]] = {}  # submitted part -> result files of its tasks
        self._notes: dict[int | None, JsonObject] = {}  # submitted part -> what is known of its note
        self._reading = threading.Lock()
        self._walked = -1  # the last layer that was calibrated

    def layers(
        self, calibrate: bool, quantize: bool, executor: Local | OnRay | None = None, keep: bool = False
    ) -> None:
        """Go through the decoder layers once. `executor` runs the tasks; by default the local one.

        Observations and moments are saved if nothing is quantised, or with `keep`.
        """
        self._executor = executor or self._executor
        bound_kernel_caches()
        stream = self._stream
        work = self._work
        reporter = self._reporter
        digests = work.read(work.path / DIGESTS) or {}
        source = WorkerCheckpoint(str(Path(stream.checkpoint.path).absolute()), digests)
        work.tidy()
        self._executor.begin(source, work.path, stream.device, self._how)
        total = len(stream.layers)
        pending = [i for i in range(total) if not self._finished(i, calibrate, quantize)]
        if quantize:
            check_room(work.path, work.path, self._least_bytes(pending))
        # The first layer to calibrate: a saved observation is enough to quantise a layer.
        first = next((i for i in pending if not (quantize and self._observed(i))), total)
        while 0 < first < total and not work.piece("calibrate", first - 1, HIDDEN).exists():
            first -= 1  # back to a layer whose input is saved
        walk = None
        if calibrate and self._ids is not None:
            walk = _open_pass(work, stream, self._ids, self._how, self._dtype)
            if first < total or not work.done("calibrate", None):
                self._begin_walk(walk, first)
        reporter.stage(" and ".join(["calibrate"] * calibrate + ["quantise"] * quantize), total)
        for i in range(total):
            reporter.step(f"layer {i}")
            walks = walk if i >= first else None  # from `first` on, every layer makes the next one's input
            if walks is not None or i in pending:
                self._layer(i, walks, quantize and i in pending, keep or not quantize)
                self._take(wait=False)
                if walks is not None:
                    self._keep_hidden(walks, i)
                trim()  # otherwise glibc keeps about one layer's bytes more after every layer
        if None in self._dense:
            self._head(walk, quantize)
        reporter.inner(self._inner, self._executor.left)
        self._take(wait=True)
        few = few_tokens(work, stream) if calibrate else {}
        if said := advice(few, sum(x.experts for x in stream.expert_layers.values())):
            reporter.note(said)
        work.tidy()  # killed workers may have left partial files
        reporter.step("done")

    def _least_bytes(self, pending: Sequence[int]) -> int:
        """Return the bytes of what pending layers' experts and matrices take where no weight decides their sizes."""
        quantised = [
            *((x.matrices, x.experts, self._recipe.version_specs()) for i, x in self._experts.items() if i in pending),
            *(((m.matrix,), 1, self._recipe.dense_specs()) for i in pending for m in self._dense.get(i, ())),
        ]
        total = 0
        for matrices, count, versions in quantised:
            for version in versions:
                sizes = version.stored_sizes(matrices)
                total += count * sizes[0] if sizes else 0
        return total

    def _begin_walk(self, walk: CalibrationPass, first: int) -> None:
        """Save the part outside the layers, and prepare the activations that go into layer `first`."""
        from moepack.calibrate.skeleton import AT_ONCE

        stream = self._stream
        work = self._work
        for left in work.piece("calibrate", None, "").glob("mtp-*.safetensors"):  # of a killed run
            left.unlink()
        for k, group in enumerate(stream.mtp_groups(AT_ONCE) if self._recipe.mtp == "keep" else ()):
            save(work.piece("calibrate", None, f"mtp-{k:05d}.safetensors"), group)
            group.clear()  # before the next is read
            trim()
        save(work.piece("calibrate", None, "dense.safetensors"), stream.load(None))
        work.mark("calibrate", None, {})
        if first < len(stream.layers):
            stream.to_compute(None, self._dtype)
            walk.start()
        stream.free(None)
        if 0 < first < len(stream.layers):
            walk.restore(load_hidden(work.piece("calibrate", first - 1, HIDDEN)))

    def _layer(self, i: int, walk: CalibrationPass | None, quantize: bool, keep: bool) -> None:
        """Load a layer, calibrate it if `walk` is given, and with `quantize` submit it to the executor."""
        stream = self._stream
        reads = self._executor.reads
        dense: dict[str, torch.Tensor] = {}
        experts = None
        observation = None
        moments = None
        if not self._experts and not reads:
            dense = stream.tensors(i, stream.dense_names(i))
        elif walk is not None or not reads:
            dense, experts = stream.split(i, stream.load(i))
        if walk is not None:
            observation, moments = self._calibrate_layer(walk, i, dense, keep)
        stream.free(i)
        if quantize and (i in self._experts or i in self._dense):
            if i in self._experts:
                observation = observation or load_observation(self._work, i)
            self._quantise_layer(i, LayerInputs(observation, None, experts, moments, dense))

    def _take(self, wait: bool) -> None:
        """Mark the parts that the executor finished, and remove their tasks' results. `wait`: for all parts."""
        for part, note in self._executor.finished(wait):
            self._notes.pop(part)
            self._work.mark(self._stage, part, note)
            for path in self._objects.pop(part):
                path.unlink(missing_ok=True)
            self._drop_hidden()

    def _head(self, walk: CalibrationPass | None, quantize: bool) -> None:
        """Make the moments of the part behind the last layer (`lm_head`), and with `quantize` submit the part."""
        from moepack.calibrate.dense import save_moments, watch_part

        work = self._work
        stream = self._stream
        made = quantize and work.done(self._stage, None) is None
        watches = walk is not None and not work.piece("calibrate", None, MOMENTS).exists()
        if not watches and not made:
            return
        tensors = stream.load(None) if watches or not self._executor.reads else {}
        moments = None
        if walk is not None and watches:
            stream.to_compute(None, self._dtype)
            if not walk.hidden:
                walk.start()
                walk.restore(load_hidden(work.piece("calibrate", len(stream.layers) - 1, HIDDEN)))
            watch = watch_part(stream, self._dense[None], walk.windows, walk.length, self._recipe.fits_dense)
            walk.run_head(watch)
            moments = watch.moments()
            save(work.piece("calibrate", None, MOMENTS), *save_moments(moments))
        stream.free(None)
        if made:
            self._quantise_layer(None, LayerInputs(moments=moments, tensors=tensors))

    def check_observed(self) -> None:
        """Raise InputError unless every layer is calibrated and its observation and moments are saved."""
        work = self._work
        for part in (*range(len(self._stream.layers)), None):
            if part is not None:
                finished(work, "calibrate", part)
            if part in self._dense:
                check_watched(work, self._recipe)
            if part is not None and not self._observed(part):
                what = "its experts saw" if part in self._experts else "its dense matrices read"
                raise InputError(
                    f"{work.path}: layer {part}: what {what} was not kept: build with --keep, or run moepack calibrate "
                    "with --fresh in another --work"
                )
            if part in self._dense and not work.piece("calibrate", part, MOMENTS).exists():
                raise no_moments(work)  # of the part behind the last layer: calibrate makes them from saved activations

    def _observed(self, layer: int) -> bool:
        """Whether the calibrate stage finished a layer, and saved its observation and moments."""
        needed = ["observation.safetensors"] * (layer in self._experts) + [MOMENTS] * (layer in self._dense)
        saved = all(self._work.piece("calibrate", layer, name).exists() for name in needed)
        return saved and self._work.done("calibrate", layer) is not None

    def _finished(self, layer: int, calibrate: bool, quantize: bool) -> bool:
        quantised = layer in self._experts or layer in self._dense
        calibrated = not calibrate or self._work.done("calibrate", layer) is not None
        return calibrated and (not quantize or not quantised or self._work.done(self._stage, layer) is not None)

    def _calibrate_layer(
        self, walk: CalibrationPass, layer: int, dense: dict[str, torch.Tensor], keep: bool
    ) -> tuple[Observation | None, DenseMoments | None]:
        from moepack.calibrate.dense import save_moments, watch_part
        from moepack.calibrate.statistics import routing_statistics

        work = self._work
        save(work.piece("calibrate", layer, "dense.safetensors"), dense)
        self._stream.to_compute(layer, self._dtype)
        self._reporter.inner("tokens", sum(h.shape[0] * h.shape[1] for h in walk.hidden))
        matrices = self._dense.get(layer)
        sums = self._recipe.fits_dense
        watch = watch_part(self._stream, matrices, walk.windows, walk.length, sums) if matrices else None
        observation = walk.run_layer(layer, self._reporter.advance, watch)
        moments = None if watch is None else watch.moments()
        if moments is not None and keep:
            save(work.piece("calibrate", layer, MOMENTS), *save_moments(moments))
        if observation is not None:
            statistics = routing_statistics(observation, self._stream.expert_layers[layer].experts)
            save(work.piece("calibrate", layer, "statistics.safetensors"), statistics)
            if keep:
                seen = {"inputs": observation.inputs, "experts": observation.experts, "gates": observation.gates}
                save(
                    work.piece("calibrate", layer, "observation.safetensors"), seen, {"length": str(observation.length)}
                )
        return observation, moments

    def _keep_hidden(self, walk: CalibrationPass, layer: int) -> None:
        """Save the activations after every EVERY layers and after the last, and mark the layer as calibrated."""
        if self._keep and ((layer + 1) % EVERY == 0 or layer + 1 == len(self._stream.layers)):
            save(self._work.piece("calibrate", layer, HIDDEN), walk.kept())
        self._work.mark("calibrate", layer, {})
        self._walked = layer
        self._drop_hidden()

    def _drop_hidden(self) -> None:
        """Remove saved activations, except the newest before the first unfinished layer: a resumed run starts there."""
        in_flight = min((i for i in self._objects if i is not None), default=self._walked + 1)
        kept = [path for i in range(in_flight) if (path := self._work.piece("calibrate", i, HIDDEN)).exists()]
        for path in kept[:-1]:
            path.unlink()

    def _before(self, part: int | None) -> int:
        """The number of dense matrices in the layers before a part. All these layers have been submitted."""
        before = range(len(self._stream.layers) if part is None else part)
        notes = [self._notes.get(i) or self._work.done(self._stage, i) or {} for i in before]
        return sum(len(note["dense"]["matrices"]) for note in notes if "dense" in note)

    def _called(self, part: int | None, moments: DenseMoments) -> tuple[DenseMatrix, ...]:
        """A part's dense matrices that calibration called. Others get no versions: other code may read them."""
        called = tuple(m for m in self._dense[part] if m.module in moments.group)
        if len(called) < len(self._dense[part]):
            odd = next(m.module for m in self._dense[part] if m.module not in moments.group)
            self._reporter.note(f"{odd} was never called: it stays as in the checkpoint")
        return called

    def _native(self, part: int, some: range) -> Sequence[NativeWeight]:
        with self._reading:  # reading changes the skeleton for a moment
            return self._stream.native_experts(part, some)

    def _native_dense(self, module: str) -> NativeWeight | None:
        with self._reading:
            return self._stream.native_dense(module)

    def _quantise_layer(self, part: int | None, inputs: LayerInputs) -> None:
        """Submit a part to the executor: its dense matrices, and if `inputs` has an observation, its experts."""
        from moepack.quantize.expert_batch import expert_batches

        identity = json.dumps(self._work.settings()["calibrate"]["checkpoint"], sort_keys=True)
        checkpoint = hashlib.sha256(identity.encode()).hexdigest()
        device = self._stream.device.type
        tasks: dict[str, RowShardTask | ExpertBatchTask] = {}  # by address (digest of a task's inputs), in order
        dense = layer = None
        if part in self._dense:
            moments = inputs.moments or load_moments(self._work, part)
            inputs = replace(inputs, moments=moments, native_dense=self._native_dense)
            if called := self._called(part, moments):
                signal = tuple(moments.signal[m.module] for m in called)
                described = DenseLayer(part, self._before(part), called)
                dense = DenseWork(described, self._recipe.dense_specs(), signal, moments.tokens)
                digests = [moments_digest(*pair) for pair in zip(moments.learn, moments.held, strict=True)]
                for shard in row_shard_tasks(called, self._recipe, checkpoint, device):
                    tasks[shard.address(digests[moments.group[shard.matrix.module]])] = shard
        if part is not None and (observation := inputs.observation) is not None:
            layer = self._experts[part]
            inputs = replace(inputs, module=self._stream.experts_module(part), native=partial(self._native, part))
            settings = batch_settings(self._recipe)
            observed = observation_digest(observation)
            for some in expert_batches(layer, settings):
                batch = ExpertBatchTask(checkpoint, self._recipe.version_specs(), device, part, some, settings)
                tasks[batch.address(observed)] = batch
        if not tasks:
            self._work.mark(self._stage, part, {})
            return
        kept = tuple(self._work.object(address).absolute() for address in tasks)
        for path in kept:  # what a stopped run made of this part
            if path.exists() and not is_as_saved(path):
                self._work.drop(path)
        folder = self._work.piece(self._stage, part, "").absolute()
        self._objects[part], self._notes[part] = kept, {} if dense is None else {"dense": dense.note}
        work = LayerWork(part, tuple(tasks.values()), kept, folder, layer, dense)
        self._reporter.inner(self._inner, self._executor.left + sum(task.count for task in work.tasks))
        self._executor.submit(work, inputs, self._reporter.advance)


def _open_pass(
    directory: WorkDirectory, stream: StreamedModel, ids: torch.Tensor, plan: MemoryPlan, dtype: torch.dtype
) -> CalibrationPass:
    from moepack.calibrate.forward import CalibrationPass

    hidden_in, seen_in = (directory.path if it else None for it in (plan.hidden_on_disk, plan.seen_on_disk))
    between = reusing if plan.reuse else contextlib.nullcontext
    return CalibrationPass(stream, ids, plan.batch_size, dtype, hidden_in, seen_in, between)
