"""An indexer's choice of keys on a CPU: one product over its keys (DeepSeek-V3.2, arXiv 2512.02556, section 2.1).

The family's code widens all keys of the cache to float32, and writes each head's scores of them three times. The kernel
reads the keys as they are, and writes one score a key.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from moepack.runtime.kernels.dense_native import index_scores

from .linears import FEW, FamilyModule, in_place_of
from .values import Trials

ROTATIONS = ("apply_rotary_pos_emb_interleave", "apply_rotary_pos_emb")  # names in a model's own file
BEYOND = 100  # keys of a trial that are not chosen
ALIKE = 0.98  # of a trial's keys, which both sides choose: scores that differ by rounding change places


@functools.cache
def _indexer(kind: Any) -> type[nn.Module]:
    """Return a subclass whose forward chooses few tokens' keys by the kernel."""
    code = inspect.unwrap(kind.forward)
    name = next(name for name in ROTATIONS if name in code.__code__.co_names)
    rotate = code.__globals__[name]

    def forward(
        self: FamilyModule,
        hidden_states: Tensor,
        q_resid: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor,
        position_ids: Tensor | None = None,
        cache: Any = None,
        **given: Any,
    ) -> Tensor:
        fits = (
            cache is not None
            and not given
            and hidden_states.shape[1] <= FEW
            and attention_mask.shape[-1] > self.index_topk
            and attention_mask.dtype == torch.bool
            and hidden_states.dtype == q_resid.dtype == position_embeddings[0].dtype == torch.bfloat16
            and hidden_states.device.type == "cpu"
            and not torch.compiler.is_compiling()
        )
        args = hidden_states, q_resid, position_embeddings, attention_mask
        if not fits:
            made: Tensor = kind.forward(self, *args, position_ids, cache=cache, **given)
            return made
        with torch.no_grad():
            return _chosen(self, rotate, *args, cache)

    return in_place_of(kind, forward)


def _chosen(
    self: FamilyModule,
    rotate: Callable[..., tuple[Tensor, Tensor]],
    hidden: Tensor,
    q_resid: Tensor,
    turn: tuple[Tensor, Tensor],
    mask: Tensor,
    cache: Any,
) -> Tensor:
    """Return the numbers of the keys with the highest scores, int32 [batch, tokens, index_topk]."""
    rotated = self.qk_rope_head_dim
    query = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
    key = self.k_norm(self.wk(hidden)).unsqueeze(2)
    turned_query, turned_key = rotate(query[..., :rotated], key[..., :rotated], *turn, unsqueeze_dim=2)
    query = torch.cat((turned_query, query[..., rotated:]), dim=-1)
    key = torch.cat((turned_key, key[..., rotated:]), dim=-1).squeeze(2)
    keys = cache.update_indexer(key, self.layer_idx)
    weights = self.weights_proj(hidden.to(self.weights_proj.weight.dtype)).float()
    scores = index_scores(query, keys, weights * (self.n_heads**-0.5 * self.softmax_scale))
    scores.masked_fill_(~mask, float("-inf"))
    return scores.topk(self.index_topk, dim=-1).indices.to(torch.int32)


def serve_indexers(model: nn.Module) -> dict[str, int]:
    """Let the kernel choose keys in indexers of BF16; return the number of each class. The model is on a CPU."""
    trials = Trials[bool]()
    for module in model.modules():
        kind: Any = type(module)
        if not hasattr(module, "index_topk") or "wk" not in module._modules:
            continue
        agrees = trials.result(module, functools.partial(_trial, module), without="layer_idx")
        if trials.count(module, bool(agrees)):
            module.__class__ = _indexer(kind)
    return trials.done()


def _trial(module: FamilyModule) -> bool:
    """Whether an indexer chooses the same keys by the kernel: for one token and for several, some hidden."""
    kind: Any = type(module)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    length = module.index_topk + BEYOND
    for tokens in (1, 3):
        held = random(1, length - tokens, module.head_dim)
        beside = SimpleNamespace(update_indexer=lambda new, _, held=held: torch.cat((held, new), dim=1))
        angles = torch.rand(1, tokens, module.qk_rope_head_dim // 2, generator=generator).repeat(1, 1, 2)
        mask = torch.ones(1, tokens, length, dtype=torch.bool).tril_(length - tokens)
        mask[..., : BEYOND // 4] = False
        args = random(1, tokens, module.wk.in_features), random(1, tokens, module.wq_b.in_features)
        turn = angles.cos().bfloat16(), angles.sin().bfloat16()
        wanted, got = (of.forward(module, *args, turn, mask, None, cache=beside) for of in (kind, _indexer(kind)))
        if got.shape != wanted.shape or got.dtype != wanted.dtype:
            return False
        both = torch.zeros(2, 1, tokens, length).scatter_(-1, torch.stack((wanted, got)).long(), 1.0)
        if float(both.prod(0).sum()) < ALIKE * wanted.numel():
            return False
    return True
