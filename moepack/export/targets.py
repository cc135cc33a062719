"""What a target of an export is, and which there are: a file here with TARGET, and a line in TARGETS.

A target says what it can hold, what that takes in bytes, and writes it. Which versions are written is chosen in
choice.py, for all targets alike.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

from moepack.pack.errors import InputError, MissingExtraError
from moepack.pack.spec import DenseMatrix, Version
from moepack.runtime.policies.contract import Versions
from moepack.shared.progress import Reporter

if TYPE_CHECKING:
    from moepack.pack.reader import Bundle

    from .files import ExportDirectory
    from .layout import Layout
    from .report import Lost

MIXED = "its down has other bits than the matrix before it: build with --recipe exportable"
SCALES = ("bf16", "fp32")  # dtypes of scales, for a target that has the choice


@dataclass(frozen=True)
class ExportJob:
    """An export's input: a bundle, and the version of each of its experts and dense matrices."""

    bundle: Bundle
    scales: str  # one of SCALES
    shard: int  # the most bytes of a file's tensors, but for one tensor that is larger
    dense: tuple[Version, ...]  # of each matrix in `manifest.dense`
    experts: Versions = field(default=())  # names, [layers][experts]

    @cached_property
    def layout(self) -> Layout:
        """Return the places of the bundle's tensors in the model's own checkpoints."""
        from .layout import Layout

        return Layout(self.bundle)

    @cached_property
    def used(self) -> tuple[Version, ...]:
        """The versions that experts are exported from, from the most to the least precise."""
        names = {name for row in self.experts for name in row}
        return tuple(v for v in self.bundle.versions if v.name in names)

    def version(self, position: int, expert: int) -> Version:
        """The version of one expert."""
        return self.bundle.manifest.version(self.experts[position][expert])

    def dense_pairs(self) -> Iterator[tuple[DenseMatrix, Version]]:
        """Each dense matrix that has versions, and the one it is exported from."""
        yield from zip(self.bundle.manifest.dense, self.dense, strict=True)


@dataclass(frozen=True)
class Target(ABC):
    """A form in which another program reads a model."""

    libraries: ClassVar[tuple[str, ...]] = ()  # packages beside transformers whose version changes the bytes
    name: str
    mixes: bool  # whether experts of one layer may have different versions
    takes_scales: bool = False  # whether its scales have one of the dtypes in SCALES

    def refusal(self, bundle: Bundle, version: Version, dense: bool = False) -> str | None:
        """Return why this version cannot be exported, or None if it can."""
        return None

    @abstractmethod
    def check_model(self, job: ExportJob) -> None:
        """Raise InputError for a model that this target holds in no version. Comes first, and reads no weight."""

    @abstractmethod
    def exact(self, job: ExportJob) -> bool:
        """Whether the format's own library reads every value bit for bit."""

    @abstractmethod
    def layer_bytes(self, job: ExportJob, position: int, version: Version) -> int:
        """Bytes of the experts of the layer at `position`, all in one version."""

    @abstractmethod
    def other_bytes(self, job: ExportJob) -> int:
        """Bytes of everything outside the experts. Raises InputError, by name, for what this target cannot hold."""

    def notes(self, job: ExportJob) -> tuple[str, ...]:
        """Return notes for the user about the programs that read the export."""
        return ()

    def expert_bytes(self, job: ExportJob) -> int:
        """Bytes of the experts at the job's versions."""
        total = 0
        for position, row in enumerate(job.experts):
            sizes = {name: self.layer_bytes(job, position, job.bundle.manifest.version(name)) for name in set(row)}
            total += sum(sizes[name] for name in row) // len(row)
        return total

    @abstractmethod
    def file_bytes(self, job: ExportJob) -> int:
        """Bytes of the files that `write` writes, headers included."""

    @abstractmethod
    def write(self, job: ExportJob, work: ExportDirectory, reporter: Reporter) -> list[str]:
        """Write the model into a working directory, ready to load; returns the names of the files with weights.

        Files that are whole there are left alone. Raises BundleError for a damaged bundle.
        """

    def lost(self, job: ExportJob, paths: list[Path], reporter: Reporter) -> Lost | None:
        """Return the rounding error of the written files relative to their versions, or None if nothing was rounded."""
        return None


TARGETS = {
    "checkpoint": "plain",
    "compressed-tensors": "compressed",
    "gptq": "gptq",
    "gguf": "gguf",
}  # name -> the module here with its TARGET


def target_of(name: str, lossy: str | None = None) -> Target:
    """The target of this name. Raises InputError, which lists the known names, for an unknown name.

    `lossy` names the mix of llama.cpp's types that `gguf` is quantised to.
    """
    if name not in TARGETS:
        raise InputError(f"--to {name}: there are {', '.join(TARGETS)}")
    if lossy is not None:
        if name != "gguf":
            raise InputError(f"--to {name} --lossy {lossy}: only --to gguf has such mixes")
        quantised: Target = _module("gguf.lossy").target(lossy)
        return quantised
    found: Target = _module(TARGETS[name]).TARGET
    return found


def _module(name: str) -> ModuleType:
    """A module of this package. Raises MissingExtraError where it needs the gguf package, and that is not installed."""
    try:
        return importlib.import_module(f".{name}", __package__)
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        raise MissingExtraError("gguf", "gguf") from None
