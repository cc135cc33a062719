"""Answers that are JSON, by llguidance: which tokens may come next. Without that library none is promised."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.server.errors import ApiError, bad

PARAM = "response_format"
COMPACT: Any = {"whitespace_flexible": False}  # a weak model would else go on with line breaks for ever


class Grammars:
    """Makes masks for a tokenizer. Every method may be called from any thread."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._made: Any = None
        self._lock = threading.Lock()

    def check(self, schema: dict[str, Any]) -> str:
        """A JSON schema as a grammar.

        Raises:
            ApiError: for a schema that is none, or where the library is not there.
        """
        try:
            from llguidance import LLMatcher
        except ImportError:
            why = "needs llguidance, which is not installed on this server: pip install 'moepack[serve]'"
            raise bad(PARAM, why, "unsupported") from None
        try:
            grammar = str(LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT))
            problem = LLMatcher.validate_grammar(grammar, self._made_tokenizer())
        except ValueError as error:
            problem = str(error)
        if problem and not problem.startswith("WARNING"):
            raise bad(PARAM, f"this schema cannot be kept to: {problem.splitlines()[0][:300]}")
        return grammar

    def _made_tokenizer(self) -> Any:
        """About a second for a large vocabulary, once."""
        with self._lock:
            if self._made is None:
                try:
                    from llguidance.hf import from_tokenizer

                    self._made = from_tokenizer(
                        self._tokenizer, n_vocab=self._vocabulary, eos_token=sorted(self._ends) or None
                    )
                except ValueError as error:
                    raise bad(PARAM, f"this model's tokenizer cannot be constrained: {error}", "unsupported") from None
            return self._made

    def mask(self, grammar: str) -> JsonMask:
        """What a sequence that keeps to it may say."""
        return JsonMask(self._made_tokenizer(), grammar)


class JsonMask:
    """One sequence's way through a grammar."""

    def __init__(self, tokenizer: Any, grammar: str) -> None:
        from llguidance import LLMatcher

        self._matcher = LLMatcher(tokenizer, grammar)

    def allowed(self, vocabulary: int) -> Tensor:
        """Bool [vocabulary]."""
        if self._matcher.is_error():
            raise ApiError(500, f"{PARAM}: {self._matcher.get_error()}", PARAM)
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        bits = np.unpackbits(words, bitorder="little")[:vocabulary]
        out = torch.zeros(vocabulary, dtype=torch.bool)
        out[: len(bits)] = torch.from_numpy(bits.astype(bool))
        return out

    def take(self, token: int) -> None:
        """This token was chosen."""
        self._matcher.consume_token(token)

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end may follow."""
        return bool(self._matcher.is_stopped())
