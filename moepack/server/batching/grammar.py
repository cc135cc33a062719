"""Constrain answers to a JSON schema with llguidance, an optional library: say which tokens may come next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moepack.server.errors import ApiError, bad

PARAM = "response_format"
COMPACT: Any = {"whitespace_flexible": False}  # otherwise a weak model may write line breaks without end


class Grammars:
    """Make masks of allowed tokens for one tokenizer. Any thread may call any method."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer, self._vocabulary, self._ends = tokenizer, vocabulary, ends
        self._made: Any = None
        self._lock = threading.Lock()

    def check(self, schema: dict[str, Any]) -> Callable[[], JsonMask]:
        """Turn a JSON schema into a function that makes a sequence's mask. An invalid schema is an ApiError."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            why = "needs llguidance, which is not installed on this server: pip install 'moepack[serve]'"
            raise bad(PARAM, why, "unsupported") from None
        try:
            grammar = str(LLMatcher.grammar_from_json_schema(schema, defaults=COMPACT))
            tokenizer = self._made_tokenizer()
            problem = LLMatcher.validate_grammar(grammar, tokenizer)
        except ValueError as error:
            problem = str(error)
        if problem and not problem.startswith("WARNING"):
            raise bad(PARAM, f"this schema cannot be kept to: {problem.splitlines()[0][:300]}")
        return lambda: JsonMask(LLMatcher(tokenizer, grammar))

    def _made_tokenizer(self) -> Any:
        """Return llguidance's tokenizer. The first call makes it, in a second for a large vocabulary."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                ends = sorted(self._ends) or None
                try:
                    self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=ends)
                except ValueError as error:
                    raise bad(PARAM, f"this model's tokenizer cannot be constrained: {error}", "unsupported") from None
            return self._made


class JsonMask:
    """The tokens that a grammar allows next, for one sequence."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, vocabulary: int) -> Tensor:
        """The allowed tokens, bool [vocabulary]."""
        if self._matcher.is_error():
            raise ApiError(500, f"{PARAM}: {self._matcher.get_error()}", PARAM)
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return torch.from_numpy(np.unpackbits(words, count=vocabulary, bitorder="little").astype(bool))

    def take(self, token: int) -> None:
        """Advance by a chosen token."""
        self._matcher.consume_token(token)

    @property
    def is_done(self) -> bool:
        """Whether only a token that ends the answer may follow."""
        return bool(self._matcher.is_stopped())
