"""Linear attention by the gated delta rule on a CPU (c/delta.c), from projections to the input of the last product."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .affine_native import POINTER, WORD, fields, library

ROLES = ("query", "key", "value", "gate", "rate", "decay")


class _Part(ctypes.Structure):
    _fields_ = [("at", POINTER), ("row", WORD), ("step", WORD)]


class _Delta(ctypes.Structure):
    _fields_ = [
        ("parts", _Part * len(ROLES)),
        *fields(POINTER, "logs scale bias filter weight out"),
        *fields(WORD, "sequences keys shared k_dim v_dim width sigmoid"),
        *fields(POINTER, "first windows states"),
        ("epsilon", ctypes.c_float),
    ]


library.moepack_delta.argtypes = [POINTER, WORD]


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """The sizes of a layer: each head of keys has `shared` heads of values."""

    keys: int
    shared: int
    k_dim: int
    v_dim: int
    width: int  # of the convolution

    @property
    def window(self) -> tuple[int, int]:
        """The shape of a sequence's last inputs of the convolution: those of all queries, all keys, all values."""
        return self.keys * (2 * self.k_dim + self.shared * self.v_dim), self.width

    @property
    def state(self) -> tuple[int, int, int]:
        """The shape of a sequence's state."""
        return self.keys * self.shared, self.k_dim, self.v_dim


@dataclass(frozen=True, slots=True)
class Lies:
    """Where projections hold one role's numbers: those of a token's head `h` of keys begin at `first + h * step`."""

    projection: int
    first: int
    step: int


@dataclass(frozen=True, slots=True)
class DeltaWeights:
    """What a layer has beside its linear maps."""

    filter: Tensor  # bfloat16 [channels, width]: the convolution's
    norm: Tensor  # bfloat16 [v_dim]
    epsilon: float
    sigmoid: bool  # of the gate; else silu
    scale: Tensor | None = (
        None  # float32 [value heads]; with `bias`, a decay's logarithm is -scale * softplus(x + bias)
    )
    bias: Tensor | None = None


class DeltaRule:
    """A layer of linear attention, and where its projections hold what it reads."""

    def __init__(self, sizes: DeltaSizes, places: Sequence[Lies], weights: DeltaWeights) -> None:
        """Check the weights. `places` are those of ROLES, without the last where decays are given by logarithms.

        Raises ValueError for weights that do not fit the sizes.
        """
        heads, _, v_dim = sizes.state
        filters = weights.filter
        fits = filters.shape == sizes.window and weights.norm.shape == (v_dim,)
        fits = fits and filters.device.type == "cpu"
        fits = fits and all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in (filters, weights.norm))
        for t in (weights.scale, weights.bias):
            fits = fits and (t is not None) == (len(places) == len(ROLES))
            fits = fits and (t is None or (t.shape == (heads,) and t.dtype == torch.float32 and t.is_contiguous()))
        if not fits:
            raise ValueError(f"weights of linear attention do not fit {sizes}")
        self.sizes = sizes
        self._places = tuple(places)
        self._weights = weights  # kept: the call has their addresses
        self._ends = [least_columns(role, lies, sizes) for role, lies in zip(ROLES, places, strict=False)]
        self._call = _Delta(
            scale=None if weights.scale is None else weights.scale.data_ptr(),
            bias=None if weights.bias is None else weights.bias.data_ptr(),
            filter=filters.data_ptr(),
            weight=weights.norm.data_ptr(),
            keys=sizes.keys,
            shared=sizes.shared,
            k_dim=sizes.k_dim,
            v_dim=v_dim,
            width=sizes.width,
            sigmoid=weights.sigmoid,
            epsilon=weights.epsilon,
        )

    def run(
        self,
        projections: Sequence[Tensor],
        first: Sequence[int],
        windows: Sequence[Tensor],
        states: Sequence[Tensor],
        logs: Tensor | None = None,
        threads: int | None = None,
    ) -> Tensor:
        """Return what the last product takes, bfloat16 [tokens, value heads * v_dim]; windows and states move on.

        Args:
            projections: bfloat16 [..., cols], contiguous, of all tokens, those of a sequence one after another.
            first: the number of each sequence's first token, and the number of tokens.
            windows: bfloat16 [sequences, *sizes.window], contiguous; several tensors have their sequences in order.
            states: float32 [sequences, *sizes.state], likewise.
            logs: float32 [..., value heads, k_dim], contiguous: decays' logarithms, which are at most 0.

        Raises:
            ValueError: for tensors of other sizes.
            MemoryError: when memory is short; windows and states are then as they were.
        """
        call, out = self.prepared(projections, first, windows, states, logs)
        if library.moepack_delta(ctypes.addressof(call), threads or torch.get_num_threads()):
            raise MemoryError(f"no memory for linear attention of {first[-1]} tokens")
        return out

    def prepared(
        self,
        projections: Sequence[Tensor],
        first: Sequence[int],
        windows: Sequence[Tensor],
        states: Sequence[Tensor],
        logs: Tensor | None = None,
    ) -> tuple[_Delta, Tensor]:
        """Return the call that `run` makes, and where its result will be; the arguments must outlive the call."""
        sizes = self.sizes
        tokens = first[-1]
        heads, k_dim, v_dim = sizes.state
        call = _Delta.from_buffer_copy(self._call)
        for part, lies, end in zip(call.parts, self._places, self._ends, strict=False):
            x = projections[lies.projection]
            cols = x.shape[-1]
            if x.dtype != torch.bfloat16 or x.numel() != tokens * cols or cols < end or not x.is_contiguous():
                raise ValueError(f"a projection is {x.dtype} {tuple(x.shape)}: it does not fit {sizes}")
            part.at = x.data_ptr() + 2 * lies.first
            part.row = cols
            part.step = lies.step
        if logs is not None:
            if logs.dtype != torch.float32 or logs.numel() != tokens * heads * k_dim or not logs.is_contiguous():
                raise ValueError(f"decays are {logs.dtype} {tuple(logs.shape)}: they do not fit {sizes}")
            call.logs = logs.data_ptr()
        if (logs is None) != (len(self._places) == len(ROLES)):
            raise ValueError("decays are given as logarithms where a layer has none of its own")
        place_sequences(call, first, (windows, sizes.window), (states, sizes.state))
        out = projections[0].new_empty(tokens, heads * v_dim)
        call.out = out.data_ptr()
        return call, out


def least_columns(role: str, lies: Lies, sizes: DeltaSizes) -> int:
    """Return the least columns of a projection that holds a role's numbers there."""
    many = {"query": sizes.k_dim, "key": sizes.k_dim, "value": sizes.shared * sizes.v_dim}
    many["gate"] = many["value"]
    return lies.first + (sizes.keys - 1) * lies.step + many.get(role, sizes.shared)


Kept = tuple[Sequence[Tensor], tuple[int, ...]]  # tensors [sequences, ...], and the shape of what one sequence has


def place_sequences(call: Any, first: Sequence[int], windows: Kept, states: Kept) -> None:
    """Set a call's sequences, which the call keeps alive. Raises ValueError for tensors of other sizes."""
    window_at = _addresses(*windows, torch.bfloat16)
    state_at = _addresses(*states, torch.float32)
    count = len(first) - 1
    if len(window_at) != count or len(state_at) != count:
        raise ValueError(f"{len(window_at)} windows and {len(state_at)} states for {count} sequences")
    firsts = (WORD * (count + 1))(*first)
    call.sequences = count
    call.first = ctypes.addressof(firsts)
    call.windows = ctypes.addressof(window_at)
    call.states = ctypes.addressof(state_at)
    call.kept = firsts, window_at, state_at


def _addresses(tensors: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> ctypes.Array[ctypes.c_void_p]:
    """The address of each sequence's part of tensors [sequences, *shape]; raises ValueError for other tensors."""
    found = []
    for t in tensors:
        if t.shape[1:] != shape or t.dtype != dtype or not t.is_contiguous() or t.device.type != "cpu":
            raise ValueError(f"a state is {t.dtype} {tuple(t.shape)}: {dtype} {shape} is kept for a sequence")
        at = t.data_ptr()
        each = t.stride(0) * t.element_size()
        found += [at + i * each for i in range(len(t))]
    return (POINTER * len(found))(*found)
