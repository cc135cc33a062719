"""Products of many tokens by torch on a CPU, some rows of the weights at a time: for processors without BF16 tiles.

Without BF16 instructions torch emulates BF16 products, several times slower than float32 (docs/design/build.md) and in
memory that no budget counts. In that case both factors are converted to float32, and sums are rounded once. So are
factors of a dtype to which no kernel unpacks weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from moepack.pack.isa import emulated
from moepack.pack.spec import align

ROWS = 256  # rows of weights at a time: 1 MiB of BF16 at 2,048 columns, half a core's second-level cache
TOKENS = 512  # tokens at a time; the weights are unpacked again for the next ones

FLOATS = (torch.float32, torch.bfloat16)  # to which kernels unpack weights

Weights = Callable[[int, int, torch.dtype], Tensor]


def multiply(x: Tensor, weights: Weights, out: Tensor, bias: Tensor | None = None) -> None:
    """Write W x + b into out [tokens, rows], for x [tokens, cols] and bias [rows].

    `out` has x's dtype. `weights(first, last, dtype)` returns rows `first` to `last` of W as [cols, last - first].
    """
    rows = out.shape[1]
    dtype = torch.float32 if x.dtype not in FLOATS or emulated(x.device, x.dtype) else x.dtype
    with torch.autocast("cpu", enabled=False):  # autocast would convert both sides back
        for start in range(0, len(x), TOKENS):
            few = x[start : start + TOKENS].to(dtype)
            for first in range(0, rows, ROWS):
                last = min(first + ROWS, rows)
                made = torch.mm(few, weights(first, last, dtype))
                if bias is not None:
                    made += bias[first:last]
                out[start : start + TOKENS, first:last] = made
                del made  # frees its memory before the next product
            del few


def of_matrix(weight: Tensor) -> Weights:
    """Return the `weights` function of `multiply` for a matrix [rows, cols]."""
    return lambda first, last, dtype: weight[first:last].to(dtype).T


def of_packed(cols: int, unpack: Callable[[Tensor, int], None]) -> Weights:
    """Return `weights` of a packed matrix; `unpack(tile, first)` fills a [cols, rows] tile from row `first`."""

    tile = torch.empty(0)

    def rows(first: int, last: int, dtype: torch.dtype) -> Tensor:
        nonlocal tile
        wide = align(last - first, 16)
        if tile.dtype != dtype or tile.shape != (cols, wide):  # else in the same memory: new pages cost a tenth
            tile = torch.empty(cols, wide, dtype=dtype)
        unpack(tile, first)
        return tile[:, : last - first]

    return rows


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return W x + b for x [..., cols] and W [rows, cols], as `torch.nn.functional.linear` does."""
    out = x.new_empty(*x.shape[:-1], len(weight))
    multiply(x.reshape(-1, x.shape[-1]), of_matrix(weight), out.view(-1, len(weight)), bias)
    return out


def attend_by_groups(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """Attention by torch, of the heads that share keys at a time; with AVX2, the bits are those of all heads together.

    For all together torch copies keys and values for every head, and packs them once more: 1 GiB at 32,768 tokens of 32
    heads of 128 numbers.

    Args:
        query: [batch, heads, tokens, cols].
        key: [batch, groups, length, cols]; each group serves heads / groups heads that follow one another.
        value: [batch, groups, length, out].
        mask: [batch, heads or 1, tokens, length], bool (True: the key is seen) or numbers to add to scores.

    Returns:
        [batch, heads, tokens, out].
    """
    shared = query.shape[1] // key.shape[1]
    made = []
    # Rows that are coded are opened by `split`, and not again for each group.
    for group, held in enumerate(zip(key.split(1, dim=1), value.split(1, dim=1), strict=True)):
        heads = slice(group * shared, (group + 1) * shared)
        keys, values = (t.expand(-1, shared, -1, -1) for t in held)
        seen = mask if mask.shape[1] == 1 else mask[:, heads]
        made.append(scaled_dot_product_attention(query[:, heads], keys, values, attn_mask=seen, scale=scale))
    return torch.cat(made, dim=1)


def bytes_beside(tokens: int, cols: int) -> int:
    """Return the most bytes that `multiply` allocates: converted tokens, weights and a product, but not x and out."""
    some = min(tokens, TOKENS)
    return 4 * (some * cols + ROWS * (cols + some))
