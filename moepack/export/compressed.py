"""`compressed-tensors`: the format `pack-quantized`, integers of 2 to 8 bits in groups, as vLLM and transformers read.

Codes stand in dense 32-bit words along a row, zero points in words along the rows of a group. The library's values are
scale * (code - zero) in the dtype of the scales: ours bit for bit with FP32, ours rounded to BF16 with BF16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from moepack.pack.encodings.affine import Affine
from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import Matrix, Version

from .files import Entries
from .layout import CheckpointTensor
from .plain import SafetensorsTarget
from .targets import MIXED, ExportJob
from .values import Values, words
from .zeros import not_whole, zero_points

if TYPE_CHECKING:
    from torch import Tensor

_DIGITS = r"\d+"


@dataclass(frozen=True)
class Coded(SafetensorsTarget):
    """A checkpoint whose Linears are integer codes with whole zero points."""

    def codes(self, version: Version) -> bool:
        """See SafetensorsTarget: matrices in a lossless version stay in BF16."""
        return not version.holds

    def refusal(self, bundle: Bundle, version: Version, dense: bool = False) -> str | None:
        """See Target."""
        if dense and version.holds:
            return None
        if version.by_matrix:
            return MIXED
        if not isinstance(version, Affine) or version.zero == "midpoint":
            return "it is not integer codes of 2 to 8 bits with zero points"
        return not_whole(bundle, version, dense) or _unequal_groups(bundle, version, dense)

    def check_model(self, job: ExportJob) -> None:
        """See Target: every expert must be Linears."""
        for position in range(len(job.bundle.layers)):
            for piece in job.layout.experts(position):
                if not piece.bias and not piece.linear:
                    raise InputError(
                        f"--to {self.name}: {job.bundle.path}: {piece.name} holds all experts of a layer, or is "
                        "turned, and the format has codes of single Linears: take --to checkpoint"
                    )

    def symmetric(self, job: ExportJob, version: Version) -> bool:
        """Whether all zero points of a version are the middle code, so that none is written."""
        kinds = [dense for dense, some in ((False, job.bundle.versions), (True, job.dense)) if version in some]
        return all(zero_points(job.bundle, version, dense).symmetric for dense in kinds)

    def exact(self, job: ExportJob) -> bool:
        """See Target: libraries compute in the dtype of the scales."""
        return job.scales == "fp32"

    def by_version(self, job: ExportJob) -> dict[Version, list[str]]:
        """The coded modules of each version: expressions for experts, names of dense matrices."""
        out: dict[Version, list[str]] = {}
        for version in job.used:
            at = [p for p, row in enumerate(job.experts) if row[0] == version.name]
            out.setdefault(version, []).extend(_experts_of(job, at))
        for d, version in self._coded(job):
            out.setdefault(version, []).append(job.layout.linear(d).name.removesuffix(".weight"))
        return out

    def ignored(self, job: ExportJob) -> Iterator[str]:
        """The matrices that stay as they are, by an expression for all layers where no layer has codes there."""
        coded = {job.layout.linear(d).name.removesuffix(".weight") for d, _ in self._coded(job)}
        taken = {_any_layer(name) for name in coded}
        seen = set[str]()
        for name, (_, shape) in self._other(job).items():
            module, _, leaf = name.rpartition(".")
            every = _any_layer(module)
            text = module if every in taken else every
            if leaf == "weight" and len(shape) == 2 and module not in coded and text not in seen:
                seen.add(text)
                yield text


def matrices_of(bundle: Bundle, dense: bool) -> list[tuple[str, Matrix]]:
    """The matrices of experts, or the dense ones, with the words that name each in errors."""
    if dense:
        return [(d.module, d.matrix) for d in bundle.manifest.dense]
    return [(f"layer {x.index}, {m.name}", m) for x in bundle.layers for m in x.matrices]


def _unequal_groups(bundle: Bundle, version: Version, dense: bool) -> str | None:
    for where, m in matrices_of(bundle, dense):
        if m.cols % version.group_size:
            return f"{where} has {m.cols} columns, not whole groups of {version.group_size}"
    return None


def _experts_of(job: ExportJob, positions: list[int]) -> list[str]:
    numbers: dict[str, list[int]] = {}
    for position in positions:
        index = job.bundle.layers[position].index
        piece = job.layout.experts(position)[0]
        before, _, after = piece.name.partition(f".{index}.")
        rest = after[: after.index(f".{piece.expert}.")]
        stack = before.rpartition(".")[2]
        numbers.setdefault(f".*{re.escape(stack)}\\.INDEX\\.{re.escape(rest)}\\.\\d+\\..*", []).append(index)
    every = len(positions) == len(job.bundle.layers)
    return [
        f"re:{text.replace('INDEX', _DIGITS if every else '(' + '|'.join(map(str, some)) + ')')}"
        for text, some in numbers.items()
    ]


@dataclass(frozen=True)
class CompressedTensors(Coded):
    """See the module."""

    def entries(self, job: ExportJob, piece: CheckpointTensor, version: Version) -> Entries:
        """See SafetensorsTarget."""
        if piece.bias or not self.codes(version):
            return super().entries(job, piece, version)
        (rows, cols), bits, module = piece.shape, version.bits, piece.name.removesuffix(".weight")
        groups = cols // version.group_size
        out: Entries = {
            f"{module}.weight_packed": ("I32", (rows, -(-cols * bits // 32))),
            f"{module}.weight_scale": ("F32" if job.scales == "fp32" else version.scale_dtype, (rows, groups)),
            f"{module}.weight_shape": ("I64", (2,)),
        }
        if not self.symmetric(job, version):
            out[f"{module}.weight_zero_point"] = ("I32", (-(-rows * bits // 32), groups))
        return out

    def tensors(self, job: ExportJob, piece: CheckpointTensor, version: Version, values: Values) -> dict[str, Tensor]:
        """See SafetensorsTarget."""
        if piece.bias or not self.codes(version):
            return super().tensors(job, piece, version, values)
        module = piece.name.removesuffix(".weight")
        scale = values.scale[piece.rows]
        out = {
            f"{module}.weight_packed": values.words[piece.rows],
            f"{module}.weight_scale": scale.float() if job.scales == "fp32" else scale,
            f"{module}.weight_shape": torch.tensor(piece.shape),
        }
        if not self.symmetric(job, version):
            out[f"{module}.weight_zero_point"] = words(values.zero[piece.rows].T, version.bits).T.contiguous()
        return out

    def config(self, job: ExportJob) -> dict[str, object]:
        """See SafetensorsTarget."""
        groups = {
            f"group_{i}": {
                "targets": targets,
                "weights": {
                    "num_bits": version.bits,
                    "type": "int",
                    "symmetric": self.symmetric(job, version),
                    "strategy": "group",
                    "group_size": version.group_size,
                    "dynamic": False,
                    "actorder": None,
                },
                "input_activations": None,
                "output_activations": None,
                "format": "pack-quantized",
            }
            for i, (version, targets) in enumerate(self.by_version(job).items())
        }
        return {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": groups,
                "ignore": sorted(self.ignored(job)),
                "kv_cache_scheme": None,
            }
        }

    def notes(self, job: ExportJob) -> tuple[str, ...]:
        """See Target."""
        if len(job.used) == 1 and self.symmetric(job, job.used[0]):
            return ()
        return ("transformers 5.24 reads one width and symmetric codes of experts, and not this; vLLM reads both",)


def _any_layer(module: str) -> str:
    """An expression for a module in every layer; the module itself outside layers."""
    text = re.sub(r"\\\.\d+\\\.", lambda _: r"\.\d+\.", re.escape(module))
    return module if text == re.escape(module) else f"re:.*{text.partition(chr(92) + '.')[2]}$"


TARGET = CompressedTensors("compressed-tensors", mixes=False, takes_scales=True)
