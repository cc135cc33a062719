"""The sequence of a forward pass: the batch behind one KV cache, from its first pass until the cache dies.

A new or emptied cache begins a sequence. A pass without a cache is a sequence by itself. A pass reads a prompt, or a
chunk of one, if the cache is empty or the pass adds several tokens to each sequence. The next pass of one token begins
decoding, which lasts until another prompt (a later turn). Two kinds of pass with several tokens count as decoding too.
A pass of up to GUESSES tokens, with logits for all of them, verifies guesses (prompt lookup, a draft model:
transformers' `_assisted_decoding`). In a pass of two tokens, a draft model reads tokens that were accepted. A
`PackedCache` names the sequences of a pass, each with a cache of its own. Caches are tracked by weak references, whose
callbacks take no lock.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moepack.families.arguments import cache_of, caches_in, inputs
from moepack.runtime.kv.static import cached_tokens, emptied
from moepack.runtime.step.context import NO_PROMPT, PackedCache, Prompt, joined

from .followed import Followed

GUESSES = 64  # tokens: more than any number of guesses, fewer than a prompt's chunk has when all are scored


@dataclass(slots=True)
class _Sequence:
    number: int
    decoding: bool = False


class Sequences:
    """The sequences of one model. Every method may be called from any thread."""

    def __init__(self) -> None:
        self._followed: Followed[_Sequence] = Followed()
        self._over: list[int] = []
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def reading(self, given: dict[str, object]) -> Iterator[tuple[Prompt, Callable[[object], None]]]:
        """Context manager for one forward pass. Yields its `Prompt` and a callback for the output."""
        ids = inputs(given)
        cache = cache_of(given)
        if ids is None:
            yield NO_PROMPT, lambda out: None
            return
        if isinstance(cache, PackedCache):
            of = [self._begin(own, 1, n, known or n > 1)[0] for own, n, known in cache.sequences()]
            yield joined(of), lambda out: None
            return
        made: list[object] = []
        batch, tokens = map(int, ids.shape[:2])
        kept = given.get("logits_to_keep")
        guesses = tokens == 2 or (isinstance(kept, int) and kept == tokens <= GUESSES)
        prompt, mine = self._begin(cache, batch, tokens, tokens > 1 and not guesses)
        try:
            yield prompt, lambda out: made.extend(caches_in(out))
        finally:
            with self._lock:
                self._bury()  # a cache that died meanwhile may have had the new cache's address
                if cache is None and not (made and self._followed.follow(made[0], mine)):
                    self._over.append(mine.number)

    def _begin(self, cache: object, batch: int, tokens: int, reads: bool) -> tuple[Prompt, _Sequence]:
        """Begin a pass; return its prompt and sequence. `reads`: it reads a prompt even if its cache is not empty."""
        with self._lock:
            self._bury()
            mine = self._followed.of(cache)
        held = cached_tokens(cache) if hasattr(cache, "get_seq_length") else None
        noted = not held and emptied(cache)
        empty = not held if held is not None else noted or mine is None
        with self._lock:
            if begins := mine is None or empty:
                if mine is not None:  # emptied, to be used again
                    self._over.append(mine.number)
                mine = _Sequence(next(self._numbers))
                if cache is not None and not self._followed.follow(cache, mine):  # it ends with the pass
                    self._over.append(mine.number)
            assert mine is not None
            reads = reads or empty
            decodes = not reads and not mine.decoding
            mine.decoding = not reads
            whole = batch * tokens
            return Prompt(mine.number, whole if reads else 0, begins, decodes, reads and tokens > 1, whole), mine

    def _bury(self) -> None:
        self._over += [mine.number for mine in self._followed.bury()]

    def over(self) -> list[int]:
        """Return the numbers of the sequences that have ended since the last call."""
        with self._lock:
            self._bury()
            ended = self._over
            self._over = []
            return ended
