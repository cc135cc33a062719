"""Attention of tokens that see few keys of a long cache, on a CPU: these keys are copied together and attended to.

Layers with an indexer (DeepSeek-V3.2, arXiv 2512.02556, section 2.1) choose the keys that a token sees, 2,048 in
released models. Their code scores all keys and hides the others by a mask.

The floor is one read of the rows seen: 2.4 MB of 18.9 MB for 2,048 of 16,384 latents of 512 + 64 BF16 numbers. The copy
writes them and reads them once more. It took 0.46 ms of 18.9 ms on one core of an EPYC with AVX-512 BF16 and 128 heads,
so a kernel that gathers rows itself could gain 3 %; with a mask over all rows attention took 135 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

FEW = 0.75  # of a cache's keys, which each token sees at most: with 16 heads, copying takes a fifth of attention's time

Attends = Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor]


def sees_few(seen: Tensor) -> bool:
    """Whether each token sees so few keys by a mask, bool [..., length] on the CPU, that they are copied together."""
    most = FEW * seen.shape[-1]
    return all(
        np.count_nonzero(row) <= most for row in seen.flatten(0, -2).numpy()
    )  # torch's count takes ten times as long


def over_seen(attend: Attends, asked: Sequence[Tensor], held: Sequence[Tensor], seen: Tensor) -> Tensor:
    """Return attention in which each token reads only the keys that it sees, [batch, tokens, heads, out].

    Args:
        attend: attention of one token to all of some keys, by the parts of `asked` and of `held`: [1, 1, heads, out].
        asked: parts of queries, [batch, heads, tokens, cols] each.
        held: parts of keys and values, [batch, groups, length, cols] each; the last are the values.
        seen: which keys each token sees, by group: bool [batch, groups, tokens, length]. Of none, attention is zeros.
    """
    batch, groups, tokens, _ = seen.shape
    heads = asked[0].shape[1] // groups
    made = []
    for row in range(batch):
        for token in range(tokens):
            for group in range(groups):
                of = slice(group * heads, (group + 1) * heads)
                chosen = seen[row, group, token].nonzero().squeeze(1)
                if not len(chosen):
                    made.append(asked[0].new_zeros(1, 1, heads, held[-1].shape[-1]))
                    continue
                queries = [x[row : row + 1, of, token : token + 1] for x in asked]
                keys = [x[row, group].index_select(0, chosen)[None, None] for x in held]
                made.append(attend(queries, keys))
    return torch.cat(made, dim=1).view(batch, tokens, groups * heads, -1)
