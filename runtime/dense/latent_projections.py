"""Queries and latents of a few tokens by one kernel call, in latent layers whose code does just that.

Such a module makes queries by one map or by two with a normalisation between them, latents and a key's rotated part by
another, and rotates; it then appends to the cache, and attends (latent.py). It is tried as projections.py says, with
each rotation that families use. DeepSeek-V2 and V3, Kimi-K2, Kimi-Linear, GLM-4.7-Flash and A.X-K1 are such; layers
with an indexer or a gate keep their own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moepack.runtime.kernels.token_native import WAYS, LatentProjection
from moepack.runtime.kv.latents import MAP

from .latent import LatentMap
from .linears import FamilyModule
from .packed import matrices_of
from .projections import ATTENDS, PLAIN, CpuProjections, Ways, norms_of, place_of, serve_projections

if TYPE_CHECKING:
    from transformers import Cache

HELD = "kv_a_proj_with_mqa"  # makes latents, and the part of keys that is rotated
QUERIES = (("q_proj", None, None), ("q_a_proj", "q_a_layernorm", "q_b_proj"))
NEEDED = ATTENDS | {HELD, "kv_a_layernorm", "expand_kv"}
KNOWN = (
    NEEDED
    | PLAIN
    | {name for names in QUERIES for name in names if name is not None}
    | {"apply_rotary_emb", "apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave", "rope_interleave"}
    | {"cat", "device", "kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "split"}
    | {"to", "torch"}
)


class _LatentPlace(CpuProjections):
    projection: LatentProjection
    interleaved: object = None  # what the configuration says of the rotation

    def run(
        self, module: FamilyModule, x: Tensor, turn: Any, cache: Cache | None, others: dict[str, object]
    ) -> tuple[Any, ...]:
        query, latent, turned = self.projection.run(x, turn)
        if cache is not None:
            latent, turned = cache.update(latent, turned, module.layer_idx, kwargs=others)
        return query, *module.expand_kv(latent, turned)

    def takes(self, turn: object, tokens: int) -> bool:
        return self.projection.takes(turn, tokens)

    def follows(self, module: FamilyModule) -> bool:
        return _interleaved(module) == self.interleaved and "expand_kv" not in vars(module)


def _interleaved(module: FamilyModule) -> object:
    return getattr(module.config, "rope_interleave", None)


def _place(module: FamilyModule, way: int) -> _LatentPlace | None:
    latents: LatentMap | None = getattr(module, "_moepack_latent", None)
    if latents is None or latents.kernel is None:
        return None
    for first, between, last in QUERIES:
        of = matrices_of(module, first, HELD)
        second = None if last is None else matrices_of(module, last)
        norms = norms_of(module, between or "", "kv_a_layernorm")
        if of is None or norms is None or (last is not None and second is None):
            continue
        try:
            made = LatentProjection(of, second, norms, latents.kernel, WAYS[way])
        except ValueError:
            return None
        limits = [n for group in (of, second) if group is not None for n in group.limits[torch.bfloat16]]
        read = [name for name in (first, between, last, HELD, "kv_a_layernorm", MAP) if name is not None]
        place = place_of(_LatentPlace, module, made, read, limits)
        place.interleaved = _interleaved(module)
        return place
    return None


def serve_latent_projections(model: nn.Module) -> dict[str, int]:
    """Replace the modules whose projections the kernel reproduces; return how many were changed, by class.

    The model's linear maps, norms, attention and latents are served already.
    """
    return serve_projections(model, Ways(NEEDED, KNOWN, _place, len(WAYS)))
