"""Kept keys, values and states of prompts, in chunks of CHUNK tokens, for later prompts that begin alike.

A chunk is found by the chunk before it and its own token ids, which are compared: no digest decides. Requests copy
chunks out of their rows and into them (packed_cache.py), so an eviction takes nothing from a request that runs. This
module knows neither rows nor budgets.

States of fixed size (linear attention, Mamba, short convolutions) are large, so they are kept after some chunks alone.
They are entries of their own, used when a prompt goes on from them, so those that a conversation has left behind leave
before its keys and values, and all leave before the chunk that they follow.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

CHUNK = 64  # tokens
MOST_STORED = 4096  # chunks in files at a time
STATES = b""  # in place of token ids: the states after a chunk
Layers = Mapping[int, tuple[Tensor, ...]]  # keys and values by layer, or the tensors of a layer's states


def chunk_keys(prompt: Sequence[int]) -> tuple[bytes, ...]:
    """Return the token ids of each whole chunk of a prompt; a shorter rest has none."""
    return tuple(array("q", prompt[n : n + CHUNK]).tobytes() for n in range(0, len(prompt) - CHUNK + 1, CHUNK))


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Chunk:
    """Keys and values of CHUNK tokens of prompts that begin alike, or the states after such tokens."""

    number: int  # from 1, never used twice
    key: tuple[int, bytes]  # the number of the chunk before it, or 0, and its token ids or STATES
    layers: Layers  # keys and values are [1, heads, CHUNK, dim]
    bytes: int  # of memory; 0 for a chunk in a file


class Prefixes:
    """The kept chunks. Beyond `most` bytes the least recently used leave. One thread at a time may change them."""

    def __init__(self, most: int, chunk_bytes: int = 0, state_bytes: int = 0) -> None:
        """Start empty. The bytes of a chunk, and of the states after one, are 0 until they are known."""
        self.most = most
        self.bytes = 0
        self.chunk_bytes = chunk_bytes
        self.state_bytes = state_bytes
        # The least recently used first. A chunk is used with all chunks before it and they are moved behind it, so the
        # first one of all never has a chunk that depends on it.
        self._chunks: OrderedDict[tuple[int, bytes], Chunk] = OrderedDict()
        self._numbers = itertools.count(1)
        self._stored = 0  # entries in files
        self._states = 0  # states in memory

    def __len__(self) -> int:
        """Return the chunks in memory, without states."""
        return len(self._chunks) - self._stored - self._states

    @property
    def most_chunks(self) -> int:
        """The most chunks that are kept at once, with states after the last; too many until their size is known."""
        return (self.most - self.state_bytes) // max(1, self.chunk_bytes)

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

    def states(self, chunk: Chunk) -> Chunk | None:
        """Return the kept states after a chunk."""
        return self._chunks.get((chunk.number, STATES))

    def deepest(self, found: Sequence[Chunk]) -> int:
        """Return how many of the chunks that `find` has just returned lead to the last kept states, and use these."""
        for n in range(len(found), 0, -1):
            states = self.states(found[n - 1])
            if states is not None:
                self._chunks.move_to_end(states.key)
                self._use(found)
                return n
        return 0

    def add(self, found: list[Chunk], key: bytes, layers: Layers) -> bool:
        """Append a copy of the next chunk to `found`, which `find` has just returned, unless there is no room for it.

        `layers` are its keys and values, [1, heads, CHUNK, dim]. Chunks of other prompts make room, never those of
        `found`.
        """
        size = size_of(layers) or len(key)  # without keys and values, its token ids count
        self.chunk_bytes = size
        if not self._makes_room(found, size):
            return False
        copies = copied(layers)
        if copies is None:
            return False
        self._put(found, found, key, copies, size)
        return True

    def add_states(self, found: list[Chunk], count: int, layers: Layers) -> Chunk | None:
        """Keep the states after the first `count` chunks of `found`, as `add` does, without a copy; return them."""
        kept = self.states(found[count - 1])
        if kept is not None:
            return kept
        size = size_of(layers)
        self.state_bytes = size
        return self._put(found, found[:count], STATES, layers, size) if self._makes_room(found, size) else None

    def add_stored(self, found: list[Chunk], key: bytes, layers: Layers) -> Chunk | None:
        """Append a chunk in a file to `found`, or STATES after the last, as `add` does; MOST_STORED may be open."""
        while self._stored >= MOST_STORED:
            if not self.evict(found):
                return None
        return self._put(found, list(found) if key == STATES else found, key, layers, 0)

    def _makes_room(self, found: Sequence[Chunk], size: int) -> bool:
        if size > self.most:
            return False
        while self.bytes + size > self.most:
            if not self.evict(found):
                return False
        return True

    def _put(self, used: Sequence[Chunk], found: list[Chunk], key: bytes, layers: Layers, size: int) -> Chunk:
        """Append an entry to `found`, and mark the chunks `used`, which have it among them or stay behind it."""
        made = Chunk(next(self._numbers), (found[-1].number if found else 0, key), layers, size)
        self._chunks[made.key] = made
        self._count(made, 1)
        found.append(made)
        self._use(used)
        return made

    def _drop(self, chunk: Chunk) -> None:
        del self._chunks[chunk.key]
        self._count(chunk, -1)

    def _count(self, chunk: Chunk, one: int) -> None:
        self.bytes += one * chunk.bytes
        if not chunk.bytes:
            self._stored += one
        elif chunk.key[1] == STATES:
            self._states += one

    def evict(self, spared: Sequence[Chunk] = ()) -> bool:
        """Remove the least recently used chunk, and return whether there was one.

        What `find` and `deepest` have just used is `spared`: if no others are left, none is removed.
        """
        first = next(iter(self._chunks.values()), None)
        if first is None or any(first is one for one in spared):
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


def size_of(layers: Layers) -> int:
    """Return the bytes of all layers' tensors."""
    return sum(t.numel() * t.element_size() for held in layers.values() for t in held)


def copied(layers: Layers) -> Layers | None:
    """Copy all layers' tensors; None if memory is short, which it may be without a budget: no request needs copies."""
    try:
        return {layer: tuple(t.clone() for t in held) for layer, held in layers.items()}
    except (MemoryError, RuntimeError):
        return None
