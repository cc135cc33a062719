"""Kept keys and values of prompts, in chunks of CHUNK tokens, for later prompts that begin with the same tokens.

A chunk is found by the chunk before it and its own token ids, which are compared: no digest decides. Requests copy
chunks out of their rows and into them (packed_cache.py), so an eviction takes nothing from a request that runs. This
module knows neither rows nor budgets.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

CHUNK = 64  # tokens
MOST_STORED = 4096  # chunks in files at a time


def chunk_keys(prompt: Sequence[int]) -> tuple[bytes, ...]:
    """Return the token ids of each whole chunk of a prompt; a shorter rest has none."""
    return tuple(array("q", prompt[n : n + CHUNK]).tobytes() for n in range(0, len(prompt) - CHUNK + 1, CHUNK))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Chunk:
    """Keys and values of CHUNK tokens of prompts that begin alike."""

    number: int  # from 1, never used twice
    key: tuple[int, bytes]  # the number of the chunk before it, or 0, and its token ids
    layers: Sequence[tuple[Tensor, Tensor]]  # keys and values by layer, [1, heads, CHUNK, dim]
    bytes: int  # of memory; 0 for a chunk in a file


class Prefixes:
    """The kept chunks. Beyond `most` bytes the least recently used leave. One thread at a time may change them."""

    def __init__(self, most: int) -> None:
        """Start empty."""
        self.most = most
        self.bytes = 0
        self._chunk_bytes = 0  # of any chunk; known once one was added
        # The least recently used first. A chunk is used with all chunks before it and they are moved behind it, so the
        # first one of all never has a chunk that depends on it.
        self._chunks: OrderedDict[tuple[int, bytes], Chunk] = OrderedDict()
        self._numbers = itertools.count(1)
        self._stored = 0  # chunks in files

    def __len__(self) -> int:
        """Return the chunks in memory."""
        return len(self._chunks) - self._stored

    @property
    def most_chunks(self) -> int:
        """The most chunks that are kept at once; too many until the first was added, which tells their size."""
        return self.most // max(1, self._chunk_bytes)

    def find(self, keys: Sequence[bytes]) -> list[Chunk]:
        """Return the kept chunks at the beginning of a prompt with these chunk keys, and mark them as used."""
        found: list[Chunk] = []
        for key in keys:
            chunk = self._chunks.get((found[-1].number if found else 0, key))
            if chunk is None:
                break
            found.append(chunk)
        self._use(found)
        return found

    def add(self, found: list[Chunk], key: bytes, layers: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Append a copy of the next chunk to `found`, which `find` has just returned, unless there is no room for it.

        `layers` are its keys and values, [1, heads, CHUNK, dim]. Chunks of other prompts make room, never those of
        `found`.
        """
        size = sum(t.numel() * t.element_size() for pair in layers for t in pair)
        self._chunk_bytes = size
        while self.bytes + size > self.most:
            if not self.evict(found):
                return False
        try:
            copies = tuple((keys.clone(), values.clone()) for keys, values in layers)
        except (MemoryError, RuntimeError):  # without a budget, memory may be short: the request needs no copy
            return False
        self.bytes += size
        self._append(found, key, copies, size)
        return True

    def add_stored(self, found: list[Chunk], key: bytes, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Append a chunk in a file to `found`, which `find` has just returned, unless there are many."""
        if self._stored < MOST_STORED:
            self._stored += 1
            self._append(found, key, layers, 0)

    def _append(self, found: list[Chunk], key: bytes, layers: Sequence[tuple[Tensor, Tensor]], size: int) -> None:
        chunk = Chunk(next(self._numbers), (found[-1].number if found else 0, key), layers, size)
        self._chunks[chunk.key] = chunk
        found.append(chunk)
        self._use(found)

    def _drop(self, chunk: Chunk) -> None:
        del self._chunks[chunk.key]
        self.bytes -= chunk.bytes
        self._stored -= not chunk.bytes

    def evict(self, spared: Sequence[Chunk] = ()) -> bool:
        """Remove the least recently used chunk, and return whether there was one.

        Chunks that `find` has just returned are `spared`: if no others are left, none is removed.
        """
        first = next(iter(self._chunks.values()), None)
        if first is None or (spared and first is spared[-1]):
            return False
        self._drop(first)
        return True

    def forget(self, keys: Sequence[bytes]) -> None:
        """Remove the kept chunks at the beginning of a prompt with these chunk keys, and all that follow them."""
        gone = {chunk.number for chunk in self.find(keys)}
        # a chunk comes after the one before
        for chunk in sorted(self._chunks.values(), key=lambda chunk: chunk.number):
            if chunk.number in gone or chunk.key[0] in gone:
                gone.add(chunk.number)
                self._drop(chunk)

    def _use(self, found: Sequence[Chunk]) -> None:
        for chunk in reversed(found):
            self._chunks.move_to_end(chunk.key)
