"""Pack texts into token windows of one length without padding, and choose windows from several sources.

Documents are joined, each with its special tokens, and the stream is cut into windows. A window may begin inside a
document, and attention crosses documents, as in training on packed text. The choice of windows depends only on the
texts, the tokenizer, the weights and the seed.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moepack.pack.errors import InputError

from .tokenise import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OVERSAMPLE = 8  # windows read for each window taken, among which the seed chooses


@dataclass(frozen=True)
class Windows:
    """Token windows, source after source."""

    ids: Tensor  # int64 [samples, length]
    taken: tuple[int, ...]  # number of windows of each source

    @property
    def digest(self) -> str:
        """SHA-256 of the ids' bytes, which identifies the windows in a manifest."""
        return hashlib.sha256(self.ids.contiguous().numpy().tobytes()).hexdigest()


def windows(source: str, tokenizer: PreTrainedTokenizerBase, length: int, most: int) -> Tensor:
    """The first windows of a source, int64 [at most `most`, length]; a partial window is dropped."""
    return document_windows(source, tokenizer, length, most)[0]


def document_windows(source: str, tokenizer: PreTrainedTokenizerBase, length: int, most: int) -> tuple[Tensor, Tensor]:
    """The first windows of a source and each token's document number, both int64 [at most `most`, length]."""
    ids = array("q")
    owners = array("q")
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
    sources: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    samples: int,
    length: int,
    seed: int,
    weights: Sequence[float] = (),
) -> Windows:
    """Choose `samples` windows of `length` tokens from all sources in proportion to their weights, by the seed.

    A source (`documents.documents`) with too few windows gives all it has; no window is repeated. Sources take turns by
    d'Hondt's rule: of the first n windows each has at least its share, rounded down. Weights are positive.
    Raises InputError without sources, or if a source does not fill a window.
    """
    if not sources:
        raise InputError("no calibration text: name files with --calibration, or data in the recipe")
    weights = weights or [1.0] * len(sources)
    pools: list[Tensor] = []
    for source in sources:
        pool = windows(source, tokenizer, length, most=samples * _OVERSAMPLE)
        if not len(pool):
            short = f"shorter than one sample of {length} tokens"
            raise InputError(f"{source}: {short}: give more text or a shorter length")
        order = list(range(len(pool)))
        random.Random(f"{seed}/{len(pools)}").shuffle(order)
        pools.append(pool[order])
    taken = [0] * len(pools)
    for _ in range(min(samples, sum(map(len, pools)))):
        left = (i for i, pool in enumerate(pools) if taken[i] < len(pool))
        taken[min(left, key=lambda i: (taken[i] + 1) / weights[i])] += 1
    return Windows(torch.cat([pool[:count] for pool, count in zip(pools, taken, strict=True)]), tuple(taken))
