"""Linear attention by the gated delta rule on a GPU, of one new token of each sequence, in two launches.

The first convolves queries, keys and values and moves the convolution's windows on; the second moves the states on,
normalises and gates (delta.c has the arithmetic, and DeltaSizes what tensors are). Both write where a cache has windows
and states, and wait for nothing. Numbers are rounded where the models' own code rounds them.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .delta_native import ROLES, DeltaSizes, DeltaWeights, Lies, least_columns
from .routing_triton import power
from .step_triton import _rounded

CHANNELS: tl.constexpr = tl.constexpr(256)  # of a program: several for each thread, so that no two have the same one
SMALLEST: tl.constexpr = tl.constexpr(1e-6)  # added to the squared length of queries and keys
LARGEST = 128  # numbers of a head's key, and of its value


@triton.jit
def _convolve(
    query,
    key,
    value,
    windows,
    filters,
    out,
    query_row,
    query_step,
    key_row,
    key_step,
    value_row,
    value_step,
    KEYS: tl.constexpr,
    K_DIM: tl.constexpr,
    VALUES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    channels: tl.constexpr = KEYS * (2 * K_DIM + VALUES)
    here = channel < channels
    k = channel - KEYS * K_DIM
    v = k - KEYS * K_DIM
    x = tl.load(
        query + sequence * query_row + channel // K_DIM * query_step + channel % K_DIM, mask=k < 0, other=0.0
    ).to(tl.float32)
    x += tl.load(key + sequence * key_row + k // K_DIM * key_step + k % K_DIM, mask=(k >= 0) & (v < 0), other=0.0).to(
        tl.float32
    )
    x += tl.load(
        value + sequence * value_row + v // VALUES * value_step + v % VALUES, mask=here & (v >= 0), other=0.0
    ).to(tl.float32)
    window = windows + (sequence * channels + channel) * WIDTH
    weight = filters + channel * WIDTH
    total = x * tl.load(weight + WIDTH - 1, mask=here, other=0.0).to(tl.float32)
    for at in tl.static_range(WIDTH - 1):
        next_one = tl.load(window + at + 1, mask=here, other=0.0)
        total += next_one.to(tl.float32) * tl.load(weight + at, mask=here, other=0.0).to(tl.float32)
        tl.store(window + at, next_one, mask=here)
    of: tl.constexpr = out.dtype.element_ty
    tl.store(window + WIDTH - 1, x.to(of), mask=here)
    total = _rounded(total, of)
    tl.store(out + sequence * channels + channel, _rounded(total * tl.sigmoid(total), of).to(of), mask=here)


@triton.jit
def _delta(
    mixed,
    gate,
    rate,
    decay,
    logs,
    scale,
    bias,
    weight,
    states,
    out,
    gate_row,
    gate_step,
    rate_row,
    rate_step,
    decay_row,
    decay_step,
    epsilon,
    root,
    KEYS: tl.constexpr,
    SHARED: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    SIGMOID: tl.constexpr,
    LOGS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)  # of values
    of_keys = head // SHARED
    inside = head % SHARED
    heads: tl.constexpr = KEYS * SHARED
    of: tl.constexpr = out.dtype.element_ty
    r = tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    row = r < K_DIM
    column = c < V_DIM
    own = mixed + sequence * (2 * KEYS * K_DIM + heads * V_DIM)
    q = tl.load(own + of_keys * K_DIM + r, mask=row, other=0.0).to(tl.float32)
    k = tl.load(own + (KEYS + of_keys) * K_DIM + r, mask=row, other=0.0).to(tl.float32)
    v = tl.load(own + 2 * KEYS * K_DIM + head * V_DIM + c, mask=column, other=0.0).to(tl.float32)
    q = q / tl.sqrt(tl.sum(q * q, 0) + SMALLEST) * root
    k = k / tl.sqrt(tl.sum(k * k, 0) + SMALLEST)
    by = tl.load(rate + sequence * rate_row + of_keys * rate_step + inside).to(tl.float32)
    by = _rounded(tl.sigmoid(by), of)
    at = ((sequence * heads + head) * K_DIM + r)[:, None] * V_DIM + c[None, :]
    there = row[:, None] & column[None, :]
    state = tl.load(states + at, mask=there, other=0.0)
    if LOGS:
        kept = tl.exp(tl.load(logs + (sequence * heads + head) * K_DIM + r, mask=row, other=0.0))
        state = state * kept[:, None]
    else:
        x = tl.load(decay + sequence * decay_row + of_keys * decay_step + inside).to(tl.float32)
        x += tl.load(bias + head).to(tl.float32)
        x = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        state = state * tl.exp(-tl.exp(tl.load(scale + head).to(tl.float32)) * x)
    change = (v - tl.sum(state * k[:, None], 0)) * by
    state += k[:, None] * change[None, :]
    tl.store(states + at, state, mask=there)
    made = _rounded(tl.sum(state * q[:, None], 0), of)
    made = made / tl.sqrt(tl.sum(made * made, 0) / V_DIM + epsilon)
    made *= tl.load(weight + c, mask=column, other=0.0).to(tl.float32)
    z = tl.load(gate + sequence * gate_row + of_keys * gate_step + inside * V_DIM + c, mask=column, other=0.0)
    z = z.to(tl.float32)
    made *= tl.sigmoid(z) if SIGMOID else z * tl.sigmoid(z)
    tl.store(out + (sequence * heads + head) * V_DIM + c, _rounded(made, of).to(of), mask=column)


class GpuDelta:
    """A layer of linear attention on a GPU, and where its projections hold what it reads (delta_native.py)."""

    def __init__(self, sizes: DeltaSizes, places: Sequence[Lies], weights: DeltaWeights) -> None:
        """Check the weights, whose `scale` and `bias` are the parameters themselves: the logarithm of a decay is
        -exp(scale) * softplus(x + bias).

        Raises ValueError for weights that do not fit the sizes.
        """
        heads, k_dim, v_dim = sizes.state
        filters = weights.filter
        own = [t for t in (weights.scale, weights.bias) if t is not None]
        fits = filters.shape == sizes.window and weights.norm.shape == (v_dim,) and max(k_dim, v_dim) <= LARGEST
        fits = fits and all(t.is_contiguous() for t in (filters, weights.norm, *own))
        if not fits or len(own) != 2 * (len(places) == len(ROLES)) or any(t.numel() != heads for t in own):
            raise ValueError(f"weights of linear attention do not fit {sizes}")
        self.sizes = sizes
        self._places = tuple(places)
        self._weights = weights
        self._least = [least_columns(role, lies, sizes) for role, lies in zip(ROLES, places, strict=False)]

    def run(self, projections: Sequence[Tensor], windows: Tensor, states: Tensor, logs: Tensor | None) -> Tensor:
        """Return what the last product takes, [sequences, value heads * v_dim]; windows and states move on.

        Args:
            projections: [sequences, 1, cols], contiguous, of the weights' dtype.
            windows: [sequences, *sizes.window], likewise.
            states: float32 [sequences, *sizes.state], contiguous.
            logs: float32 [sequences, 1, value heads, k_dim], contiguous: decays' logarithms.

        Raises:
            ValueError: for tensors of other sizes.
        """
        sizes = self.sizes
        weights = self._weights
        heads, k_dim, v_dim = sizes.state
        sequences = len(windows)
        short = [projections[p.projection].shape[-1] < n for p, n in zip(self._places, self._least, strict=True)]
        if any(short) or (logs is None) != (len(self._places) == len(ROLES)):
            raise ValueError(f"projections do not fit {sizes}")
        parts = [projections[lies.projection].view(sequences, -1)[:, lies.first :] for lies in self._places]
        steps = [n for part, lies in zip(parts, self._places, strict=True) for n in (part.stride(0), lies.step)]
        channels = sizes.window[0]
        mixed = windows.new_empty(sequences, channels)
        _convolve[sequences, triton.cdiv(channels, CHANNELS.value)](
            *parts[:3],
            windows,
            weights.filter,
            mixed,
            *steps[:6],
            KEYS=sizes.keys,
            K_DIM=k_dim,
            VALUES=sizes.shared * v_dim,
            WIDTH=sizes.width,
            num_warps=4,
        )
        out = windows.new_empty(sequences, heads * v_dim)
        rows, columns = power(k_dim), power(v_dim)
        _delta[sequences, heads](
            mixed,
            *(*parts[3:], None)[:3],
            logs,
            weights.scale,
            weights.bias,
            weights.norm,
            states,
            out,
            *(*steps[6:], 0, 0)[:6],
            weights.epsilon,
            k_dim**-0.5,
            KEYS=sizes.keys,
            SHARED=sizes.shared,
            K_DIM=k_dim,
            V_DIM=v_dim,
            SIGMOID=weights.sigmoid,
            LOGS=logs is not None,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=min(16, max(1, rows * columns // 2048)),
        )
        return out
