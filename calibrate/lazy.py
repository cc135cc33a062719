"""A checkpoint's weights as objects that transformers reads by indexing them: whole, decoded, or some experts."""

from __future__ import annotations

import contextlib
from typing import Any

from safetensors import safe_open
from torch import Tensor

from .checkpoint import Checkpoint
from .encoded import Encoded


class LazyWeights:
    """Lazy slices of a checkpoint's weights; its files stay open as long as the stack."""

    def __init__(self, checkpoint: Checkpoint, stack: contextlib.ExitStack) -> None:
        self._checkpoint, self._stack = checkpoint, stack
        self._handles: dict[str, Any] = {}

    def weight(self, name: str, part: range | None = None) -> Any:
        """A weight that indexing reads, decoded to BF16 if it is encoded; `part` selects of its first axis."""
        pair = self._checkpoint.encoded.get(name)
        if pair is None and part is None:
            return self._slice(name)
        names = [name] if pair is None else [pair.codes, pair.scales]
        return _LazyWeight([self._slice(n) for n in names], pair, part)

    def _slice(self, tensor: str) -> Any:
        file = self._checkpoint.file_of[tensor]
        if file not in self._handles:
            path = self._checkpoint.path / file
            self._handles[file] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._handles[file].get_slice(tensor)


class _LazyWeight:
    """A part of a weight, or an encoded weight."""

    def __init__(self, slices: list[Any], pair: Encoded | None, part: range | None) -> None:
        self._slices, self._pair = slices, pair
        self._part: Any = ... if part is None else slice(part.start, part.stop)

    def __getitem__(self, index: Any) -> Tensor:
        read = [one[self._part] for one in self._slices]
        whole: Tensor = read[0] if self._pair is None else self._pair.decode(*read)
        return whole[index]
