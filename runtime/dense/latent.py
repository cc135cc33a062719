"""Attention of latent layers (DeepSeek's, Kimi's) over the latents themselves, on a CPU (of a GPU: gpu_latent.py).

The cache of such a layer holds one latent vector c a token, and a map `kv_b_proj` makes keys and values of all heads
from it. A family's code makes them anew for the whole context at every step. But a score q (W_k c) is also (W_k^T q) c.
So each head lifts its queries by its part of the map, scores and sums are computed over the latents in the cache, and
the values' part of the map is applied to the sums (DeepSeek-V2, arXiv 2405.04434, section 2.1.2). For many new tokens
it costs less to expand the latents; that is done for some heads at a time.

In such a module `expand_kv` returns unexpanded `Latents`, and the attention function decides.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from moepack.families.arguments import attends_by_name
from moepack.runtime.kernels.affine_native import has_tiles
from moepack.runtime.kernels.by_torch import Weights, multiply, of_matrix, of_packed
from moepack.runtime.kernels.dense_native import PLAIN_FORM, HeadMatrices, KernelMatrix, attend
from moepack.runtime.kernels.kv_rows import plain as numbers_of
from moepack.runtime.kv.latents import MAP, SHARE, SHARE_BF16, LatentSizes, heads_at_once
from moepack.runtime.step.context import observe_attention

from .borrowed import SPECIAL, Attention, in_order, is_sdpa, keys_read, with_attention
from .linears import FamilyModule, Uncopied, in_place_of, is_observed, learns
from .packed import PackedLinear
from .selection import over_seen, sees_few
from .values import Trials, near

SCORES = 16 << 20  # numbers of float32 scores at a time


@dataclass(frozen=True, slots=True, eq=False)
class Latents:
    """Keys and values of a latent layer, not yet expanded. It takes the place of both in a family's code."""

    module: FamilyModule
    of: LatentMap
    latent: Tensor  # [batch, 1, length, rank]
    turned: Tensor  # [batch, 1, length, rotated]: the part of the keys that all heads share

    @property
    def shape(self) -> torch.Size:
        """The shape of the expanded keys."""
        batch, _, length, turned = self.turned.shape
        return torch.Size((batch, self.of.heads, length, self.of.first + turned))

    def expanded(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of all heads, as the family's own code makes them."""
        return expanded(self.module, self.latent, self.turned)

    def over(self, latent: Tensor, turned: Tensor) -> Latents:
        """Return other latents of the same layer."""
        return replace(self, latent=latent, turned=turned)

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor | None:
        """Attention of a sequence's last tokens, [batch, tokens, heads, second]; None if it must be expanded.

        Args:
            query: [batch, heads, tokens, first + rotated], of the latents' dtype.
            mask: bool [batch, 1, tokens, length]; None if each token sees the tokens up to its own.
        """
        of = self.of
        if query.shape[2] > of.most_absorbed(query.shape[3] - of.first):
            return None
        if query.dtype == torch.bfloat16 and of.kernel is not None:
            return self._by_kernel(of.kernel, query, mask, scaling)
        if query.dtype == torch.float32 and query.shape[1] * query.shape[2] * self.latent.shape[2] <= SCORES:
            return self._by_torch(query, mask, scaling)
        return None

    def attend_rows(self, query: Tensor, rows: Tensor, scaling: float) -> Tensor | None:
        """Return None: sequences have a table of their memory on a GPU alone."""
        return None

    def _by_kernel(self, maps: HeadMatrices, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        batch, heads, tokens, _ = query.shape
        first = self.of.first
        rank = self.latent.shape[3]
        apart = query[..., :first].transpose(1, 2).reshape(batch * tokens, heads, first)
        lifted = maps.lift(apart).view(batch, tokens, heads, rank).transpose(1, 2)

        def sums(asked: Sequence[Tensor], held: Sequence[Tensor], seen: Tensor | None = None) -> Tensor:
            turned, latent = held
            return attend((asked[0], asked[1]), (latent, turned), latent, scaling, mask=seen)

        summed = self._summed(sums, (lifted, query[..., first:]), mask)
        lowered = maps.lower(summed.view(batch * tokens, heads, rank))
        return lowered.view(batch, tokens, heads, -1)

    def _by_torch(self, query: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        of = self.of
        weights = of.weights(query.dtype)
        lifted = torch.einsum("bhtn,rhn->bhtr", query[..., : of.first], weights[..., : of.first])

        def sums(asked: Sequence[Tensor], held: Sequence[Tensor], seen: Tensor | None = None) -> Tensor:
            turned, latent = (part[:, 0] for part in held)
            scores = torch.einsum("bhtr,blr->bhtl", asked[0], latent)
            scores += torch.einsum("bhtn,bln->bhtl", asked[1], turned)
            scores *= scaling
            if seen is None:
                tokens, length = scores.shape[2:]
                seen = torch.ones(tokens, length, dtype=torch.bool, device=scores.device).tril_(length - tokens)
            scores.masked_fill_(~seen, torch.finfo(scores.dtype).min)
            return torch.einsum("bhtl,blr->bthr", torch.softmax(scores, dim=-1), latent)

        summed = self._summed(sums, (lifted, query[..., of.first :]), mask)
        return torch.einsum("bthr,rhv->bthv", summed, weights[..., of.first :])

    def _summed(self, sums: Callable[..., Tensor], asked: Sequence[Tensor], mask: Tensor | None) -> Tensor:
        """Return sums of latents by lifted queries, [batch, tokens, heads, rank]: of those seen alone, if few are."""
        held = self.turned, self.latent
        if mask is not None and type(self.latent) is Tensor and sees_few(mask):
            return over_seen(sums, asked, held, mask)
        return sums(asked, held, mask)

    def by_heads(self, found: Attention, module: Any, query: Tensor, mask: Tensor | None, given: Any) -> Tensor:
        """Return attention by the function `found` over expanded latents, some heads at a time, as `attend` does.

        Values get zeros up to the width of keys, because torch's fast kernel takes equal widths alone: 512 tokens
        over 4,096 take 0.57 of the time.
        """
        out = []
        head = 0
        for keys, values in self.parts():
            asked = query[:, head : head + keys.shape[1]]
            head += keys.shape[1]
            out.append(found(module, asked, keys, values, mask, **given)[0][..., : self.of.second])
        return torch.cat(out, dim=2)

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values of some heads after others, [batch, heads, length, ...], values with their zeros."""
        of = self.of
        batch, _, length, turned = self.turned.shape
        flat = self.latent.reshape(batch * length, -1)
        rotated = numbers_of(self.turned)
        sizes = of.sizes(turned)
        some = heads_at_once(of.heads, sizes.expanded_bytes(batch * length, flat.element_size()))
        zeros = sizes.wide - of.second
        for head in range(0, of.heads, some):
            heads = min(some, of.heads - head)
            made = flat.new_empty(len(flat), heads * of.each)
            multiply(flat, of.rows(head * of.each), made)
            split = made.view(batch, length, heads, of.each).transpose(1, 2)
            shared = rotated.expand(-1, heads, -1, -1)
            keys = torch.cat((split[..., : of.first], shared), dim=-1)
            values = nn.functional.pad(split[..., of.first :], (0, zeros))
            yield keys, values


class LatentMap(Uncopied):
    """A module's map from latents to the keys and values of all heads."""

    made = Latents  # what stands for keys and values
    device = torch.device("cpu")

    def __init__(self, module: FamilyModule) -> None:
        """Read the sizes of a module; raise ValueError or AttributeError for one whose map is of another kind."""
        found = module._modules[MAP]
        self.first: int = module.qk_nope_head_dim  # numbers of a head's key that it makes
        self.second: int = module.v_head_dim
        self.each = self.first + self.second
        self.rank: int = found.in_features
        self.heads = found.out_features // self.each
        self._map = found
        packed = isinstance(found, PackedLinear)
        bias = found.matrix.bias if packed else found.bias is not None
        unread = packed and not self._reads(found)
        if bias or unread or self.heads * self.each != found.out_features:
            raise ValueError(f"{MAP} is no plain matrix for each head, or the kernels do not read it")
        self.kernel = self._kernel()

    def _reads(self, found: PackedLinear) -> bool:
        """Whether the kernels read a packed map."""
        return found.group is not None

    def _kernel(self) -> HeadMatrices | None:
        """Return what the kernels read; None for a plain matrix of another dtype than BF16."""
        found = self._map
        if isinstance(found, PackedLinear):
            matrix = found.group.matrices((found.which,)).matrices[0]
        elif found.weight.dtype == torch.bfloat16 and found.weight.is_contiguous():
            matrix = KernelMatrix(PLAIN_FORM, found.out_features, found.in_features, found.weight.detach())
        else:
            return None
        return HeadMatrices(matrix, self.heads, self.first, self.second)

    def holds(self, module: nn.Module) -> bool:
        """Whether the module's map is the same, at its address, and nothing was put before or after it."""
        found: Any = module._modules[MAP]
        if found is not self._map or is_observed(found) or _has_any_global_hook():
            return False
        if isinstance(found, PackedLinear):
            return True
        return self.kernel is None or found.weight.data_ptr() == self.kernel.of.data.data_ptr()

    def most_absorbed(self, rotated: int) -> int:
        """Return the most new tokens for which latents are not expanded."""
        share = SHARE_BF16 if has_tiles(torch.bfloat16) else SHARE
        return self.sizes(rotated).most_absorbed(share)

    def sizes(self, rotated: int) -> LatentSizes:
        """Return the layer's sizes, with `rotated` numbers of a key that all heads share."""
        return LatentSizes(self.rank, rotated, self.first, self.second)

    def weights(self, dtype: torch.dtype) -> Tensor:
        """Return the map, [rank, heads, first + second]."""
        made: Tensor = self.rows(0)(0, self.heads * self.each, dtype).unflatten(1, (self.heads, self.each))
        return made

    def rows(self, start: int) -> Weights:
        """Return the function by which `multiply` reads rows from row `start` on."""
        found = self._map
        if not isinstance(found, PackedLinear):
            return of_matrix(found.weight.detach()[start:])
        group = found.group.matrices((found.which,))
        threads = torch.get_num_threads()
        return of_packed(self.rank, lambda tile, first: group.unpack(0, tile, start + first, threads))


def expanded(module: FamilyModule, latent: Tensor, turned: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of all heads, [batch, heads, length, ...], by the family's own code."""
    kind = type(module)
    made: tuple[Tensor, Tensor] = getattr(kind, "_moepack_expand", kind.expand_kv)(module, latent, turned)
    return made


def _expand(self: FamilyModule, latent: Tensor, turned: Tensor) -> tuple[Any, Any]:
    """Return the latents in place of keys and values, if the attention function may take them so; else expand them."""
    of: LatentMap | None = self._moepack_latent
    kept = (
        of is not None
        and latent.device == of.device
        and latent.dim() == turned.dim() == 4
        and latent.shape[1] == turned.shape[1] == 1
        and latent.stride(3) == turned.stride(3) == 1
        and not torch.compiler.is_compiling()
        and not learns(latent, turned, *self._modules[MAP].parameters())
        and of.holds(self)
    )
    if not kept or of is None:
        return expanded(self, latent, turned)
    latents = of.made(self, of, latent, turned)
    return latents, latents


@functools.cache
def over_latents(found: Attention) -> Attention:
    """Return an attention function that takes `Latents` too: it expands them where `found` needs keys and values."""
    if getattr(found, "takes_latents", False):
        return found
    absorbs = is_sdpa(found)
    plain = inspect.unwrap(found)  # which nobody observes head by head

    def attention(
        module: nn.Module, query: Tensor, key: Any, value: Any, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(key, Latents):
            return found(module, query, key, value, attention_mask, **given)
        length = key.latent.shape[2]
        if absorbs and (read := keys_read(module, query, length, attention_mask, given)) < length:
            key = key.over(key.latent[:, :, :read], key.turned[:, :, :read])
        if absorbs and _usual(module, query, key, attention_mask, given):
            made = key.attend(query, attention_mask, given["scaling"])
            if made is None:
                made = key.by_heads(plain, module, query, attention_mask, given)
            observe_attention(module, query, (keys for keys, _ in key.parts()), attention_mask, given)
            return made, None
        return found(module, query, *key.expanded(), attention_mask, **given)

    return attention


def _usual(module: Any, query: Tensor, key: Latents, mask: Tensor | None, given: dict[str, Any]) -> bool:
    """Whether attention of these arguments is what `Latents.attend` computes."""
    batch, _, length, _ = key.latent.shape
    tokens = query.shape[2]
    if mask is None:
        seen = tokens in (1, length)  # torch counts tokens from the first key, `attend` from the last
    else:
        seen = mask.dtype == torch.bool and mask.shape == (batch, 1, tokens, length) and mask.stride(3) == 1
    return (
        seen
        and query.dtype == key.latent.dtype == key.turned.dtype
        and query.shape[:2] == (batch, key.of.heads)
        and query.stride(3) == 1
        and given.get("scaling") is not None
        and not given.get("dropout")
        and (mask is not None or in_order(module, given))
        and not learns(query)
        and not any(given.get(name) is not None for name in (*SPECIAL, "indices"))
    )


@functools.cache
def in_place_of_latents(kind: Any) -> type[nn.Module]:
    """Make a subclass of `kind` whose latents the attention function may take unexpanded."""
    made = in_place_of(kind, with_attention(kind, over_latents))
    made._moepack_expand = kind.expand_kv  # type: ignore[attr-defined]
    made.expand_kv = _expand  # type: ignore[attr-defined]
    return made


def serve_latents(model: nn.Module) -> dict[str, int]:
    """Let modules whose code takes keys and values from latents attend to these; return the number of each class.

    The model is on a CPU.
    """
    return replace_latents(model, LatentMap, in_place_of_latents, _trial)


def replace_latents(
    model: nn.Module,
    map_of: type[LatentMap],
    served: Callable[[Any], type[nn.Module]],
    agrees: Callable[[FamilyModule], bool],
) -> dict[str, int]:
    """Replace the classes of modules that make keys and values from latents; return how many of each class.

    Args:
        model: whose modules are tried.
        map_of: what kernels read of a module.
        served: makes a class for modules of another one, which ask for their attention function by name.
        agrees: a module's trial.
    """
    trials = Trials[bool]()
    for module in model.modules():
        kind = type(module)
        if not hasattr(kind, "expand_kv") or MAP not in module._modules or not attends_by_name(module):
            continue
        found = trials.result(module, functools.partial(agrees, module), without="layer_idx")
        if trials.count(module, bool(found)):
            module._moepack_latent = map_of(module)  # type: ignore[assignment]
            module.__class__ = served(kind)
    return trials.done()


def _trial(module: FamilyModule) -> bool:
    """Whether attention over latents has the results of a module's own expansion, of one token and of more.

    The lengths are those of one span of keys and of two (attention.c), with the mask of a padded sequence and without.
    A last mask leaves as few keys as an indexer's.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    of = LatentMap(module)
    dtype = next(p.dtype for p in module.parameters() if p.dtype.is_floating_point)
    generator = torch.Generator().manual_seed(0)
    probe: Any = SimpleNamespace(is_causal=True, num_key_value_groups=1, training=False)
    cases = ((9, 1, 9), (40, 40, 40), (9, 3, 5), (1100, 1, 1100), (1100, 2, 1096), (1100, 2, 100))
    for length, tokens, most in cases:
        batch = 2 if length < 1100 else 1
        shapes = ((batch, 1, length, of.rank), (batch, 1, length, module.qk_rope_head_dim))
        latent, turned = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        with torch.no_grad():
            keys, values = module.expand_kv(latent, turned)
            query = torch.randn(batch, of.heads, tokens, keys.shape[3], generator=generator).to(dtype)
            mask = None
            if most < length:
                mask = torch.ones(tokens, length, dtype=torch.bool).tril_(length - tokens).repeat(batch, 1, 1, 1)
                mask[-1, :, :, : length - most] = False
            apart_by = query.shape[3] ** 0.5 * float(keys.float().std())
            given = {"scaling": 1 / apart_by}  # scores of about 1, as trained layers have them
            wanted = sdpa_attention_forward(probe, query, keys, values, mask, **given)[0]
            latents = Latents(module, of, latent, turned)
            made = latents.attend(query, mask, given["scaling"])
            apart = latents.by_heads(sdpa_attention_forward, probe, query, mask, given)
        for got in (apart, made):
            if got is None and tokens > 1 and of.most_absorbed(module.qk_rope_head_dim) < tokens:
                continue
            if got is None or not near(got, wanted):
                return False
    return True
