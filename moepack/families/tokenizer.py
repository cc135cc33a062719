"""A model's tokenizer, which builds, commands and the server load in the same way."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.hub_errors import reason
from moepack.pack.hub_name import on_hub

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model's directory or Hub id.

    Raises InputError without a tokenizer, or if transformers cannot load it.
    """
    from transformers import AutoTokenizer

    # Without these files transformers makes an empty tokenizer, to which all text is unknown.
    if path.is_dir():
        there = any((path / name).is_file() for name in FILES)
    else:
        there = on_hub(str(path), *FILES, instead="") is not None
    if not there:
        raise InputError(f"{path}: has no tokenizer: put tokenizer.json there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer("a")  # this reads further settings, and may fail
    except Exception as error:  # transformers may raise anything on such files
        raise InputError(f"{path}: no tokenizer that transformers can load: {reason(error)}") from None
    return tokenizer
