"""The server's tokenizer: text to tokens and back, and single tokens as clients see them."""

from __future__ import annotations

import functools
import re
import threading
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError, printable
from moepack.server.errors import bad

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedTokenizerBase

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def end_tokens(generation_config: GenerationConfig | None) -> list[int]:
    """The tokens at which a model's generation_config.json ends an answer.

    Raises:
        InputError: if `eos_token_id` is neither a token id nor a list of token ids.
    """
    named = getattr(generation_config, "eos_token_id", None)
    if named is None:
        return []
    ids: list[int] = named if isinstance(named, list) else [named]
    if any(type(i) is not int or not 0 <= i < 1 << 31 for i in ids):
        shown = printable(repr(named)[:60])
        raise InputError(f"generation_config.json: eos_token_id must be a token or a list of tokens: {shown}")
    return ids


class Tokens:
    """A tokenizer that any thread may use.

    Attributes:
        tokenizer: transformers' own.
        ends: tokens that end an answer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> None:
        self.tokenizer: Any = tokenizer
        own = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
        self.ends = frozenset([*end_tokens(generation_config), *own])
        self._lock = threading.Lock()  # a fast tokenizer changes its settings while it encodes
        self._fast = getattr(tokenizer, "backend_tokenizer", None)
        self._plain = self._fast is not None and not getattr(tokenizer, "clean_up_tokenization_spaces", False)
        self._bytes = self._fast is not None and "ByteLevel" in repr(self._fast.decoder)

    def encode(self, text: str, special: bool, param: str) -> list[int]:
        """Encode text; `special` adds the tokens that begin or end a text."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise bad(param, "not a text: it holds half of a surrogate pair") from None
        with self._lock:
            return list(self.tokenizer(text, add_special_tokens=special).input_ids)

    def decode(self, tokens: list[int], special: bool = False) -> str:
        """Decode tokens, with or without special ones."""
        if self._plain:
            return str(self._fast.decode(tokens, skip_special_tokens=not special))  # type: ignore[union-attr]
        return str(self.tokenizer.decode(tokens, skip_special_tokens=not special))

    def raw(self, token: int) -> bytes:
        """The bytes of one token, special or not; empty for a token without text."""
        name = self.tokenizer.convert_ids_to_tokens(token)
        if name is None:
            return b""
        if token in self.tokenizer.all_special_ids or token in self.tokenizer.added_tokens_decoder:
            return str(name).encode()
        if self._bytes:
            return bytes(_byte_of().get(c, 63) for c in name)
        if found := _BYTE.fullmatch(name):
            return bytes.fromhex(found[1])
        return str(name).replace("\u2581", " ").encode()

    def shown(self, token: int) -> str:
        """One token as text, or as its bytes if they are not valid UTF-8."""
        raw = self.raw(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{b:02x}" for b in raw)


@functools.cache
def _byte_of() -> dict[str, int]:
    """Map each letter of a byte-level vocabulary (GPT-2) to its byte; printable bytes stand for themselves."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + n): b for n, b in enumerate(others)}
