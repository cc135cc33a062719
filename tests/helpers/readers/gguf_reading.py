"""GGUF files as llama.cpp's own package reads them; a split model as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

Q1_0 = GGMLQuantizationType.Q1_0  # whose values the package does not know


def whole(paths: Sequence[Path]) -> Reading:
    """The files of a split model as one: each says its number, their count and that of all tensors."""
    files = [Reading(path) for path in paths]
    count = sum(len(file.tensors) for file in files)
    for i, file in enumerate(files):
        assert (file.keys["split.no"], file.keys["split.count"]) == (i, len(files))
        assert file.keys["split.tensors.count"] == count
        assert (len(file.keys) == 3) == (i > 0)
        files[0].tensors |= file.tensors
    return files[0]


class Reading:
    """A file's keys, and its tensors as float32 arrays, columns last."""

    def __init__(self, path: Path):
        read = GGUFReader(path)
        self.keys = {n: field.contents() for n, field in read.fields.items() if not n.startswith("GGUF.")}
        self.tensors = {t.name: t for t in read.tensors}

    def names(self) -> dict[str, int]:
        """The type of each tensor."""
        return {name: int(t.tensor_type) for name, t in self.tensors.items()}

    def tensor(self, name: str) -> np.ndarray:
        found = self.tensors[name]
        if found.tensor_type != Q1_0:
            return dequantize(found.data, found.tensor_type)
        raw = found.data.reshape(-1, 18)
        signs = np.unpackbits(raw[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
        return (raw[:, :2].copy().view("<f2").astype(np.float32) * signs).reshape(found.shape[::-1])
