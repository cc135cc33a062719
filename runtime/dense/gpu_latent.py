"""Attention of latent layers over the latents themselves on a GPU: of one new token of each sequence (latent.py).

Queries are lifted by each head's part of the map, two launches attend to the cache where it is, and the values' part of
the map is applied to the sums. A packed map is unpacked for both. More tokens attend to expanded latents.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moepack.families.arguments import CACHE_NAMES
from moepack.runtime.kernels import latent_triton
from moepack.runtime.kernels.attend_triton import FIELDS, SEQUENCES
from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.forms import compiled

from .borrowed import Attention
from .gpu_modules import FLOATS
from .latent import LatentMap, Latents, in_place_of_latents, replace_latents
from .linears import FamilyModule, in_place_of
from .packed import PackedLinear
from .values import near

LENGTH = "_moepack_length"  # what a static cache's latents are given: how many tokens they hold, on the device


class GpuLatents(Latents):
    """Keys and values of a latent layer on a GPU, not yet expanded."""

    __slots__ = ()

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor | None:
        """Attention of each sequence's new token, [batch, 1, heads, second]; None if latents must be expanded."""
        length = getattr(self.latent, LENGTH, None)
        unknown = mask is None and length is not None  # all of a static cache's room is asked for
        if query.shape[2] != 1 or unknown or not latent_triton.takes(self.latent, self.turned, mask):
            return None

        def sums(lifted: Tensor, asked: Tensor) -> Tensor:
            return latent_triton.attend(lifted, asked, self.latent, self.turned, length, mask, scaling)

        return self._by(sums, query[:, :, 0])[:, None]

    def attend_rows(self, query: Tensor, rows: Tensor, scaling: float) -> Tensor | None:
        """Attention over sequences' own memory, whose table is `rows`: [1, heads, sequences, ...], as of `attend`."""
        fits = 0 < query.shape[2] <= SEQUENCES.value and query.stride(3) == 1
        if not fits or query.dtype != self.latent.dtype:
            return None

        def sums(lifted: Tensor, asked: Tensor) -> Tensor:
            return latent_triton.attend_rows(lifted, asked, rows, scaling)

        return self._by(sums, query[0].transpose(0, 1))[None]

    def _by(self, sums: Callable[[Tensor, Tensor], Tensor], query: Tensor) -> Tensor:
        """Return attention [sequences, heads, second] of queries [sequences, heads, first + rotated]."""
        first = self.of.first
        weights = self.of.weights(query.dtype)
        with current(query.device):
            lifted = torch.bmm(query[..., :first].transpose(0, 1), weights[:, :first])
            summed = sums(lifted.transpose(0, 1), query[..., first:])
            return torch.bmm(summed.transpose(0, 1), weights[:, first:].transpose(1, 2)).transpose(0, 1)

    def by_heads(self, found: Attention, module: Any, query: Tensor, mask: Tensor | None, given: Any) -> Tensor:
        """Return attention by the function `found` over expanded latents."""
        return found(module, query, *self.expanded(), mask, **given)[0]

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values of all heads."""
        yield self.expanded()


class GpuLatentMap(LatentMap):
    """A module's map from latents to keys and values on a GPU."""

    made = GpuLatents

    def __init__(self, module: FamilyModule) -> None:
        """Read the sizes of a module; raise ValueError or AttributeError for one whose map the kernels do not read."""
        super().__init__(module)
        of: Any = self._map
        packed = isinstance(of, PackedLinear)
        self.device = (of.packed if packed else of.weight).device
        dtype = _dtype(module)
        each = 2 if dtype == torch.bfloat16 else 2 + dtype.itemsize
        self.unpacks = each * of.out_features * of.in_features * packed  # bytes that a step makes of the map
        if not latent_triton.fits(self.rank, module.qk_rope_head_dim):
            raise ValueError(f"no blocks for {self.rank} and {module.qk_rope_head_dim} numbers")

    def _reads(self, found: PackedLinear) -> bool:
        return compiled([found.version])

    def _kernel(self) -> None:
        return None

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the map, [heads, first + second, rank]."""
        found: Any = self._map
        whole = found.unpacked().to(dtype) if isinstance(found, PackedLinear) else found.weight.detach()
        return whole.view(self.heads, self.each, self.rank)


@functools.cache
def _latent(kind: Any) -> type[nn.Module]:
    """Make a subclass of `kind` whose static cache says how many tokens its latents hold."""
    made = in_place_of_latents(kind)
    attends: Any = made.forward

    @functools.wraps(attends)
    def forward(self: FamilyModule, *args: object, **kwargs: Any) -> object:
        cache = next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
        layers = getattr(cache, "layers", ())
        layer: Any = layers[self.layer_idx] if self.layer_idx < len(layers) else None
        length = getattr(layer, "cumulative_length", None)
        if isinstance(length, Tensor) and layer.is_initialized and not hasattr(layer, "cumulative_length_int"):
            setattr(layer.keys, LENGTH, length)
        return attends(self, *args, **kwargs)

    return in_place_of(made, forward)


def serve_gpu_latents(model: nn.Module) -> dict[str, int]:
    """Let modules whose code takes keys and values from latents attend to these; return the number of each class."""
    return replace_latents(model, GpuLatentMap, _latent, _trial)


def _dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which a module computes."""
    return next(p.dtype for p in module.parameters() if p.dtype.is_floating_point)


def _trial(module: FamilyModule) -> bool:
    """Whether attention over latents has the results of a module's own expansion, in the dtype in which it serves.

    Of a static cache that is partly filled, with a padded sequence; of a cache that is full; and of sequences with
    memory of their own.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    of = GpuLatentMap(module)
    dtype = _dtype(module)
    if dtype not in FLOATS:
        return False
    generator = torch.Generator().manual_seed(0)
    probe: Any = nn.Module()
    probe.is_causal = True
    probe.num_key_value_groups = 1
    rows = torch.zeros(FIELDS, SEQUENCES.value, dtype=torch.int64)
    for batch, room, filled in ((2, 70, 40), (1, 40, 40)):
        shapes = ((batch, 1, room, of.rank), (batch, 1, room, module.qk_rope_head_dim))
        latent, turned = (torch.randn(shape, generator=generator).to(of.device, dtype) for shape in shapes)
        with torch.no_grad():
            keys, values = module.expand_kv(latent, turned)
            query = torch.randn(batch, of.heads, 1, keys.shape[3], generator=generator).to(of.device, dtype)
            mask = None
            if filled < room:
                mask = torch.zeros(batch, 1, 1, room, dtype=torch.bool, device=of.device)
                mask[..., :filled] = True
                mask[-1, ..., :3] = False
                setattr(latent, LENGTH, torch.tensor(filled, device=of.device))
            scaling = 1 / (query.shape[3] ** 0.5 * float(keys.float().std()))  # scores of about 1, as trained layers'
            wanted = sdpa_attention_forward(probe, query, keys, values, mask, scaling=scaling)[0]
            latents = GpuLatents(module, of, latent, turned)
            got = latents.attend(query, mask, scaling)
            if got is None or not near(got, wanted) or not bool(wanted.any()):
                return False
            if mask is None:
                rows[:, 0] = torch.tensor([latent.data_ptr(), turned.data_ptr(), room, room])
                own = latents.attend_rows(query.transpose(0, 2), rows.to(of.device), scaling)
                if own is None or not near(own, wanted):
                    return False
    return True
