"""One streaming pass over a checkpoint's decoder layers: calibrate, quantise, or both, into a work directory.

For each decoder layer: load, run the calibration batches, have every expert quantised at every width and measured,
free. At any time one layer, the calibration activations and a bounded amount of second moments are in memory; an
executor that quantises elsewhere says how far calibration goes ahead of it. What is done is not redone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.memory import bound_kernel_caches
from moepack.pack.errors import InputError
from moepack.pack.spec import EXPERT_DTYPES, LOSSLESS, DenseLayer
from moepack.progress import Reporter
from moepack.runtime.devices.glibc import trim
from moepack.version import __version__

from .allocate import check_allocation
from .artifacts import MOMENTS, RECIPE, SHARD, load_hidden, load_moments, load_observation, run_record, save
from .bound import MAPPED, Placement, needs_of, place
from .dense_part import quantise_dense
from .enough import advice, enough_windows, few_tokens
from .executors import Executor, Local
from .expert_batch import ExpertBatchTask, batch_settings, observation_digest
from .layer_work import LayerWork
from .recipe import Recipe, Source, parse_recipe, with_text
from .remote import Source as WeightSource
from .work import WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.checkpoint import Checkpoint
    from moepack.calibrate.data import Windows
    from moepack.calibrate.dense import DenseMoments
    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import CalibrationPass, Observation
    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.spec import DenseMatrix


_DIGESTS = "digests.json"
_HIDDEN = "hidden.safetensors"

EVERY = 4  # layers, after which the activations are kept: a build that was killed runs at most three of them again


def calibration_text(
    checkpoint: Checkpoint, recipe: Recipe, calibration: Sequence[str | Path]
) -> tuple[list[str], Windows]:
    """The sources that a model is calibrated on, and their windows, no longer than the model was made for.

    Args:
        checkpoint: the model.
        recipe: what is wanted.
        calibration: files or Hub data sets in place of the recipe's.

    Returns:
        The sources, and their windows: `samples`, or where the recipe says until when, as many as that may take.
    """
    from moepack.calibrate import data

    how = recipe.calibration
    tokenizer = data.load_tokenizer(checkpoint.path)
    sources = [Source(str(s)) for s in calibration] or how.data
    names, weights = [s.source for s in sources], [s.weight for s in sources]
    limit = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", None) or how.length
    count = max(how.most, how.samples) if how.until else how.samples
    return names, data.calibration_windows(names, tokenizer, count, min(how.length, limit), how.seed, weights)


def _identity(directory: WorkDirectory, checkpoint: Checkpoint, reporter: Reporter) -> dict[str, str]:
    """The digests of a checkpoint's files; what was read of them stays in the work directory."""
    from moepack.calibrate.identity import identity

    known = _digested(directory)
    reporter.stage("read the checkpoint", 1)
    reporter.step(checkpoint.name)
    reporter.inner("bytes", checkpoint.bytes)
    digests, kept = identity(checkpoint, known, reporter.advance)
    directory.write(directory.path / _DIGESTS, json.dumps(kept, indent=1).encode())
    return digests


def _digested(directory: WorkDirectory) -> dict[str, Any]:
    """What is known of the checkpoint's files."""
    try:
        known = json.loads((directory.path / _DIGESTS).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


class Run:
    """The stages' common ground: the checkpoint's skeleton, the recipe, the work directory."""

    def __init__(
        self,
        directory: WorkDirectory,
        stream: StreamedModel,
        recipe: Recipe,
        ids: torch.Tensor | None,
        stage: str = "quantize",
        keep: bool = True,
    ) -> None:
        self._stage = stage  # of the work directory, where what is quantised goes
        self._work, self._stream, self._recipe, self._ids, self._keep = directory, stream, recipe, ids, keep
        self._executor: Executor = Local()
        self._how = Placement(recipe.calibration.batch_size)
        self._objects: dict[int, tuple[Path, ...]] = {}  # of layers at hand: they go once these are done
        self._notes: dict[int, dict[str, Any]] = {}  # what is to be noted of these layers, as far as it is known
        self._walked = -1  # the last layer that was calibrated
        self._dense: dict[int | None, list[DenseMatrix]] = {}
        if recipe.dense:
            from moepack.calibrate.dense import dense_matrices

            for matrix in dense_matrices(stream):
                self._dense.setdefault(matrix.layer, []).append(matrix)
        dense = [m for matrices in self._dense.values() for m in matrices]
        layers = list(stream.expert_layers.values())
        check_allocation(recipe.allocation, layers, recipe.version_specs(), dense, recipe.dense_specs())

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
        memory: int | None = None,
        keep: bool = True,
    ) -> Run:
        """Open everything a calibration needs, before any work is done: in `memory` bytes, and with `keep` so that
        another run can go on from the activations between layers."""
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.calibrate.stream import StreamedModel

        recipe = with_text(recipe)
        with reporter.hub_bars():
            opened = open_checkpoint(checkpoint, revision)
        stream = StreamedModel(opened, device)
        if stream.unused:
            reporter.note(
                f"{len(stream.unused)} tensors of the checkpoint have no place in the model, and are left out"
            )
        keeps_mtp = recipe.mtp == "keep" and bool(stream.mtp)
        if stream.mtp:
            are = "are kept beside the model" if keeps_mtp else "are left out: mtp: keep in the recipe keeps them"
            reporter.note(f"{len(stream.mtp)} tensors of layers for multi-token prediction (MTP) {are}")
        if stream.expert_dtype != "BF16":
            reporter.note(f"the {LOSSLESS} version holds {EXPERT_DTYPES[stream.expert_dtype]}")
        settings = recipe.calibration
        sources, windows = calibration_text(opened, recipe, calibration)
        run = Run(directory, stream, recipe, windows.ids, keep=keep)
        count, length = windows.ids.shape
        run._fit(memory, count, length, fresh, reporter=reporter)  # with all windows that may be taken
        identity = _identity(directory, opened, reporter)
        windows = enough_windows(directory, stream, windows, settings, identity, run._how, reporter)
        run._ids = windows.ids
        if len(windows.ids) < settings.samples:
            reporter.note(f"the calibration text fills {len(windows.ids)} of {settings.samples} samples")
        directory.begin(
            "calibrate",
            {
                "checkpoint": identity,
                "calibration tokens": windows.digest,
                "batch_size": run._how.batch_size,
                "dtype": settings.dtype,
                "moepack": __version__,
                "dense": bool(recipe.dense) or None,
                "mtp": recipe.mtp if keeps_mtp else None,
            },
            fresh,
        )
        where = {
            "checkpoint": str(Path(opened.path).absolute()),
            "name": opened.name,
            "recipe": recipe.text,
            "sources": [Path(s).name for s in sources],
            "windows": list(windows.taken),
            "samples": len(windows.ids),
            "length": windows.ids.shape[1],
            "digest": windows.digest,
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
        where["dense"] = list(run._dense)
        directory.write(directory.path / "run.json", json.dumps(where, indent=1).encode())
        run._begin_quantize(fresh)
        return run

    @staticmethod
    def resume(
        directory: WorkDirectory,
        recipe: Recipe | None,
        fresh: bool,
        device: str,
        reporter: Reporter,
        stage: str = "quantize",
        memory: int | None = None,
    ) -> Run:
        """Open a calibrated work directory for the second stage, or another beside it, in `memory` bytes."""
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.calibrate.stream import StreamedModel

        where = run_record(directory)
        if recipe is None:
            recipe = parse_recipe(where["recipe"], f"{directory.path / 'run.json'}: recipe")
        opened = open_checkpoint(where["checkpoint"])
        run = Run(directory, StreamedModel(opened, device), with_text(recipe), None, stage)
        run._fit(memory, where["samples"], where["length"], walks=False)
        was, now = directory.settings()["calibrate"]["checkpoint"], _identity(directory, opened, reporter)
        if now != was:
            other = next(name for name in sorted({*was, *now}) if was.get(name) != now.get(name))
            raise InputError(
                f"{where['checkpoint']}: {other} is not what {directory.path} was calibrated with: name another --work"
            )
        run._begin_quantize(fresh)
        return run

    def _fit(
        self,
        memory: int | None,
        windows: int,
        length: int,
        fresh: bool = False,
        walks: bool = True,
        reporter: Reporter | None = None,
    ) -> None:
        """Keep to `memory` bytes, or refuse; without a bound, go on with the batches of an earlier run that had one."""
        size = self._recipe.calibration.batch_size
        if memory is None:
            if walks and not fresh and (begun := self._begun()) != size:
                self._how = Placement(begun)
                if reporter is not None:
                    reporter.note(f"goes on with {begun} windows at once, to which --memory brought the work directory")
            return
        needs = needs_of(self._stream, self._recipe, windows, length, self._dense)
        if not walks:  # what experts saw is mapped from the file that the first stage left
            self._how = place(replace(needs, hidden=0, window=0, forward=0, seen=MAPPED), 1, memory)
            return
        # Batches that an earlier run began with, if they fit: the activations' bits follow from them.
        begun = {} if fresh else self._work.settings().get("calibrate", {})
        self._how = place(needs, min(size, begun.get("batch_size", size)), memory)
        if reporter is not None and self._how != place(needs, size, None):
            on_disk = f"; on disk, {self._how.on_disk}" if self._how.on_disk else ""
            at_once = f"{self._how.batch_size} windows, {self._how.workers} expert batches"
            reporter.note(f"to stay in --memory: at once {at_once}{on_disk}")

    def _begun(self) -> int:
        """The windows of a batch of an earlier run, if its recipe had as many as this one's: then a bound on memory
        made them fewer, and nobody asks for others now."""
        size = self._recipe.calibration.batch_size
        try:
            before = parse_recipe(run_record(self._work)["recipe"], "run.json")
        except InputError:  # there was none, or its recipe is of another version
            return size
        begun = self._work.settings()["calibrate"]
        return int(begun["batch_size"]) if before.calibration.batch_size == size else size

    def _begin_quantize(self, fresh: bool) -> None:
        from moepack.quantize.losses import ESTIMATE

        q = self._recipe.quantize
        how, versions = self._recipe.allocation, self._recipe.version_specs()
        self._work.begin(
            self._stage,
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
        self._work.write(self._work.path / self._stage / RECIPE, self._recipe.text.encode())

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
        source = WeightSource(str(Path(stream.checkpoint.path).absolute()), _digested(work))
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
