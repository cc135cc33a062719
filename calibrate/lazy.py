"""A checkpoint's weights as things that are read when they are indexed: whole, decoded, or some experts of them.

What transformers' loading asks of a tensor it is handed. Nothing here knows a model.
"""

from __future__ import annotations

import contextlib
from typing import Any

from safetensors import safe_open
from torch import Tensor

from .checkpoint import Checkpoint
from .encoded import Decoded


class LazyWeights:
    """Lazy slices of a checkpoint's weights; its files stay open as long as the stack."""

    def __init__(self, checkpoint: Checkpoint, stack: contextlib.ExitStack) -> None:
        self._checkpoint, self._stack = checkpoint, stack
        self._handles: dict[str, Any] = {}

    def weight(self, name: str, part: range | None = None) -> Any:
        """What gives the weight when it is indexed: as it is stored, or decoded to BF16; `part` of its first axis."""
        pair = self._checkpoint.encoded.get(name)
        if pair is None:
            return self._slice(name, part)
        return Decoded(pair, self._slice(pair.codes, part), self._slice(pair.scales, part))

    def _slice(self, tensor: str, part: range | None) -> Any:
        file = self._checkpoint.file_of[tensor]
        if file not in self._handles:
            path = self._checkpoint.path / file
            self._handles[file] = self._stack.enter_context(safe_open(path, framework="pt"))
        whole = self._handles[file].get_slice(tensor)
        return whole if part is None else _First(whole, part)


class _First:
    """A part of a tensor's first axis, read when it is indexed."""

    def __init__(self, whole: Any, part: range) -> None:
        self._whole, self._part = whole, part

    def __getitem__(self, index: Any) -> Tensor:
        out: Tensor = self._whole[self._part.start : self._part.stop][index]
        return out
