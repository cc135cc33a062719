"""KV cache layers that append a token in place, and that may hold codes, in transformers' own cache object.

transformers' `DynamicLayer` copies all keys and values for every new token. In the 6 GB row of `benchmarks.limited` (48
layers, 640 tokens) a profile gave that 30 ms of a decoding step of 165 ms, most of it page faults of new copies. Here a
layer has memory for up to SPARE tokens more, and copies once that is full: each layer at another token, so that no
token waits for all. So do the keys of an indexer, which transformers keeps beside them and copies as well.

With `kv` below 16 bits a layer holds the coded rows of kernels/kv_rows.py in the place of keys and values, [batch,
heads, tokens, bytes], so whatever crops, reorders or copies a cache works on them as they are. Attention gets
`CodedRows`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from moepack.pack.errors import InputError

from .forms import FORMS, PLAIN, PLAIN_KV, Bits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SPARE = 16
LATENT = 8  # the least bits of latents, which all heads read
# What appends an indexer's keys [..., tokens, cols] in layers that keep such: its name, and that of the keys.
INDEXERS = {"update_indexer": "indexer_keys", "update_index": "idx_keys"}
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
    appended: tuple[str, ...] = ("keys", "values")
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

    def has_place(self) -> bool:
        """Whether `longer` copies nothing."""
        return all((room := _room_of(held)) is not None and _has_place(room, held.shape[-2]) for held in self._held())

    def longer(self) -> tuple[Tensor, Tensor]:
        """Return keys and values with a row more, which the caller writes before it sets them as the layer's."""
        return self._longer(self.keys), self._longer(self.values)

    def _appended(self, held: Tensor, new: Tensor) -> Tensor:
        made = self._longer(held)
        made.narrow(-2, held.shape[-2], 1).copy_(new)
        return made

    def _longer(self, held: Tensor) -> Tensor:
        n = held.shape[-2]
        room = _room_of(held)
        with _claiming:
            claimed = room is not None and _has_place(room, n)
            if room is not None and claimed:
                room.filled = n + 1
        if room is None or not claimed:
            room = _Room(held.new_empty((*held.shape[:-2], self._capacity(n + 1), held.shape[-1])), n + 1)
            room.tensor.narrow(-2, 0, n).copy_(held)
        made: Any = room.tensor.narrow(-2, 0, n + 1)
        made.moepack_room = room
        return made  # type: ignore[no-any-return]

    def _capacity(self, tokens: int) -> int:
        """The tokens for which a layer that must hold so many takes memory; no more than the workload if that does."""
        taken = tokens + (self.number - tokens) % self.spare
        return min(taken, self.most) if tokens <= self.most else taken

    def grows(self) -> int:
        """The bytes that one more token adds to the layer's memory."""
        out = 0
        for held in self._held():
            n = held.shape[-2]
            room = _room_of(held)
            if room is None or not _has_place(room, n):
                token = held.numel() // n * held.element_size()
                out += self._capacity(n + 1) * token - held.untyped_storage().nbytes()
        return max(0, out)

    @property
    def token_bytes(self) -> int:
        """The bytes of a token's keys and values."""
        return sum(t.numel() // t.shape[-2] * t.element_size() for t in self._held())

    def _held(self) -> list[Tensor]:
        if not self.get_seq_length():
            return []
        return [held for name in self.appended if (held := getattr(self, name)) is not None]


Appendable = GrowingLayer | DynamicSlidingWindowLayer


def takes_token(layer: object) -> TypeGuard[Appendable]:
    """Whether `with_room` and `keep` know a cache's layer: keys and values of all tokens, or of a window."""
    return type(layer) is GrowingLayer or (type(layer) is DynamicSlidingWindowLayer and not layer.record_past)


def with_room(layer: Appendable) -> tuple[Tensor, Tensor]:
    """Return a layer's keys and values with a row more, which the caller writes before it hands them to `keep`."""
    if isinstance(layer, GrowingLayer):
        return layer.longer()
    return _copied(layer.keys), _copied(layer.values)


def _copied(held: Tensor | None) -> Tensor:
    assert held is not None
    batch, heads, tokens, cols = held.shape
    made = held.new_empty(batch, heads, tokens + 1, cols)
    made.narrow(2, 0, tokens).copy_(held)
    return made


def keep(layer: Appendable, keys: Tensor, values: Tensor) -> None:
    """Set what a layer holds after a token of each sequence, as its `update` does."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length += 1
        keys = keys[:, :, -layer.sliding_window + 1 :]
        values = values[:, :, -layer.sliding_window + 1 :]
    layer.keys = keys
    layer.values = values


@functools.cache
def _growing(kind: type[DynamicLayer]) -> type[GrowingLayer] | None:
    """Return the class of layers that append in place what those of `kind` copy; None for a kind of other layers.

    A copied or pickled layer is of class `kind`.
    """
    if kind is DynamicLayer:
        return GrowingLayer
    name = next((name for name in INDEXERS if hasattr(kind, name)), None)
    if name is None or getattr(kind, "update", None) is not DynamicLayer.update:
        return None
    held = INDEXERS[name]
    own = getattr(kind, name)

    def append(self: GrowingLayer, new: Tensor) -> Tensor:
        keys = getattr(self, held, None)
        if keys is None or torch.compiler.is_compiling() or not _is_next(keys, new):
            made: Tensor = own(self, new)
            return made
        setattr(self, held, self._appended(keys, new))
        all_keys: Tensor = getattr(self, held)
        return all_keys

    def reduce(self: GrowingLayer, protocol: object) -> tuple[object, ...]:
        return kind, (), self.__dict__

    parts = {name: append, "appended": (*GrowingLayer.appended, held), "__reduce_ex__": reduce}
    return type(f"Growing{kind.__name__}", (GrowingLayer, kind), {**parts, "_layer_type": None})  # not for new caches


def coded(new: Tensor, bits: int) -> Tensor:
    """Return what a cache keeps of new keys or values."""
    if bits == PLAIN:
        return new
    from moepack.runtime.kernels import kv_rows  # which loads the compiled kernels

    return kv_rows.coded(new, bits)


def as_given(held: Tensor, new: Tensor, bits: int) -> Tensor:
    """Return all keys or values that a cache keeps, as a tensor like the `new` ones."""
    if bits == PLAIN:
        return held
    from moepack.runtime.kernels.kv_rows import CodedRows

    return CodedRows(held, new.shape[-1], bits, new.dtype)


class CodedKvLayer(GrowingLayer):
    """A `GrowingLayer` that holds coded rows of keys and values."""

    bits: Bits = (PLAIN, PLAIN)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, [batch, heads, tokens, cols] each; return all of them as `CodedRows`."""
        new = key_states, value_states
        if torch.is_grad_enabled() and any(t.requires_grad for t in new):
            raise InputError("a cache with codes of 8 or 4 bits passes no gradients on: give use_cache=False, or kv=16")
        keys, values = map(coded, new, self.bits)
        held = super().update(keys, values, *args, **kwargs)
        all_keys, all_values = map(as_given, held, new, self.bits)
        return all_keys, all_values


def layer_bits(model: PreTrainedModel, kv: str, compiled: bool = True) -> tuple[Bits, ...]:
    """Return the bits of each layer of a model's cache, of which `kv` names the form; empty for 16.

    Layers with a window or a state of fixed size stay as they are: they do not grow. `compiled` says whether moepack's
    compiled kernels serve the model.

    Raises:
        InputError: for a model without a layer that can be kept so, and without these kernels.
    """
    wanted = FORMS[kv]
    if kv == PLAIN_KV:
        return ()
    if not compiled:
        raise InputError(f"kv={kv}: a cache is coded on a CPU with moepack's compiled kernels: leave kv out here")
    latents = {getattr(m, "layer_idx", None) for m in model.modules() if hasattr(type(m), "expand_kv")}
    made: list[Bits] = []
    for number, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is not DynamicLayer:
            made.append((PLAIN, PLAIN))
        elif number in latents:
            made.append((max(LATENT, wanted[0]), max(LATENT, wanted[1])))
        else:
            made.append(wanted)
    if all(bits == (PLAIN, PLAIN) for bits in made) or not any(map(_makes_plain_caches, model.modules())):
        raise InputError(f"no layer of {type(model).__name__} has a cache that is kept in {kv} bits: leave kv out")
    return tuple(made)


def forms_of(model: PreTrainedModel, compiled: bool) -> list[str]:
    """Return the forms of cache that a model can have, the most precise first, each with other bits."""
    found: dict[tuple[Bits, ...], str] = {}
    for form in FORMS:
        with contextlib.suppress(InputError):
            found.setdefault(layer_bits(model, form, compiled), form)
    return list(found.values())


def _makes_plain_caches(module: nn.Module) -> bool:
    """Whether a module's own code makes a `DynamicCache` where it is given none."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and DynamicCache.__name__ in code.co_names


def new_cache(model: PreTrainedModel, bits: Sequence[Bits]) -> DynamicCache:
    """Return an empty cache whose layers have these bits."""
    cache = DynamicCache(config=model.config)
    grow_in_place(cache, 0, bits)
    return cache


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


def grow_in_place(cache: object, most: int, bits: Sequence[Bits] = ()) -> None:
    """Let a cache's plain growing layers on a CPU append in place, in these bits by layer.

    `most` is the workload's number of tokens.

    Raises:
        InputError: if a layer that is to have codes holds keys as they are, or is of another kind.
    """
    layers = getattr(cache, "layers", [])
    while len(layers) < len(bits) and getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        layers.append(DynamicLayer())  # which the cache would do when the layer is reached
    for number, layer in enumerate(layers):
        kind: Any = type(layer)
        coded = number < len(bits) and bits[number] != (PLAIN, PLAIN)
        if coded:
            if kind is not CodedKvLayer and (kind is not DynamicLayer or layer.get_seq_length()):
                raise InputError(
                    f"a {type(cache).__name__} whose layer {number} is a {kind.__name__} cannot be kept in "
                    f"{bits[number][0]} bits: give an empty DynamicCache(config=model.config), or load with kv=16"
                )
            layer.__class__ = CodedKvLayer
            vars(layer).update(number=number, most=most, bits=bits[number])
        elif (growing := _growing(kind)) is None or layer.keys is None or layer.keys.device.type != "cpu":
            continue
        elif getattr(layer, "indexer_position_ids", None) is None:
            layer.__class__ = growing
            vars(layer).update(number=number, most=most)


def growth(cache: object, spare: int = SPARE) -> tuple[int, int, bool]:
    """Measure what one more token adds to a cache's layers that append in place.

    From now on these take memory for at most `spare` tokens ahead.

    Returns:
        The bytes added, the bytes of the token in these layers, and whether the cache has no other layers.
    """
    layers: list[Any] = getattr(cache, "layers", [])
    growing = [layer for layer in layers if isinstance(layer, GrowingLayer)]
    for layer in growing:
        layer.spare = spare
    added = sum(layer.grows() for layer in growing)
    token = sum(layer.token_bytes for layer in growing)
    return added, token, bool(growing) and len(growing) == len(layers)
