"""`checkpoint`: every weight dequantised and rounded to BF16, in the tensors that the model's own checkpoints have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from moepack.pack.spec import DenseMatrix, Version
from moepack.shared.progress import Reporter

from .beside import copy_others, own_config
from .files import Entries, ExportDirectory, TensorFiles, Workers, sharded, tensor_bytes, tensor_file_bytes
from .layout import CheckpointTensor
from .targets import ExportJob, Target
from .values import Values

if TYPE_CHECKING:
    from torch import Tensor

_HELD_BY_BF16 = ("bf16", "mxfp4", "mxfp8")  # versions whose values BF16 holds


@dataclass(frozen=True)
class SafetensorsTarget(Target):
    """A checkpoint of safetensors files. A format of codes overrides `codes`, `entries`, `tensors` and `config`."""

    def codes(self, version: Version) -> bool:
        """Whether weights of a version are written as codes; if not they are dequantised to BF16."""
        return False

    def entries(self, job: ExportJob, piece: CheckpointTensor, version: Version) -> Entries:
        """The tensors that hold a piece of an expert, or of a dense matrix."""
        return {piece.name: ("BF16", piece.shape)}

    def tensors(self, job: ExportJob, piece: CheckpointTensor, version: Version, values: Values) -> dict[str, Tensor]:
        """These tensors, of one expert."""
        return {piece.name: piece.cut(values.bias if piece.bias else values.weight)}

    def config(self, job: ExportJob) -> dict[str, object]:
        """Return the entries to add to the model's config.json."""
        return {}

    def check_model(self, job: ExportJob) -> None:
        """See Target."""

    def exact(self, job: ExportJob) -> bool:
        """See Target."""
        return all(v.name in _HELD_BY_BF16 for v in (*job.used, *job.dense))

    def layer_bytes(self, job: ExportJob, position: int, version: Version) -> int:
        """See Target."""
        experts = job.bundle.layers[position].experts
        total = 0
        for piece in job.layout.experts(position):
            stacked = piece.expert is None
            if stacked or piece.expert == 0:
                total += _total(self.entries(job, piece, version)) * (1 if stacked else experts)
        return total

    def _coded(self, job: ExportJob) -> list[tuple[DenseMatrix, Version]]:
        return [(d, v) for d, v in job.dense_pairs() if self.codes(v)]

    def _other(self, job: ExportJob) -> Entries:
        coded = self._coded(job)
        out = Entries()
        for names in job.layout.groups([d for d, _ in coded]):
            out |= job.layout.outline(names)
        for d, v in coded:
            out |= self.entries(job, job.layout.linear(d), v)
        return out

    def other_bytes(self, job: ExportJob) -> int:
        """See Target."""
        return _total(self._other(job))

    def _experts(self, job: ExportJob, position: int) -> Entries:
        out = Entries()
        # An expert's together, as they are written: the disk takes long runs.
        for piece in sorted(job.layout.experts(position), key=lambda p: -1 if p.expert is None else p.expert):
            out |= self.entries(job, piece, job.version(position, piece.expert or 0))
        return out

    def _everything(self, job: ExportJob) -> Entries:
        out = self._other(job)
        for position in range(len(job.bundle.layers)):
            out |= self._experts(job, position)
        return out

    def file_bytes(self, job: ExportJob) -> int:
        """See Target."""
        return tensor_file_bytes(self._everything(job), job.shard)

    def write(self, job: ExportJob, work: ExportDirectory, reporter: Reporter) -> list[str]:
        """See Target."""
        job.bundle.check()
        files = TensorFiles(work, sharded(self._everything(job), job.shard))
        reporter.stage("export", 1 + len(job.bundle.layers))
        reporter.step("outside the experts")
        with Workers() as workers:
            workers.submit(self._write_other, job, files)
            for position, layer in enumerate(job.bundle.layers):
                reporter.step(f"layer {layer.index}")
                self._write_layer(job, position, files, workers)
        files.close()
        copy_others(job.bundle, work, own_config(job.bundle) | self.config(job))
        return files.names

    def _write_other(self, job: ExportJob, files: TensorFiles) -> None:
        coded = self._coded(job)
        dense = job.bundle.dense()
        versions = {d.module: v.name for d, v in job.dense_pairs()}
        for names in job.layout.groups([d for d, _ in coded]):
            if not files.wants(job.layout.outline(names)):
                continue
            own: dict[str, Tensor] = {}
            for name in names:
                if name in dense:
                    own[name] = dense.torch(name, mapped=True)
                    continue
                module, _, leaf = name.rpartition(".")
                values = Values.of_dense(job.bundle, versions[module], module)
                own[name] = values.bias if leaf == "bias" else values.weight
            for name, tensor in job.layout.revert(own).items():
                files.put_tensor(name, tensor)
        for d, v in coded:
            piece = job.layout.linear(d)
            if files.wants(self.entries(job, piece, v)):
                values = Values.of_dense(job.bundle, v.name, d.module)
                for name, tensor in self.tensors(job, piece, v, values).items():
                    files.put_tensor(name, tensor)

    def _write_layer(self, job: ExportJob, position: int, files: TensorFiles, workers: Workers) -> None:
        pieces = job.layout.experts(position)
        stacked = [p for p in pieces if p.expert is None]
        of_expert: dict[int, list[CheckpointTensor]] = {}
        for piece in pieces:
            if piece.expert is not None:
                of_expert.setdefault(piece.expert, []).append(piece)

        def write(e: int, version: Version, own: tuple[CheckpointTensor, ...]) -> None:
            matrices = Values.of_expert(job.bundle, version.name, position, e)
            for piece in own:
                for name, tensor in self.tensors(job, piece, version, matrices[piece.matrix]).items():
                    files.put_tensor(name, tensor, e if piece.expert is None else 0)

        for e in range(job.bundle.layers[position].experts):
            version = job.version(position, e)
            own = (*of_expert.get(e, ()), *stacked)
            if files.wants(name for piece in own for name in self.entries(job, piece, version)):
                job.bundle.layer_file(version.name, position).ahead(e)
                workers.submit(write, e, version, own)


def _total(entries: Entries) -> int:
    return sum(map(tensor_bytes, entries.values()))


TARGET = SafetensorsTarget("checkpoint", mixes=True)
