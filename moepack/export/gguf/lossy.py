"""`gguf` by one of llama.cpp's own mixes of K-quants: a conversion that loses, by llama.cpp itself, and is measured.

A version's values are written in BF16 beside the output, quantised, and compared with the version's exact values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, ReaderTensor, dequantize

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version
from moepack.shared.progress import Reporter

from ..files import ExportDirectory
from ..report import Lost
from ..targets import ExportJob
from ..values import Values
from .file import Type
from .llama import MIXES, check_llama, quantise
from .target import Gguf, model_family

if TYPE_CHECKING:
    from torch import Tensor

_BETWEEN = "bf16"  # the folder of the working directory that the files in BF16 are in
_AT_ONCE = 1 << 24  # weights that are float32 at a time


@dataclass
class _Sum:
    squares: float = 0.0
    power: float = 0.0
    types: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Lossy(Gguf):
    """See the module."""

    libraries: ClassVar[tuple[str, ...]] = ("gguf", "llama-cpp-python")
    mix: str = ""

    def type_of(self, version: Version) -> Type:
        """See Gguf: what llama.cpp quantises."""
        return Type.BF16

    def refusal(self, bundle: Bundle, version: Version, dense: bool = False) -> str | None:
        """See Target: every version has values."""
        return None

    def check_model(self, job: ExportJob) -> None:
        """See Target: llama.cpp must be here."""
        check_llama()
        super().check_model(job)

    def exact(self, job: ExportJob) -> bool:
        """See Target."""
        return False

    def file_bytes(self, job: ExportJob) -> int:
        """See Target: BF16, and what is made of it, which takes half at most (Q6_K: 6.6 of 16 bits)."""
        return super().file_bytes(job) * 3 // 2

    def write(self, job: ExportJob, work: ExportDirectory, reporter: Reporter) -> list[str]:
        """See Target."""
        names = self.write_into(_BETWEEN, job, work, reporter)
        made = [f"{ExportDirectory.FILES}/{name}" for name in names]
        if not all(map(work.has, made)):
            first = work.path(_BETWEEN, names[0])
            split = len(names) > 1
            out = work.path(ExportDirectory.FILES, first.name.partition("-")[0] if split else first.name)
            quantise(first, out, self.mix, split, reporter)
            work.finish(*made)
        return names

    def lost(self, job: ExportJob, paths: list[Path], reporter: Reporter) -> Lost:
        """See Target: the squared error against the version, over the version's squares, by kind of matrix."""
        sums = defaultdict[str, _Sum](_Sum)
        size = 0
        found = {t.name: t for path in paths for t in GGUFReader(path).tensors}
        reporter.stage("measure what is lost", 1 + len(job.bundle.layers))
        reporter.step("outside the experts")
        for theirs, (name, tensor) in self._other(job).items():
            if tensor.type is not Type.F32:
                for exact, rows in _slices(_dense(job, name)):
                    _add(sums, found[theirs], exact, rows, tensor.shape[0])
        for position, layer in enumerate(job.bundle.layers):
            reporter.step(f"layer {layer.index}")
            own = {n: found[n] for n in self._layer(job, position, job.version(position, 0))}
            size += sum(int(t.n_bytes) for t in own.values())
            for e in range(layer.experts):
                version = job.experts[position][e]
                for m, values in zip(layer.matrices, Values.of_expert(job.bundle, version, position, e), strict=True):
                    parts = model_family(job).experts[m.name]
                    for part, exact in zip(parts, values.exact.float().numpy().reshape(len(parts), -1), strict=True):
                        t = own[f"blk.{layer.index}.{part}.weight"]
                        rows = range(e, e + 1)
                        _add(sums, t, exact, rows, layer.experts)
        error = {kind: s.squares / s.power if s.power else 0.0 for kind, s in sums.items()}
        types = {kind: ", ".join(sorted(s.types)) for kind, s in sums.items()}
        return Lost(self.mix, error, types, 8 * size / job.bundle.expert_weights)


def target(mix: str) -> Lossy:
    """The target of a mix. Raises InputError, which lists the known ones."""
    if mix not in MIXES:
        raise InputError(f"--lossy {mix}: there are {', '.join(MIXES)}")
    return Lossy("gguf", mixes=False, mix=mix)


def _dense(job: ExportJob, name: str) -> Tensor:
    """The exact values of a tensor outside the experts, [rows, cols]."""
    for d, version in job.dense_pairs():
        if name == f"{d.module}.weight":
            return Values.of_dense(job.bundle, version.name, d.module).exact
    return job.bundle.dense().torch(name)


def _slices(whole: Tensor) -> Iterator[tuple[npt.NDArray[np.float32], range]]:
    step = max(1, _AT_ONCE // whole.shape[1])
    for start in range(0, whole.shape[0], step):
        rows = range(start, min(start + step, whole.shape[0]))
        yield whole[rows.start : rows.stop].float().numpy().reshape(-1), rows


def _add(
    sums: defaultdict[str, _Sum], t: ReaderTensor, exact: npt.NDArray[np.float32], rows: range, count: int
) -> None:
    lines = t.data.reshape(-1, t.data.shape[-1])
    each = len(lines) // count
    got = dequantize(lines[rows.start * each : rows.stop * each], t.tensor_type).reshape(-1)
    own = sums[t.name.removesuffix(".weight").rpartition(".")[2]]
    own.squares += float(np.square(got - exact).sum(dtype=np.float64))
    own.power += float(np.square(exact).sum(dtype=np.float64))
    own.types.add(t.tensor_type.name)
