"""The task that quantises an expert batch: some experts of a layer at every version, the same bytes on any machine.

`moepack.quantize.expert_batch` has the mathematics; this module has the address (digest of all inputs), the encoding
and the table of losses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NoReturn

from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.spec import Version, lossy
from moepack.quantize import methods
from moepack.shared.version import __version__

from .result import THREADS, TaskResult, check_numbers, fixed_threads, threads_on

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation
    from moepack.calibrate.native import NativeWeight
    from moepack.families.interface import ExpertsModule
    from moepack.quantize.expert_batch import Settings

    from ..recipe import Recipe


_HASHED = 4096  # rows hashed at once


@dataclass(frozen=True)
class Task:
    """What every task has."""

    checkpoint: str  # SHA-256 over the digests of the checkpoint's files
    versions: tuple[Version, ...]
    device: str  # the kind of device that computes, as torch names it

    def digest(self, facts: JsonObject) -> str:
        """The SHA-256 of these facts, and of those that every task has."""
        facts |= {
            "moepack": __version__,
            "checkpoint": self.checkpoint,
            "versions": [v.record() for v in self.versions],
            "threads": THREADS,
            "device": self.device,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class ExpertBatchTask(Task):
    """An expert batch to quantise, the lossless version included.

    The layer's observation (the experts' inputs in calibration) is passed apart.
    """

    layer: int
    experts: range
    settings: Settings

    @property
    def count(self) -> int:
        """The number of units that the task adds to a build's progress."""
        return len(self.experts)

    def address(self, observed: str) -> str:
        """The SHA-256 of all that determines the result. `observed` comes from `observation_digest`."""
        from moepack.quantize.losses import ESTIMATE

        facts = {
            "estimate": ESTIMATE,
            "observed": observed,
            "layer": self.layer,
            "experts": [self.experts.start, self.experts.stop],
            "settings": asdict(self.settings),
        }
        return self.digest(facts)


def batch_settings(recipe: Recipe) -> Settings:
    """The quantiser's settings for expert batches, from a recipe."""
    from moepack.quantize.expert_batch import Settings

    q = recipe.quantize
    versions = lossy(recipe.version_specs())
    return Settings(q.method, versions, q.loss_tokens, zeros=q.zeros, refine=q.refine)


def observation_digest(observation: Observation) -> str:
    """SHA-256 of a layer's observation."""
    import torch

    from moepack.calibrate.held import release

    digest = hashlib.sha256(str(observation.length).encode())
    for tensor in (observation.inputs, observation.experts, observation.gates):
        for part in tensor.split(_HASHED):
            digest.update(part.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            release(part)
    return digest.hexdigest()


def no_codes(what: object) -> NoReturn:
    """Stand for a reader of codes where no version holds them."""
    raise AssertionError(f"no version holds the codes of {what}")


NativeReader = Callable[[range], "Sequence[NativeWeight]"]  # codes and scales of both matrices of some experts


def make_expert_batch(
    task: ExpertBatchTask,
    module: ExpertsModule,
    weights: ExpertWeights,
    observation: Observation,
    device: torch.device,
    native: NativeReader = no_codes,
) -> TaskResult:
    """Quantise an expert batch, measure its losses and encode it, with torch on THREADS threads.

    `module`: the layer's experts module; only its gate activation is used. `weights`: those of the batch's experts.
    `native` reads the codes and scales of a range of the layer's experts.
    """
    import torch

    from moepack.calibrate.experts import bits_of
    from moepack.calibrate.gather import gather_batch
    from moepack.calibrate.native import expert_extent
    from moepack.quantize.expert_batch import quantise_batch
    from moepack.quantize.pooling import MEASURED, PARTS, measured_row

    matrices = weights.layer.matrices
    names = [v.name for v in task.versions]
    shape = len(task.experts), len(names)
    losses = {k: torch.zeros(shape, dtype=torch.float64) for k in MEASURED}
    made = TaskResult({}, {}, losses | {"method": torch.zeros(shape, dtype=torch.uint8)})
    with fixed_threads():
        exact = [v for v in task.versions if v not in lossy(task.versions)]
        threads = threads_on(device)
        for version in exact:
            if version.released:  # an expert at a time: a byte a weight
                for i, e in enumerate(task.experts):
                    codes = native(range(e, e + 1))
                    made.add(version.name, *expert_extent(version, weights, i, codes, threads))
        batch = gather_batch(module, weights, task.experts, observation, task.settings, device)
        quantised = [names.index(v.name) for v in task.settings.versions]
        for i, row in enumerate(quantise_batch(batch, task.settings)):
            for k, values in measured_row([(item.own, item.others) for item in row]).items():
                made.losses[k][i, quantised] = torch.tensor(values, dtype=torch.float64)
            biases = [None if b is None else bits_of(b) for b in (weights.bias(i, m) for m in range(len(matrices)))]
            for version in exact:
                if not version.released:
                    made.add(version.name, *expert_extent(version, weights, i, threads=threads))
            for item in row:
                what = f"{weights.layer.module}: expert {item.expert} at {item.version.name}"
                found = (getattr(x.loss, part) for x in (item.own, item.others) for part in PARTS)
                check_numbers(what, [q.scale[item.index] for q in item.quantised], found)
                packed = [q.matrix(item.index, bias) for q, bias in zip(item.quantised, biases, strict=True)]
                made.add(item.version.name, *item.version.encode(matrices, packed))
                made.losses["method"][i, names.index(item.version.name)] = methods.numbered().index(item.method)
    return made
