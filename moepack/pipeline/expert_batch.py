"""An expert batch at every width: the unit of a build's quantising, the same bytes wherever it is made.

What goes in is picklable, so that an executor can send it to another machine; what comes out is what a layer file
takes, and can be kept in the work directory under the address of what went in.
"""

from __future__ import annotations

import copy
import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.affine import Buffer
from moepack.pack.spec import LOSSLESS, Version, affine_payload
from moepack.quantize import methods
from moepack.version import __version__

from .artifacts import save

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation
    from moepack.quantize.expert_batch import Settings

    from .recipe import Recipe


@dataclass(frozen=True)
class ExpertBatchTask:
    """What making one expert batch takes, but for what the calibration tokens brought to the layer.

    Attributes:
        module: the layer's experts module without its parameters, for its gate activation.
        weights: the weights of these experts.
        layer: the decoder layer's index.
        experts: which of the layer's experts they are.
        versions: all versions wanted, the lossless one among them.
        settings: how to quantise.
        device: where to compute, as torch names it.
        threads: torch's threads: sums come out in another order with another number.
    """

    module: Any
    weights: ExpertWeights
    layer: int
    experts: range
    versions: tuple[Version, ...]
    settings: Settings
    device: str
    threads: int

    def address(self, observed: str) -> str:
        """SHA-256 of all that the result follows from; `observed` is the observation's digest."""
        from moepack.quantize.losses import ESTIMATE

        facts = {
            "moepack": __version__,
            "estimate": ESTIMATE,
            "observed": observed,
            "layer": self.layer,
            "experts": [self.experts.start, self.experts.stop],
            "versions": [asdict(v) for v in self.versions],
            "settings": asdict(self.settings),
            "threads": self.threads,
            "device": self.device.partition(":")[0],
        }
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for tensor in (*self.weights.weights, *self.weights.biases):
            if tensor is not None:
                digest.update(_bytes(tensor).data)
        return digest.hexdigest()


@dataclass(frozen=True)
class ExpertBatchResult:
    """A finished expert batch.

    Attributes:
        extents: version -> one extent an expert, uint8.
        payloads: version -> bytes of each extent without padding.
        losses: `moepack.quantize.pooling.MEASURED`, float64, and "method", uint8, each
            [experts, versions].
    """

    extents: dict[str, list[Buffer]]
    payloads: dict[str, list[int]]
    losses: dict[str, torch.Tensor]


def batch_settings(recipe: Recipe) -> Settings:
    """How a recipe wants expert batches quantised."""
    from moepack.quantize.expert_batch import Settings

    q = recipe.quantize
    affine = tuple(v for v in recipe.version_specs() if not v.is_lossless)
    return Settings(q.method, affine, q.min_tokens, q.loss_tokens, q.moments)


def bare(module: Any) -> Any:
    """A copy of an experts module without its parameters."""
    out = copy.copy(module)
    out._parameters = {}
    return out


def observation_digest(observation: Observation) -> str:
    """SHA-256 of what the calibration tokens brought to a layer."""
    digest = hashlib.sha256(str(observation.length).encode())
    for tensor in (observation.inputs, observation.experts, observation.gates):
        digest.update(_bytes(tensor).data)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> Buffer:
    import torch

    out: Buffer = tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return out


def lossless_extent(weights: ExpertWeights, expert: int) -> tuple[Buffer, int]:
    """The lossless extent of one expert, and its bytes without padding."""
    from moepack.calibrate.experts import bits_of
    from moepack.pack.lossless import LosslessMatrix, encode_lossless

    values = []
    for m in range(len(weights.layer.matrices)):
        bias = weights.bias(expert, m)
        values.append(LosslessMatrix(bits_of(weights.matrix(expert, m)), None if bias is None else bits_of(bias)))
    return encode_lossless(weights.layer.matrices, values)


def make_batch(task: ExpertBatchTask, observation: Observation) -> ExpertBatchResult:
    """Quantise, measure and encode one expert batch."""
    import torch

    from moepack.calibrate.experts import bits_of
    from moepack.calibrate.gather import gather_batch
    from moepack.pack.affine import encode_affine
    from moepack.quantize.expert_batch import quantise_batch
    from moepack.quantize.pooling import MEASURED, measured_row

    torch.set_num_threads(task.threads)
    weights, matrices = task.weights, task.weights.layer.matrices
    names = [v.name for v in task.versions]
    made = ExpertBatchResult(
        {n: [] for n in names},
        {n: [] for n in names},
        {k: torch.zeros(len(task.experts), len(names), dtype=torch.float64) for k in MEASURED}
        | {"method": torch.zeros(len(task.experts), len(names), dtype=torch.uint8)},
    )
    batch = gather_batch(task.module, weights, task.experts, observation, task.settings, torch.device(task.device))
    affine = [names.index(v.name) for v in task.settings.versions]
    for i, row in enumerate(quantise_batch(batch, task.settings)):
        for k, values in measured_row([(item.own, item.others) for item in row]).items():
            made.losses[k][i, affine] = torch.tensor(values, dtype=torch.float64)
        biases = [None if b is None else bits_of(b) for b in (weights.bias(i, m) for m in range(len(matrices)))]
        if LOSSLESS in made.extents:
            extent, payload = lossless_extent(weights, i)
            made.extents[LOSSLESS].append(extent)
            made.payloads[LOSSLESS].append(payload)
        for item in row:
            name, column = item.version.name, names.index(item.version.name)
            packed = [q.matrix(item.index, bias) for q, bias in zip(item.quantised, biases, strict=True)]
            made.extents[name].append(encode_affine(matrices, item.version, packed))
            made.payloads[name].append(affine_payload(matrices, item.version))
            made.losses["method"][i, column] = methods.numbered().index(item.method)
    return made


def save_batch(made: ExpertBatchResult, path: Path) -> None:
    """Keep a finished expert batch."""
    import torch

    tensors = {f"losses.{k}": v for k, v in made.losses.items()}
    for name, extents in made.extents.items():
        tensors[f"payloads.{name}"] = torch.tensor(made.payloads[name], dtype=torch.int64)
        tensors |= {f"extents.{name}.{i}": torch.from_numpy(_writeable(extent)) for i, extent in enumerate(extents)}
    save(path, tensors)


def _writeable(extent: Buffer) -> Buffer:
    return extent if extent.flags.writeable else extent.copy()  # a view of Ray's object store is not


def load_batch(path: Path) -> ExpertBatchResult:
    """The inverse of `save_batch`."""
    from safetensors.torch import load_file

    tensors = load_file(path)
    # Copied: they outlive the extents, and would keep the mapped file in memory.
    losses = {k.removeprefix("losses."): v.clone() for k, v in tensors.items() if k.startswith("losses.")}
    payloads = {k.removeprefix("payloads."): v.tolist() for k, v in tensors.items() if k.startswith("payloads.")}
    extents: dict[str, list[Buffer]] = {
        name: [tensors[f"extents.{name}.{i}"].numpy() for i in range(len(sizes))] for name, sizes in payloads.items()
    }
    return ExpertBatchResult(extents, payloads, losses)
