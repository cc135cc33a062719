"""A reader of GGUF files from the format's description alone, apart from moepack's writer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_FORMS = {2: "<H", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}


def whole(paths: Sequence[Path]) -> Reading:
    """The files of a split model as one: each says its number, their count and that of all tensors."""
    files = [Reading(path) for path in paths]
    for i, file in enumerate(files):
        assert (file.keys["split.no"], file.keys["split.count"]) == (i, len(files))
        assert file.keys["split.tensors.count"] == sum(len(f.names()) for f in files)
        assert (len(file.keys) == 3) == (i > 0)
    return Joined(files)


class Reading:
    """A file's keys, and its tensors as float32 arrays, columns last."""

    def __init__(self, path: Path):
        self._data, self._at = path.read_bytes(), 0
        magic, version, tensors, keys = self._take("<4sIQQ")
        assert (magic, version) == (b"GGUF", 3)
        self.keys = {self._text(): self._value(self._take("<I")[0]) for _ in range(keys)}
        self._infos = {}
        for _ in range(tensors):
            name = self._text()
            dims = self._take(f"<{self._take('<I')[0]}Q")
            self._infos[name] = (dims[::-1], *self._take("<IQ"))
        self._base = -(-self._at // 32) * 32
        ends = [offset + self._raw(name).size for name, (_, _, offset) in self._infos.items()]
        assert -(-max(ends) // 32) * 32 + self._base == len(self._data)

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return found

    def _text(self) -> str:
        (size,) = self._take("<Q")
        self._at += size
        return self._data[self._at - size : self._at].decode()

    def _value(self, kind: int):
        if kind == 8:
            return self._text()
        if kind == 9:
            item, count = self._take("<IQ")
            return [self._value(item) for _ in range(count)]
        return self._take(_FORMS[kind])[0]

    def _raw(self, name: str) -> np.ndarray:
        shape, kind, offset = self._infos[name]
        block, size = {0: (1, 4), 2: (32, 18), 8: (32, 34), 30: (1, 2), 39: (32, 17), 41: (128, 18)}[kind]
        begin = self._base + offset
        assert offset % 32 == 0
        return np.frombuffer(self._data, np.uint8, int(np.prod(shape)) // block * size, begin).reshape(-1, size)

    def names(self) -> dict[str, int]:
        """The type of each tensor."""
        return {name: kind for name, (_, kind, _) in self._infos.items()}

    def tensor(self, name: str) -> np.ndarray:
        shape, kind, _ = self._infos[name]
        raw = self._raw(name)
        if kind == 0:
            return raw.view("<f4").reshape(shape)
        if kind == 30:
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(shape)
        if kind == 8:
            return (raw[:, :2].copy().view("<f2").astype(np.float32) * raw[:, 2:].view(np.int8)).reshape(shape)
        if kind == 41:
            signs = np.unpackbits(raw[:, 2:], axis=1, bitorder="little").astype(np.float32) * 2 - 1
            return (raw[:, :2].copy().view("<f2").astype(np.float32) * signs).reshape(shape)
        codes = np.concatenate([raw[:, -16:] & 15, raw[:, -16:] >> 4], axis=1)
        if kind == 2:
            return (raw[:, :2].copy().view("<f2").astype(np.float32) * (codes.astype(np.float32) - 8)).reshape(shape)
        return (np.exp2(raw[:, :1].astype(np.float32) - 127) * E2M1[codes]).reshape(shape)


class Joined(Reading):
    """Several files as one."""

    def __init__(self, files: Sequence[Reading]):
        self.keys, self._files = files[0].keys, {name: file for file in files for name in file.names()}

    def names(self) -> dict[str, int]:
        return {name: file.names()[name] for name, file in self._files.items()}

    def tensor(self, name: str) -> np.ndarray:
        return self._files[name].tensor(name)
