"""State space layers on a CPU (c/mamba.c): of Mamba-2, from the one projection to the input of the last product, and
the scan of Mamba.

A decoded token reads and writes a float32 state of heads * dim * size numbers, and reads the weights of two products:
Nemotron-3-Nano's layer has 64 * 64 * 128 numbers, so 4.2 MB of state beside 77 MB of weights in BF16 or 20 MB in w4;
Granite-4-H-Small's 128 heads take 8.4 MB beside 205 MB or 54 MB. A number of the state takes three operations a token.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .affine_native import POINTER, WORD, fields, library
from .delta_native import place_sequences

WIDEST = 8  # a convolution's width


class _Mamba(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "projection live scale bias skip"),
        *fields(POINTER, "filter filter_bias weight out"),
        *fields(WORD, "sequences heads dim size groups width parts"),
        *fields(POINTER, "first windows states"),
        *((name, ctypes.c_float) for name in ("epsilon", "least", "most")),
    ]


class _Scan(ctypes.Structure):
    _fields_ = [
        *fields(POINTER, "x steps rates b c states out"),
        *fields(WORD, "sequences channels tokens size"),
    ]


library.moepack_mamba.argtypes = [POINTER, WORD]
library.moepack_scan.argtypes = [POINTER, WORD]
library.moepack_scan.restype = None


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """The sizes of a layer: `groups` of heads have an input's B and C in common."""

    heads: int
    dim: int  # of a head
    size: int  # of a state's row
    groups: int
    width: int  # of the convolution
    parts: int  # of a token's results, each normalised by itself

    @property
    def window(self) -> tuple[int, int]:
        """The shape of a sequence's last inputs of the convolution: heads' inputs, all B, all C."""
        return self.heads * self.dim + 2 * self.groups * self.size, self.width

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a sequence's state."""
        return self.heads, self.dim, self.size

    @property
    def cols(self) -> int:
        """The columns of the projection: gates, the convolution's inputs, steps."""
        return self.heads * self.dim + self.window[0] + self.heads


@dataclass(frozen=True, slots=True)
class MambaWeights:
    """What a layer has beside its linear maps."""

    filter: Tensor  # bfloat16 [channels, width]: the convolution's
    filter_bias: Tensor | None  # bfloat16 [channels]
    norm: Tensor  # bfloat16 [heads * dim]
    epsilon: float
    scale: Tensor  # float32 [heads], as `bias` and `skip`: a decay's logarithm is -scale * step
    bias: Tensor  # a step is softplus(x + bias),
    limits: tuple[float, float]  # within these where a sequence has more tokens than one
    skip: Tensor  # multiples of inputs that are added to results


class Mamba:
    """A state space layer of Mamba-2."""

    def __init__(self, sizes: MambaSizes, weights: MambaWeights) -> None:
        """Check the weights; raises ValueError if they do not fit the sizes, or the sizes the kernel."""
        channels, width = sizes.window
        inner = sizes.heads * sizes.dim
        numbers = (weights.scale, weights.bias, weights.skip)
        shapes = {(channels, width): [weights.filter], (inner,): [weights.norm], (sizes.heads,): numbers}
        if weights.filter_bias is not None:
            shapes[(channels,)] = [weights.filter_bias]
        fits = sizes.heads % sizes.groups == inner % sizes.parts == 0 and width <= WIDEST
        for shape, tensors in shapes.items():
            dtype = torch.float32 if tensors is numbers else torch.bfloat16
            fits = fits and all(t.shape == shape and t.dtype == dtype and t.is_contiguous() for t in tensors)
        if not fits:
            raise ValueError(f"weights of a state space layer do not fit {sizes}")
        self.sizes = sizes
        self._weights = weights  # kept: the call has their addresses
        self._call = _Mamba(
            scale=weights.scale.data_ptr(),
            bias=weights.bias.data_ptr(),
            skip=weights.skip.data_ptr(),
            filter=weights.filter.data_ptr(),
            filter_bias=None if weights.filter_bias is None else weights.filter_bias.data_ptr(),
            weight=weights.norm.data_ptr(),
            heads=sizes.heads,
            dim=sizes.dim,
            size=sizes.size,
            groups=sizes.groups,
            width=width,
            parts=sizes.parts,
            epsilon=weights.epsilon,
            least=weights.limits[0],
            most=weights.limits[1],
        )

    def run(
        self,
        projection: Tensor,
        first: Sequence[int],
        windows: Sequence[Tensor],
        states: Sequence[Tensor],
        live: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Return what the last product takes, bfloat16 [tokens, heads * dim]; windows and states move on.

        Args:
            projection: bfloat16 [..., sizes.cols], contiguous, of all tokens, those of a sequence one after another.
            first: the number of each sequence's first token, and the number of tokens.
            windows: bfloat16 [sequences, *sizes.window], contiguous; several tensors have their sequences in order.
            states: float32 [sequences, *sizes.state], likewise.
            live: bool [..., tokens], contiguous: false for padding.

        Raises:
            ValueError: for tensors of other sizes.
            MemoryError: when memory is short; windows and states are then as they were.
        """
        sizes = self.sizes
        tokens = first[-1]
        fits = projection.numel() == tokens * sizes.cols == tokens * projection.shape[-1]
        if not fits or projection.dtype != torch.bfloat16 or not projection.is_contiguous():
            raise ValueError(f"a projection is {projection.dtype} {tuple(projection.shape)}: it does not fit {sizes}")
        call = _Mamba.from_buffer_copy(self._call)
        call.projection = projection.data_ptr()
        if live is not None:
            if live.numel() != tokens or live.dtype != torch.bool or not live.is_contiguous():
                raise ValueError(f"padding is {live.dtype} {tuple(live.shape)} for {tokens} tokens")
            call.live = live.data_ptr()
        place_sequences(call, first, (windows, sizes.window), (states, sizes.state))
        out = projection.new_empty(tokens, sizes.heads * sizes.dim)
        call.out = out.data_ptr()
        if library.moepack_mamba(ctypes.addressof(call), threads or torch.get_num_threads()):
            raise MemoryError(f"no memory for a state space layer of {tokens} tokens")
        return out


def scan(
    x: Tensor, steps: Tensor, rates: Tensor, b: Tensor, c: Tensor, state: Tensor, threads: int | None = None
) -> Tensor:
    """Return the results of Mamba's scan, float32 [sequences, channels, tokens]; the state moves on.

    `s <- exp(step * rates) s + (step * x) b`, and a result is `s c` (Mamba, arXiv:2312.00752, algorithm 2). For Jamba's
    8,192 channels of 16 numbers, transformers' own scan of 512 tokens makes three tensors of 268 MB each.

    Args:
        x: [sequences, channels, tokens].
        steps: as `x`; not below 0.
        rates: [channels, size]; not above 0.
        b: [sequences, tokens, size].
        c: as `b`.
        state: float32 [sequences, channels, size], contiguous.
        threads: that compute; by default torch's number.

    Raises:
        ValueError: for tensors of other sizes, or a state that cannot be changed in place.
    """
    sequences, channels, tokens = x.shape
    size = rates.shape[-1]
    shapes = {
        (sequences, channels, tokens): (x, steps),
        (channels, size): (rates,),
        (sequences, tokens, size): (b, c),
        (sequences, channels, size): (state,),
    }
    fits = state.dtype == torch.float32 and state.is_contiguous()
    for shape, tensors in shapes.items():
        fits = fits and all(t.shape == shape and t.device.type == "cpu" for t in tensors)
    if not fits:
        raise ValueError(f"a scan of {tuple(x.shape)} does not fit a state of {state.dtype} {tuple(state.shape)}")
    given = [t.float().contiguous() for t in (x, steps, rates, b, c)]
    out = torch.empty_like(given[0])
    places = [t.data_ptr() for t in (*given, state, out)]
    call = _Scan(*places, sequences, channels, tokens, size)
    library.moepack_scan(ctypes.addressof(call), threads or torch.get_num_threads())
    return out
