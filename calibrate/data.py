"""Text to token windows of one length: local files or a Hub data set, packed without padding.

Everything goes through `datasets`. Documents are tokenised one by one and joined with the end-of-text token; the
stream is cut into windows. Which windows are taken depends only on the texts, the tokenizer and the seed.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import InputError, MissingExtraError
from moepack.pack.hub_name import on_hub

_LOADERS = {".txt": "text", ".md": "text", ".jsonl": "json", ".json": "json", ".parquet": "parquet"}
_OVERSAMPLE = 8  # windows looked at for every window taken, so that a seed chooses among much of a large source


@dataclass(frozen=True)
class Windows:
    """Token windows, int64 [samples, length], and the SHA-256 of their bytes."""

    ids: Tensor

    @property
    def digest(self) -> str:
        """Names these windows in a manifest."""
        return hashlib.sha256(self.ids.contiguous().numpy().tobytes()).hexdigest()


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model directory."""
    from transformers import AutoTokenizer

    # Without these transformers makes up an empty tokenizer of the right class, to which all text is unknown.
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{path}: has no tokenizer: put tokenizer.json there")
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: no tokenizer that transformers can load: {str(error).splitlines()[0]}") from None


def check_source(source: str) -> None:
    """See that a source is there, before anything is done with it.

    Raises:
        InputError: when it is neither a file nor a data set that can be had.
    """
    name = source.partition(":")[0]
    if Path(source).suffix in _LOADERS:
        if not Path(source).is_file():
            raise InputError(f"{source}: no such file")
    elif not Path(name).exists():
        on_hub(name, "README.md", instead="no such file", kind="dataset")


Document = str | list[dict[str, Any]]  # a text, or a chat's messages


def documents(source: str) -> Iterator[Document]:
    """The documents of a source, in order.

    Args:
        source: a .txt, .md, .jsonl, .json or .parquet file (rows need a column "text", or "messages" as chats have
            them), or a Hub data set as NAME[:CONFIG[:SPLIT[:COLUMN]]] ("train" and "text" where they are not named).
    """
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("datasets", "build") from None
    path = Path(source)
    local, column = path.suffix in _LOADERS, "text"
    check_source(source)
    try:
        if local:
            kind = _LOADERS[path.suffix]
            # A text file is one document: its line breaks are part of the text.
            options = {"sample_by": "document", "keep_linebreaks": True} if kind == "text" else {}
            data = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, **options)
        else:
            name, config, split, wanted = (*source.split(":"), "", "", "")[:4]
            column = wanted or column
            data = datasets.load_dataset(name, config or None, split=split or "train", streaming=True)
        for row in data:
            if isinstance(row.get(column), str):
                yield row[column]
            elif column == "text" and isinstance(row.get("messages"), list):
                yield row["messages"]
            else:
                raise InputError(f"{source}: rows have no {column!r} of text; they have {', '.join(sorted(row))}")
    except InputError:
        raise
    except Exception as error:  # the library raises its own, pyarrow's, the Hub's and the operating system's
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        hint = "" if local else " (not a .txt, .jsonl, .json or .parquet file, so taken for a Hub data set)"
        raise InputError(f"{source}: cannot be read{hint}: {what}") from None


def token_stream(source: str, tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of each document, each followed by the end-of-text token where the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    for document in documents(source):
        if document:
            text = document if isinstance(document, str) else chat_text(document, tokenizer, source)
            yield [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], *end]


def chat_text(messages: list[dict[str, Any]], tokenizer: Any, source: str) -> str:
    """A chat as the model's template writes it.

    Raises:
        InputError: without a template, or where it does not take these messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{source}: holds chats, and this model's tokenizer has no chat template")
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # whatever a template raises
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"{source}: the chat template does not take a chat: {what}") from None


def windows(source: str, tokenizer: Any, length: int, most: int) -> Tensor:
    """The first `most` windows of a source, int64 [at most `most`, length]; what is left over is dropped."""
    return document_windows(source, tokenizer, length, most)[0]


def document_windows(source: str, tokenizer: Any, length: int, most: int) -> tuple[Tensor, Tensor]:
    """The same, and the number of the document that each token is of, both int64 [at most `most`, length]."""
    ids: list[int] = []
    owners: list[int] = []
    for number, document in enumerate(token_stream(source, tokenizer)):
        ids += document
        owners += [number] * len(document)
        if len(ids) >= most * length:
            break
    end = min(most, len(ids) // length) * length
    made, of = (torch.tensor(row[:end], dtype=torch.int64).reshape(-1, length) for row in (ids, owners))
    return made, of


def calibration_windows(sources: Sequence[str], tokenizer: Any, samples: int, length: int, seed: int) -> Windows:
    """`samples` windows of `length` tokens, as evenly from all sources as they allow, chosen by the seed.

    Sources that hold fewer windows than asked for give what they hold; none is repeated.

    Raises:
        InputError: when there is no source, or one does not fill a single window.
    """
    if not sources:
        raise InputError("no calibration text: name files with --calibration, or data in the recipe")
    pools: list[Tensor] = []
    for source in sources:
        pool = windows(source, tokenizer, length, most=samples * _OVERSAMPLE)
        if not len(pool):
            raise InputError(
                f"{source}: shorter than one sample of {length} tokens: give more text or a shorter length"
            )
        order = list(range(len(pool)))
        random.Random(f"{seed}/{len(pools)}").shuffle(order)
        pools.append(pool[order])
    taken = [0] * len(pools)
    while sum(taken) < samples and any(t < len(p) for t, p in zip(taken, pools, strict=True)):
        for i, pool in enumerate(pools):
            if taken[i] < len(pool) and sum(taken) < samples:
                taken[i] += 1
    return Windows(torch.cat([pool[:n] for n, pool in zip(taken, pools, strict=True)]))
