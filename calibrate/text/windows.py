"""Text to token windows of one length, packed without padding, and which windows are taken of several sources.

Documents stand one behind the other, each with what the tokenizer begins it with (a BOS, where it adds one) and the
end-of-text token; that stream is cut into windows wherever they end. So a window may begin inside a document, and a
model that attends to its whole window sees the end of one before the next, as in training on packed text. Which windows
are taken depends only on the texts, the tokenizer, the weights and the seed.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import InputError, in_a_line

from .tokenise import Encoder

_OVERSAMPLE = 8  # windows looked at for every window taken, so that a seed chooses among much of a large source


@dataclass(frozen=True)
class Windows:
    """Token windows, source after source.

    Attributes:
        ids: int64 [samples, length].
        taken: windows of each source.
        turns: int64 [samples]: the how many-th each was to be taken.
    """

    ids: Tensor
    taken: tuple[int, ...]
    turns: Tensor

    @property
    def digest(self) -> str:
        """SHA-256 of the ids' bytes: names these windows in a manifest."""
        return hashlib.sha256(self.ids.contiguous().numpy().tobytes()).hexdigest()

    def first(self, count: int) -> Windows:
        """Those that were taken first: the same mixture, of fewer windows."""
        kept = self.turns < count
        sizes = [int(part.sum()) for part in kept.split(self.taken)]
        return Windows(self.ids[kept], tuple(sizes), self.turns[kept])


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tiktoken.model")


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a model's directory, or on the Hub.

    Raises:
        InputError: where there is none, or transformers does not take it.
    """
    from transformers import AutoTokenizer

    # Without these transformers makes up an empty tokenizer of the right class, to which all text is unknown.
    if path.is_dir() and not any((path / name).is_file() for name in _TOKENIZER_FILES):
        raise InputError(f"{path}: has no tokenizer: put tokenizer.json there")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
        tokenizer("a")  # some of its settings are first looked at here
    except Exception as error:  # its files are somebody else's, and what they make transformers raise is anything
        raise InputError(f"{path}: no tokenizer that transformers can load: {in_a_line(error)}") from None
    return tokenizer


def windows(source: str, tokenizer: Any, length: int, most: int) -> Tensor:
    """The first `most` windows of a source, int64 [at most `most`, length]; what is left over is dropped."""
    return document_windows(source, tokenizer, length, most)[0]


def document_windows(source: str, tokenizer: Any, length: int, most: int) -> tuple[Tensor, Tensor]:
    """The same, and the number of the document that each token is of, both int64 [at most `most`, length]."""
    ids, owners = array("q"), array("q")
    for number, part in Encoder(tokenizer).stream(source):
        ids.extend(part)
        owners.extend([number] * len(part))
        if len(ids) >= most * length:
            break
    count = min(most, len(ids) // length)
    if not count:
        return torch.empty(0, length, dtype=torch.int64), torch.empty(0, length, dtype=torch.int64)
    made, of = (torch.frombuffer(row, dtype=torch.int64, count=count * length) for row in (ids, owners))
    return made.view(count, length), of.view(count, length)


def calibration_windows(
    sources: Sequence[str], tokenizer: Any, samples: int, length: int, seed: int, weights: Sequence[float] = ()
) -> Windows:
    """`samples` windows of `length` tokens from all sources in proportion to their weights, chosen by the seed.

    Sources that hold fewer windows than asked for give what they hold; none is repeated.

    Args:
        sources: as `documents.documents` takes them.
        tokenizer: the model's.
        samples, length, seed: of the windows.
        weights: positive, one a source; all alike without. Sources take turns by d'Hondt's rule: of the first n windows
            each has the whole windows of its share at the least.

    Raises:
        InputError: when there is no source, or one does not fill a single window.
    """
    if not sources:
        raise InputError("no calibration text: name files with --calibration, or data in the recipe")
    weights = weights or [1.0] * len(sources)
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
    turns: list[list[int]] = [[] for _ in pools]
    for turn in range(min(samples, sum(map(len, pools)))):
        left = (i for i, pool in enumerate(pools) if len(turns[i]) < len(pool))
        turns[min(left, key=lambda i: (len(turns[i]) + 1) / weights[i])].append(turn)
    return Windows(
        torch.cat([pool[: len(own)] for own, pool in zip(turns, pools, strict=True)]),
        tuple(map(len, turns)),
        torch.tensor([turn for own in turns for turn in own]),
    )
