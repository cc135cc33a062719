"""Constrain answers to JSON or to calls with llguidance, an optional library: say which tokens may come next."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from moepack.server.errors import ApiError, bad
from moepack.server.tools.lark import STYLE
from moepack.server.tools.parts import Functions

from .schema_limits import FUEL, check_schemas

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Lark = Callable[[dict[str, object]], str | None]


class Grammars:
    """Make masks of allowed tokens for one tokenizer. Any thread may call any method."""

    def __init__(self, tokenizer: Any, vocabulary: int, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._ends = ends
        self._made: LLTokenizer | None = None
        self._lock = threading.Lock()

    def of_schema(
        self, schema: dict[str, object], lark: Lark = lambda schema: None, param: str = "response_format"
    ) -> Callable[[], JsonMask]:
        """Turn a JSON schema into a function that makes a sequence's mask. An invalid schema is an ApiError.

        Args:
            schema: the schema, which the field `param` of the request has.
            lark: writes the grammar of an answer with more than JSON, such as reasoning before it; None if there is
                none.
            param: the name that an error has.
        """
        check_schemas(param, [schema])
        if (whole := lark(schema)) is not None:
            return self._check(param, lambda kind: kind.grammar_from_lark(whole))
        return self._check(param, lambda kind: kind.grammar_from_json_schema({**schema, "x-guidance": STYLE}))

    def of_calls(
        self,
        functions: Functions,
        lark: Callable[[], str],
        schema: dict[str, Any] | None = None,
        param: str = "response_format",
    ) -> Callable[[], JsonMask]:
        """Turn a grammar of calls of some functions into such a function. An invalid schema of one is an ApiError.

        The grammar may also allow an answer by `schema`, which the field `param` of the request has.
        """
        others = [] if schema is None else [schema]
        check_schemas(param, others)
        check_schemas("tools", [*functions.values(), *others])
        try:
            return self._check("tools", lambda kind: kind.grammar_from_lark(lark()))
        except ApiError:
            if schema is not None:
                self.of_schema(schema, param=param)  # whose error names the answer's schema, if that is at fault
            raise

    def _check(self, param: str, made: Callable[[type[LLMatcher]], str]) -> Callable[[], JsonMask]:
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            why = "needs llguidance, which is not installed on this server. Run: pip install 'moepack[serve]'"
            raise bad(param, why, "unsupported") from None
        tokenizer = self._made_tokenizer(param)
        try:
            first = LLMatcher(tokenizer, str(made(LLMatcher)), limits=LLParserLimits(**FUEL), log_level=0)
            first.compute_bitmask()  # the slowest mask, and whether the limits do: not on the scheduler's thread
            problem = first.get_error()
        except ValueError as error:
            problem = str(error)
        if problem:
            raise _unkept(param, problem)
        return lambda: JsonMask(first.deep_copy(), param)

    def _made_tokenizer(self, param: str) -> LLTokenizer:
        """Return llguidance's tokenizer. The first call makes it, in a second for a large vocabulary."""
        from llguidance.hf import from_tokenizer

        with self._lock:
            if self._made is None:
                ends = sorted(self._ends) or None
                try:
                    self._made = from_tokenizer(self._tokenizer, n_vocab=self._vocabulary, eos_token=ends)
                except ValueError as error:
                    raise bad(param, f"this model's tokenizer cannot be constrained: {error}", "unsupported") from None
            return self._made


def _unkept(param: str, why: str) -> ApiError:
    return bad(param, f"this schema cannot be kept to: {' '.join(why.split())[:300]}")


class JsonMask:
    """The tokens that a grammar allows next, for one sequence."""

    def __init__(self, matcher: LLMatcher, param: str) -> None:
        self._matcher = matcher
        self._param = param

    def allowed(self, vocabulary: int) -> Tensor:
        """The allowed tokens, bool [vocabulary]."""
        words = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        return torch.from_numpy(np.unpackbits(words, count=vocabulary, bitorder="little").astype(bool))

    def take(self, token: int) -> None:
        """Advance by a chosen token."""
        self._matcher.consume_token(token)

    @property
    def is_done(self) -> bool:
        """Whether only a token that ends the answer may follow."""
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        """Raise where a limit stopped the grammar: llguidance then allows the end, and half an answer looked whole."""
        if self._matcher.is_error():
            raise _unkept(self._param, self._matcher.get_error())
