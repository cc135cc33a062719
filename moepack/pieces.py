"""What a build's stages hand on to each other through the work directory: extents, loss tables, activations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError, TargetError
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.spec import ExpertLayer, Version, affine_payload

from .work import WorkDirectory

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation


def write_expert(experts: ExpertWeights, expert: int, row: Sequence[Any], writers: dict[str, LayerFileWriter]) -> None:
    """Write one expert's extents: the lossless one from its weights, the others from `row` (ExpertVersions)."""
    from moepack.calibrate.experts import bits_of
    from moepack.pack.affine import encode_affine
    from moepack.pack.lossless import LosslessMatrix, encode_lossless

    matrices = experts.layer.matrices
    biases = [None if b is None else bits_of(b) for b in (experts.bias(expert, m) for m in range(len(matrices)))]
    if "bf16" in writers:
        values = [LosslessMatrix(bits_of(experts.matrix(expert, m)), bias) for m, bias in enumerate(biases)]
        writers["bf16"].add(*encode_lossless(matrices, values))
    for item in row:
        packed = [q.matrix(item.index, bias) for q, bias in zip(item.quantised, biases, strict=True)]
        extent = encode_affine(matrices, item.version, packed)
        writers[item.version.name].add(extent, affine_payload(matrices, item.version))


class LossTable:
    """The losses of one layer, for every expert and version; zero for the lossless one."""

    METHODS = ("none", "gptq", "sign", "hqq", "rtn", "gptqmodel")

    def __init__(self, columns: dict[str, int], arrays: dict[str, torch.Tensor], versions: Sequence[Version]) -> None:
        self._columns, self._arrays, self._versions = columns, arrays, versions

    @staticmethod
    def empty(layer: ExpertLayer, versions: Sequence[Version]) -> LossTable:
        """A table of zeros."""
        import torch

        shape = (layer.experts, len(versions))
        arrays = {name: torch.zeros(shape) for name in ("mse", "relative", "gated")}
        arrays["method"] = torch.zeros(shape, dtype=torch.uint8)
        return LossTable({v.name: i for i, v in enumerate(versions)}, arrays, versions)

    def add(self, expert: int, row: Sequence[Any]) -> None:
        """Enter one expert's versions."""
        for item in row:
            at = (expert, self._columns[item.version.name])
            self._arrays["mse"][at] = item.loss.mse
            self._arrays["relative"][at] = item.loss.relative
            self._arrays["gated"][at] = item.loss.gated
            self._arrays["method"][at] = self.METHODS.index(item.method)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The table as it is stored."""
        return self._arrays

    def metadata(self) -> dict[str, str]:
        """What its columns and its method numbers mean."""
        return {"versions": ",".join(v.name for v in self._versions), "methods": ",".join(self.METHODS)}


def run_record(directory: WorkDirectory) -> dict[str, Any]:
    """What the first stage noted of the run; InputError where it has not run."""
    try:
        record = json.loads((directory.path / "run.json").read_text())
    except (OSError, ValueError):
        raise InputError(f"{directory.path}: is not calibrated yet: run moepack calibrate first") from None
    return dict(record)


def save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> None:
    """Write tensors so that the file is whole or absent."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    temporary = path.with_name(path.name + ".partial")
    try:
        save_file({k: v.contiguous() for k, v in tensors.items()}, temporary, metadata)
    except SafetensorError as error:  # the library reports a full disk so, and not as an OSError
        temporary.unlink(missing_ok=True)
        raise TargetError(f"{path}: cannot be written: {error}") from None
    temporary.rename(path)


def load_hidden(path: Path) -> list[torch.Tensor]:
    """The live activations that `save` wrote, one tensor a batch."""
    from safetensors.torch import load_file

    return [tensor for _, tensor in sorted(load_file(path).items())]


def load_observation(work: WorkDirectory, layer: int) -> Observation:
    """What a layer's experts saw, as the calibrate stage kept it."""
    from safetensors import safe_open

    from moepack.calibrate.forward import Observation

    path = work.piece("calibrate", layer, "observation.safetensors")
    if not path.exists():
        raise InputError(f"{work.path}: layer {layer} is not calibrated: run moepack calibrate to its end")
    with safe_open(path, framework="pt") as f:
        length = int(f.metadata()["length"])
        return Observation(f.get_tensor("inputs"), f.get_tensor("experts"), f.get_tensor("gates"), length)
