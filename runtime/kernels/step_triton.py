"""What a decode step does between its products on a GPU: normalisations, and queries, keys and values of one token.

Each is one launch that waits for nothing, with what changes from step to step (the place in a static cache) read on the
device. Numbers are rounded where torch's own operations round them.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend_triton import SEQUENCES, _row
from .forms import Norm
from .routing_triton import power

FORMS = ("rounded", "wide", "added")  # the kernels' names for a `Norm`'s form


@triton.jit
def _rounded(value, OF: tl.constexpr):
    """Return float32 numbers rounded to a dtype. BF16 by its bits, because Triton's interpreter would cut them."""
    if OF == tl.bfloat16:  # noqa: SIM300
        bits = value.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return tl.where(value == value, bits.to(tl.float32, bitcast=True), value)
    return value.to(OF).to(tl.float32)


@triton.jit
def _weighed(value, weight, FORM: tl.constexpr, OF: tl.constexpr):
    """Return normalised numbers times their weights, float32."""
    if FORM == "rounded":
        return _rounded(_rounded(value, OF) * weight, OF)
    if FORM == "wide":
        return _rounded(value * weight, OF)
    return _rounded(value * (weight + 1.0), OF)


@triton.jit
def _norm(x, weight, out, cols, epsilon, FORM: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    here = column < cols
    value = tl.load(x + row * cols + column, mask=here, other=0.0).to(tl.float32)
    value = value * (1.0 / tl.sqrt(tl.sum(value * value, 0) / cols + epsilon))
    w = tl.load(weight + column, mask=here, other=0.0).to(tl.float32)
    value = _weighed(value, w, FORM, out.dtype.element_ty)
    tl.store(out + row * cols + column, value.to(out.dtype.element_ty), mask=here)


def norm(x: Tensor, weight: Tensor, form: int, epsilon: float) -> Tensor:
    """Normalise rows [..., cols] by their root mean square, times `weight` [cols] in a `Norm`'s form, in one launch.

    `x` and `weight` are contiguous and of one dtype, which the result has, too.
    """
    out = torch.empty_like(x)
    cols = x.shape[-1]
    columns = power(cols)
    _norm[(x.numel() // cols,)](
        x, weight, out, cols, epsilon, FORM=FORMS[form], COLUMNS=columns, num_warps=min(8, max(1, columns // 512))
    )
    return out


@triton.jit(do_not_specialize=["most"])
def _rotate(
    x,
    cos,
    sin,
    q_weight,
    k_weight,
    place,
    query,
    key,
    value,
    most,
    q_epsilon,
    k_epsilon,
    Q_FORM: tl.constexpr,
    K_FORM: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DIM: tl.constexpr,
    TURNED: tl.constexpr,
    ANGLES: tl.constexpr,
    PLACED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    of: tl.constexpr = query.dtype.element_ty
    d = tl.arange(0, COLUMNS)
    here = d < DIM
    half = TURNED // 2
    other = tl.where(d < half, d + half, tl.where(d < TURNED, d - half, d))
    row = x + (token * (QUERIES + 2 * KEYS) + head) * DIM
    mine = tl.load(row + d, mask=here, other=0.0).to(tl.float32)
    at = token * 0
    if ROWS:
        of_keys = _row(place, token, of)
        of_values = _row(place + SEQUENCES, token, of)
        at += tl.load(place + 2 * SEQUENCES + token) - 1
        room = tl.load(place + 3 * SEQUENCES + token)
        begins = 0
    else:
        of_keys = key
        of_values = value
        room = most
        begins = token * KEYS
        if PLACED:
            at = tl.load(place).to(tl.int64)
    if head < QUERIES + KEYS:
        partner = tl.load(row + other, mask=here, other=0.0).to(tl.float32)
        total = tl.sum(mine * mine, 0) / DIM
        if head < QUERIES:
            if Q_FORM != "":
                scale = 1.0 / tl.sqrt(total + q_epsilon)
                mine = _weighed(mine * scale, tl.load(q_weight + d, mask=here, other=0.0).to(tl.float32), Q_FORM, of)
                w = tl.load(q_weight + other, mask=here, other=0.0).to(tl.float32)
                partner = _weighed(partner * scale, w, Q_FORM, of)
        else:
            if K_FORM != "":
                scale = 1.0 / tl.sqrt(total + k_epsilon)
                mine = _weighed(mine * scale, tl.load(k_weight + d, mask=here, other=0.0).to(tl.float32), K_FORM, of)
                w = tl.load(k_weight + other, mask=here, other=0.0).to(tl.float32)
                partner = _weighed(partner * scale, w, K_FORM, of)
        c = tl.load(cos + token * ANGLES + d % ANGLES, mask=d < TURNED, other=1.0).to(tl.float32)
        s = tl.load(sin + token * ANGLES + d % ANGLES, mask=d < TURNED, other=0.0).to(tl.float32)
        turned = tl.where(d < half, -partner, partner)
        mine = tl.where(d < TURNED, _rounded(_rounded(mine * c, of) + _rounded(turned * s, of), of), mine)
    fits = here & (at + d < room + d)  # numbers of one shape, as Triton's interpreter wants them
    if head < QUERIES:
        tl.store(query + (token * QUERIES + head) * DIM + d, mine.to(of), mask=here)
    else:
        if head < QUERIES + KEYS:
            to = ((begins + head - QUERIES) * room + at) * DIM
            tl.store(of_keys + to + d, mine.to(of), mask=fits)
        else:
            to = ((begins + head - QUERIES - KEYS) * room + at) * DIM
            tl.store(of_values + to + d, mine.to(of), mask=fits)


def rotate(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: tuple[int, int],
    norms: tuple[Norm | None, Norm | None],
    shared: bool = False,
    place: tuple[Tensor, Tensor, Tensor] | Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise and rotate the heads of one token of each sequence, in one launch.

    Args:
        x: [batch, (queries + 2 keys) x dim], contiguous: the projections' results side by side.
        cos: [batch, angles], and so `sin`; a head's first numbers turn, as many as there are angles, each of their
            first half with one of the second.
        heads: how many heads queries, and keys and values, have.
        norms: of every head of queries, and of keys.
        shared: whether both of a pair turn by one angle, so that twice as many turn as there are angles.
        place: a static cache's keys and values, [batch, heads, tokens, dim], contiguous, and the token at which to
            write, an integer on the device; one past the cache writes nothing. Or a layer's table of sequences' own
            memory (attend_triton.py).

    Returns:
        Queries [batch, heads, 1, dim]; keys and values of that shape, or the cache's; for a table, the table.
    """
    queries, keys = heads
    batch = len(x)
    dim = x.shape[-1] // (queries + 2 * keys)
    query = x.new_empty(batch, queries, 1, dim)
    if place is None:
        key = x.new_empty(batch, keys, 1, dim)
        value = x.new_empty(batch, keys, 1, dim)
        at = None
    elif isinstance(place, Tensor):
        key = place
        value = place
        at = place
    else:
        key, value, at = place
    (q, q_form, q_epsilon), (k, k_form, k_epsilon) = (
        (None, "", 0.0) if n is None else (n.weight, FORMS[n.form], n.epsilon) for n in norms
    )
    in_rows = isinstance(place, Tensor)
    _rotate[batch, queries + 2 * keys](
        x,
        cos,
        sin,
        q,
        k,
        at,
        query,
        key,
        value,
        0 if in_rows else key.shape[2],
        q_epsilon,
        k_epsilon,
        Q_FORM=q_form,
        K_FORM=k_form,
        QUERIES=queries,
        KEYS=keys,
        DIM=dim,
        TURNED=cos.shape[-1] * (1 + shared),
        ANGLES=cos.shape[-1],
        PLACED=at is not None,
        ROWS=in_rows,
        COLUMNS=power(dim),
        num_warps=1,
    )
    return query, key, value
