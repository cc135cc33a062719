"""KV cache layers that append a token in place, in transformers' own cache object.

transformers' `DynamicLayer` copies all keys and values for every new token. In the 6 GB row of `benchmarks.limited` (48
layers, 640 tokens) a profile gave that 30 ms of a decoding step of 165 ms, most of it page faults of new copies. Here a
layer has memory for up to SPARE tokens more, and copies once that is full: each layer at another token, so that no
token waits for all.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

SPARE = 16
_claiming = threading.Lock()  # copies of a layer may append in several threads


class _Room:
    """Memory with more tokens than it holds. Copied layers share it: the first of them that appends goes on in it.

    It is an attribute of the tensor of all tokens in it, and dies with that: whatever replaces a layer's tensors
    (another order of beams, a longer pass) frees it.
    """

    def __init__(self, tensor: Tensor, filled: int) -> None:
        # [..., capacity, cols], and how many tokens have been written
        self.tensor = tensor
        self.filled = filled


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` with the same keys and values, which may be parts of larger tensors."""

    # its place among the cache's layers; the tokens that the workload was loaded for
    number = 0
    most = 0
    spare = SPARE  # the most tokens for which it takes memory ahead; 1 takes none
    keys: Any
    values: Any

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, [batch, heads, tokens, cols] each; return all of them."""
        plain = torch.compiler.is_compiling() or not self.get_seq_length()
        if plain or not (_is_next(self.keys, key_states) and _is_next(self.values, value_states)):
            made: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return made
        self.keys, self.values = self._appended(self.keys, key_states), self._appended(self.values, value_states)
        return self.keys, self.values

    def _appended(self, held: Tensor, new: Tensor) -> Tensor:
        n = held.shape[-2]
        room = _room_of(held)
        with _claiming:
            claimed = room is not None and _has_place(room, n)
            if room is not None and claimed:
                room.filled = n + 1
        if room is None or not claimed:
            room = _Room(new.new_empty((*new.shape[:-2], self._capacity(n + 1), new.shape[-1])), n + 1)
            room.tensor.narrow(-2, 0, n).copy_(held)
        room.tensor.narrow(-2, n, 1).copy_(new)
        made: Any = room.tensor.narrow(-2, 0, n + 1)
        made.moepack_room = room
        return made  # type: ignore[no-any-return]

    def _capacity(self, tokens: int) -> int:
        """The tokens for which a layer that must hold so many takes memory; no more than the workload if that does."""
        taken = tokens + (self.number - tokens) % self.spare
        return min(taken, self.most) if tokens <= self.most else taken

    def grows(self) -> int:
        """The bytes that one more token adds to the layer's memory."""
        if not self.get_seq_length():
            return 0
        out = 0
        for held in (self.keys, self.values):
            n = held.shape[-2]
            room = _room_of(held)
            if room is None or not _has_place(room, n):
                token = held.numel() // n * held.element_size()
                out += self._capacity(n + 1) * token - held.untyped_storage().nbytes()
        return max(0, out)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values."""
        held = (self.keys, self.values) if self.get_seq_length() else ()
        return sum(t.numel() // t.shape[-2] * t.element_size() for t in held)


def _is_next(held: Tensor, new: Tensor) -> bool:
    """Whether `new` is one token that goes behind `held` as it is, without gradients; others are transformers' own."""
    alike = new.shape[-2] == 1 and new.shape[:-2] == held.shape[:-2] and new.shape[-1] == held.shape[-1]
    tracked = torch.is_grad_enabled() and (new.requires_grad or held.requires_grad)
    return alike and new.dtype == held.dtype and new.device == held.device and not tracked


def _room_of(held: Tensor) -> _Room | None:
    return getattr(held, "moepack_room", None)


def _has_place(room: _Room, tokens: int) -> bool:
    """Whether the room holds just so many tokens, has place for one more, and may be written."""
    place = room.filled == tokens < room.tensor.shape[-2]
    return place and (not room.tensor.is_inference() or torch.is_inference_mode_enabled())


def grow_in_place(cache: object, most: int) -> None:
    """Let a cache's plain growing layers on a CPU append in place; `most` is the workload's number of tokens."""
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.keys.device.type == "cpu":
            layer.__class__ = GrowingLayer
            vars(layer).update(number=number, most=most)


def growth(cache: object, spare: int = SPARE) -> tuple[int, int, bool]:
    """Measure what one more token adds to a cache's layers that append in place.

    From now on these take memory for at most `spare` tokens ahead.

    Returns:
        The bytes added, the bytes of the token in these layers, and whether the cache has no other layers.
    """
    layers: list[Any] = getattr(cache, "layers", [])
    growing = [layer for layer in layers if type(layer) is GrowingLayer]
    for layer in growing:
        layer.spare = spare
    added = sum(layer.grows() for layer in growing)
    token = sum(layer.token_bytes for layer in growing)
    return added, token, bool(growing) and len(growing) == len(layers)
