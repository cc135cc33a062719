"""`gguf`: a file for llama.cpp, or several, of the types that hold a version's values exactly."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version
from moepack.shared.progress import Reporter

from ..beside import own_config
from ..files import ExportDirectory, Files, Workers
from ..targets import ExportJob, Target
from ..values import Values
from . import blocks
from .file import Metadata, Tensor, Type, open_files, size_of
from .names import Family, family_of, settings
from .tokens import tokenizer


@dataclass(frozen=True)
class Gguf(Target):
    """See the module."""

    libraries: ClassVar[tuple[str, ...]] = ("gguf",)

    def type_of(self, version: Version) -> Type:
        """The type of matrices in a version that is not refused."""
        kind = blocks.type_of(version)
        assert kind is not None, "refused before"
        return kind

    def refusal(self, bundle: Bundle, version: Version, dense: bool = False) -> str | None:
        """See Target."""
        return blocks.refusal(bundle, version, dense)

    def check_model(self, job: ExportJob) -> None:
        """See Target."""
        settings(str(job.bundle.path), model_family(job), own_config(job.bundle))
        for layer in job.bundle.layers:
            if any(m.bias for m in layer.matrices):
                raise InputError(f"--to gguf: {job.bundle.path}: its experts have biases, which are not known here")

    def exact(self, job: ExportJob) -> bool:
        """See Target: types that would round are refused."""
        return True

    def notes(self, job: ExportJob) -> tuple[str, ...]:
        """See Target."""
        if "tokenizer.ggml.pre" in _metadata(job):
            return ()
        return ("the file has no tokenizer: llama.cpp has no name here for how the model's cuts text",)

    def _layer(self, job: ExportJob, position: int, version: Version) -> dict[str, Tensor]:
        layer = job.bundle.layers[position]
        family = model_family(job)
        out = dict[str, Tensor]()
        kind = self.type_of(version)
        for m in layer.matrices:
            parts = family.experts[m.name]
            for part in parts:
                out[f"blk.{layer.index}.{part}.weight"] = Tensor(kind, (layer.experts, m.rows // len(parts), m.cols))
        return out

    def _other(self, job: ExportJob) -> dict[str, tuple[str, Tensor]]:
        family = model_family(job)
        dense = job.bundle.dense()
        out = dict[str, tuple[str, Tensor]]()
        shapes = {name: (shape, Type.BF16) for name, shape in dense.items()}
        for d, version in job.dense_pairs():
            kind = self.type_of(version)
            shapes[f"{d.module}.weight"] = (d.matrix.rows, d.matrix.cols), kind
            if d.matrix.bias:
                raise InputError(f"--to gguf: {d.module} has a bias, which {family.architecture} has not")
        for name, (shape, kind) in shapes.items():
            try:
                theirs = family.name(name)
            except KeyError:
                raise InputError(f"--to gguf: {name} has no place in llama.cpp's {family.architecture}") from None
            wide = len(shape) == 1 or any(part in theirs for part in family.in_float32)
            wide = wide or (name in dense and dense.dtype(name) != "BF16")
            out[theirs] = name, Tensor(Type.F32 if wide else kind, tuple(shape))
        return out

    def layer_bytes(self, job: ExportJob, position: int, version: Version) -> int:
        """See Target."""
        return sum(t.bytes for t in self._layer(job, position, version).values())

    def other_bytes(self, job: ExportJob) -> int:
        """See Target."""
        return sum(t.bytes for _, t in self._other(job).values())

    def _tensors(self, job: ExportJob) -> dict[str, Tensor]:
        out = {name: t for name, (_, t) in self._other(job).items()}
        for position, row in enumerate(job.experts):
            out |= self._layer(job, position, job.bundle.manifest.version(row[0]))
        return out

    def file_bytes(self, job: ExportJob) -> int:
        """See Target."""
        return size_of(_metadata(job), self._tensors(job), job.shard)

    def write(self, job: ExportJob, work: ExportDirectory, reporter: Reporter) -> list[str]:
        """See Target: one file or several, with the tokenizer in the first."""
        return self.write_into(ExportDirectory.FILES, job, work, reporter)

    def write_into(self, folder: str, job: ExportJob, work: ExportDirectory, reporter: Reporter) -> list[str]:
        """Write the files into a folder of the working directory; returns their names."""
        job.bundle.check()
        files = open_files(work, folder, _metadata(job), self._tensors(job), job.shard)
        reporter.stage("export", 1 + len(job.bundle.layers))
        reporter.step("outside the experts")
        dense = job.bundle.dense()
        versions = {f"{d.module}.weight": (d, v) for d, v in job.dense_pairs()}
        for theirs, (name, tensor) in self._other(job).items():
            if not files.wants((theirs,)):
                continue
            if name in versions:
                d, version = versions[name]
                values = Values.of_dense(job.bundle, version.name, d.module)
                files.put(theirs, blocks.blocks(values, slice(None), tensor.type))
            elif tensor.type is Type.F32:
                files.put(theirs, blocks.plain(dense.numpy(name).astype(np.float32)))
            else:
                own = dense.torch(name, mapped=True).view(-1).view(torch.uint8).numpy()
                files.put(theirs, blocks.plain(own))
        for position, layer in enumerate(job.bundle.layers):
            reporter.step(f"layer {layer.index}")
            self._write_layer(job, position, files)
        files.close()
        return files.names

    def _write_layer(self, job: ExportJob, position: int, files: Files) -> None:
        layer = job.bundle.layers[position]
        family = model_family(job)
        tensors = self._layer(job, position, job.version(position, 0))

        def write(e: int) -> None:
            version = job.experts[position][e]
            for m, values in zip(layer.matrices, Values.of_expert(job.bundle, version, position, e), strict=True):
                parts = family.experts[m.name]
                step = m.rows // len(parts)
                for i, part in enumerate(parts):
                    name = f"blk.{layer.index}.{part}.weight"
                    data = blocks.blocks(values, slice(i * step, (i + 1) * step), tensors[name].type)
                    files.put(name, data, e * data.size)

        if files.wants(tensors):
            with Workers() as workers:
                for e in range(layer.experts):
                    workers.submit(write, e)


def model_family(job: ExportJob) -> Family:
    """Return llama.cpp's description of the job's model. Raises InputError for a model without one."""
    return family_of(str(job.bundle.path), own_config(job.bundle))


def _metadata(job: ExportJob) -> Metadata:
    config = own_config(job.bundle)
    keys = settings(str(job.bundle.path), model_family(job), config)
    return keys | (tokenizer(job.bundle.path, config["vocab_size"]) or {"tokenizer.ggml.model": "none"})


TARGET = Gguf("gguf", mixes=False)
