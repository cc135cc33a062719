"""KV cache layers that append a token in place, in transformers' own cache object.

transformers' `DynamicLayer` copies all keys and values for every new token. At 48 layers of 4 heads and 640 tokens that
took 30 ms of a decoding step of 165 ms, most of it in page faults of the new copies. Here a layer has memory for up to
SPARE tokens more, and copies once that is full: each layer at another token, so that no token waits for all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

SPARE = 16


class _Room:
    """Memory with more tokens than it holds. A copied layer shares it: the first of them that appends goes on in it."""

    def __init__(self, tensor: Tensor, filled: int) -> None:
        self.tensor, self.filled = tensor, filled  # [..., capacity, cols], and how many tokens have been written


class GrowingLayer(DynamicLayer):
    """A `DynamicLayer` with the same keys and values, which may be parts of larger tensors."""

    number, most = 0, 0  # its place among the cache's layers; the tokens that the workload was loaded for
    spare = SPARE  # the most tokens for which it takes memory ahead; 1 takes none
    keys: Any
    values: Any
    _keys_room: _Room | None = None
    _values_room: _Room | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, [batch, heads, tokens, cols] each; return all of them."""
        plain = torch.compiler.is_compiling() or (torch.is_grad_enabled() and key_states.requires_grad)
        if plain or not self.get_seq_length() or key_states.shape[-2] != 1:
            made: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return made
        self.keys, self._keys_room = self._appended(self.keys, key_states, self._keys_room)
        self.values, self._values_room = self._appended(self.values, value_states, self._values_room)
        return self.keys, self.values

    def _appended(self, held: Tensor, new: Tensor, room: _Room | None) -> tuple[Tensor, _Room]:
        n = held.shape[-2]
        if room is None or not self._goes_on(held, new, room):
            shape = (*new.shape[:-2], self._capacity(n + 1), new.shape[-1])
            room = _Room(new.new_empty(shape), n)
            room.tensor.narrow(-2, 0, n).copy_(held)
        room.tensor.narrow(-2, n, 1).copy_(new)
        room.filled = n + 1
        return room.tensor.narrow(-2, 0, n + 1), room

    def _goes_on(self, held: Tensor, new: Tensor, room: _Room) -> bool:
        """Whether the room holds just what the layer holds, has place for a token, and may be written."""
        whole = room.tensor
        alike = held.data_ptr() == whole.data_ptr() and held.stride() == whole.stride() and new.dtype == whole.dtype
        place = room.filled == held.shape[-2] < whole.shape[-2] and held.shape[:-2] == whole.shape[:-2]
        return alike and place and (not whole.is_inference() or torch.is_inference_mode_enabled())

    def _capacity(self, tokens: int) -> int:
        """The tokens for which a layer that must hold so many takes memory; no more than the workload if that does."""
        taken = tokens + (self.number - tokens) % self.spare
        return min(taken, self.most) if tokens <= self.most else taken

    def grows(self) -> int:
        """The bytes that one more token adds to the layer's memory."""
        if not self.get_seq_length():
            return 0
        out = 0
        for held, room in ((self.keys, self._keys_room), (self.values, self._values_room)):
            if room is None or not self._goes_on(held, held, room):
                rows = self._capacity(held.shape[-2] + 1) - (held if room is None else room.tensor).shape[-2]
                out += rows * held.numel() // held.shape[-2] * held.element_size()
        return max(0, out)


def grow_in_place(cache: Any, most: int) -> None:
    """Let a cache's plain growing layers on a CPU append in place; `most` is the workload's number of tokens."""
    for number, layer in enumerate(getattr(cache, "layers", ())):
        if type(layer) is DynamicLayer and layer.keys is not None and layer.keys.device.type == "cpu":
            layer.__class__ = GrowingLayer
            vars(layer).update(number=number, most=most)


def growth(cache: Any, spare: int = SPARE) -> int | None:
    """The bytes that one more token adds to a cache; None for a cache with other layers.

    From now on its layers take memory for at most `spare` tokens ahead.
    """
    layers: list[Any] = getattr(cache, "layers", [])
    if not layers or any(type(layer) is not GrowingLayer for layer in layers):
        return None
    for layer in layers:
        layer.spare = spare
    return sum(int(layer.grows()) for layer in layers)
