"""An expert batch at every width: the unit of a build's quantising, the same bytes wherever it is made.

What a batch's bytes follow from is a task, a few numbers that travel anywhere; its weights and its tokens are the
maker's to bring.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from moepack.pack.codec.bits import Buffer
from moepack.pack.spec import Version, lossy
from moepack.quantize import methods
from moepack.version import __version__

from .piece import THREADS, Piece, fixed_threads

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation
    from moepack.quantize.expert_batch import Settings

    from .recipe import Recipe


_HASHED = 4096  # rows that are hashed at once


@dataclass(frozen=True)
class ExpertBatchTask:
    """What an expert batch is made of, but for what the calibration tokens brought to the layer.

    Attributes:
        checkpoint: SHA-256 over its files' digests.
        layer: the decoder layer's index.
        experts: which of the layer's experts they are.
        versions: all versions wanted, the lossless one among them.
        settings: how to quantise.
        device: the kind of device that computes, as torch names it.
    """

    checkpoint: str
    layer: int
    experts: range
    versions: tuple[Version, ...]
    settings: Settings
    device: str

    @property
    def count(self) -> int:
        """Of what a build's progress counts."""
        return len(self.experts)

    def address(self, observed: str) -> str:
        """SHA-256 of all that the result follows from; `observed` is the observation's digest."""
        from moepack.quantize.losses import ESTIMATE

        facts = {
            "moepack": __version__,
            "estimate": ESTIMATE,
            "checkpoint": self.checkpoint,
            "observed": observed,
            "layer": self.layer,
            "experts": [self.experts.start, self.experts.stop],
            "versions": [v.record() for v in self.versions],
            "settings": asdict(self.settings),
            "threads": THREADS,
            "device": self.device,
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def batch_settings(recipe: Recipe) -> Settings:
    """How a recipe wants expert batches quantised."""
    from moepack.quantize.expert_batch import Settings

    q = recipe.quantize
    return Settings(q.method, lossy(recipe.version_specs()), q.min_tokens, q.loss_tokens, q.moments)


def observation_digest(observation: Observation) -> str:
    """SHA-256 of what the calibration tokens brought to a layer."""
    from moepack.calibrate.held import release

    digest = hashlib.sha256(str(observation.length).encode())
    for tensor in (observation.inputs, observation.experts, observation.gates):
        for part in tensor.split(_HASHED):
            digest.update(_bytes(part).data)
            release(part)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> Buffer:
    import torch

    out: Buffer = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return out


def exact_extent(
    version: Version, weights: ExpertWeights, expert: int, threads: int | None = None
) -> tuple[Buffer, int]:
    """An expert's extent in a lossless version, and its payload; all cores work without `threads`."""
    from moepack.calibrate.experts import bits_of
    from moepack.pack.codec.lossless import LosslessMatrix

    values = []
    for m in range(len(weights.layer.matrices)):
        bias = weights.bias(expert, m)
        values.append(LosslessMatrix(bits_of(weights.matrix(expert, m)), None if bias is None else bits_of(bias)))
    return version.encode(weights.layer.matrices, values, threads)


def make_batch(
    task: ExpertBatchTask, module: Any, weights: ExpertWeights, observation: Observation, device: torch.device
) -> Piece:
    """Quantise, measure and encode one expert batch, on THREADS of torch's threads.

    Args:
        task: which experts, and how.
        module: the layer's experts module, for its gate activation only.
        weights: the weights of these experts.
        observation: what the calibration tokens brought to the layer.
        device: where to compute.
    """
    with fixed_threads():
        return _make(task, module, weights, observation, device)


def _make(
    task: ExpertBatchTask, module: Any, weights: ExpertWeights, observation: Observation, device: torch.device
) -> Piece:
    import torch

    from moepack.calibrate.experts import bits_of
    from moepack.calibrate.gather import gather_batch
    from moepack.quantize.expert_batch import quantise_batch
    from moepack.quantize.pooling import MEASURED, measured_row

    matrices = weights.layer.matrices
    names = [v.name for v in task.versions]
    made = Piece(
        {n: [] for n in names},
        {n: [] for n in names},
        {k: torch.zeros(len(task.experts), len(names), dtype=torch.float64) for k in MEASURED}
        | {"method": torch.zeros(len(task.experts), len(names), dtype=torch.uint8)},
    )
    batch = gather_batch(module, weights, task.experts, observation, task.settings, device)
    quantised = [names.index(v.name) for v in task.settings.versions]
    exact = [v for v in task.versions if v not in lossy(task.versions)]
    for i, row in enumerate(quantise_batch(batch, task.settings)):
        for k, values in measured_row([(item.own, item.others) for item in row]).items():
            made.losses[k][i, quantised] = torch.tensor(values, dtype=torch.float64)
        biases = [None if b is None else bits_of(b) for b in (weights.bias(i, m) for m in range(len(matrices)))]
        for version in exact:
            extent, payload = exact_extent(version, weights, i, THREADS if device.type == "cpu" else None)
            made.extents[version.name].append(extent)
            made.payloads[version.name].append(payload)
        for item in row:
            name, column = item.version.name, names.index(item.version.name)
            packed = [q.matrix(item.index, bias) for q, bias in zip(item.quantised, biases, strict=True)]
            extent, payload = item.version.encode(matrices, packed)
            made.extents[name].append(extent)
            made.payloads[name].append(payload)
            made.losses["method"][i, column] = methods.numbered().index(item.method)
    return made
