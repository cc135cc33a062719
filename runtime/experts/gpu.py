"""The experts' forward on a GPU: one sort of slots by expert, one launch for each version and matrix, no waiting.

The first product computes silu(gate) * up too; another gate activation of a family runs between the two products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moepack.runtime.kernels.affine_triton import TILINGS, product, route
from moepack.runtime.kernels.current import current

if TYPE_CHECKING:
    from .handles import LayerCall


def forward(call: LayerCall) -> Tensor:
    """Run `experts_forward` on a GPU; return [tokens, hidden]."""
    with current(call.hidden.device):
        return _forward(call)


def _forward(call: LayerCall) -> Tensor:
    module, experts, hidden, pages = call.module, call.experts, call.hidden, call.pages
    tokens, top_k = call.index.shape
    x = (hidden if hidden.dtype in TILINGS else hidden.float()).detach().contiguous()
    if not tokens:
        return torch.empty_like(hidden)
    count, (first, second) = experts.of.layer.experts, experts.of.layer.matrices
    few, many = TILINGS[x.dtype]
    tiling = few if tokens * top_k <= few.tokens * count else many
    geometry = route(call.index.long(), count, tiling.tokens)
    handles, slots, fused = experts.device_table(), tokens * top_k, _fuses(module)
    first_forms, second_forms = zip(*experts.of.forms.values(), strict=True)  # each by the version's number
    h = x.new_empty(slots, first.rows // 2 if fused else first.rows)
    if pages is not None:
        pages.ready(0)
    product(first, first_forms, experts.served, handles, geometry, x, h, tiling, fused)
    if not fused:
        h = (module._apply_gate(h) if module.has_gate else module.act_fn(h)).contiguous()
    if experts.of.rotation is not None:
        h = experts.of.rotation.run(h, call.index.long().reshape(-1), handles, experts.served)
    if pages is not None:
        pages.ready(1)
    y = x.new_zeros(slots, second.rows)  # rows of slots with an index past the last expert stay zero
    product(second, second_forms, experts.served, handles, geometry, h, y, tiling)
    if getattr(module, "has_post_expert_norm", False):
        y = module.post_expert_norm(y) * (call.index.reshape(-1, 1) < count)
    weighted = y * call.weights.detach().reshape(-1, 1)
    return weighted.view(tokens, top_k, -1).sum(dim=1).to(hidden.dtype)


def _fuses(module: Any) -> bool:
    """Whether the family's gate activation is silu(gate) * up on two halves."""
    gate, act = getattr(type(module), "_apply_gate", None), getattr(module, "act_fn", None)
    name = str(getattr(act, "__name__", type(act).__name__)).lower().removesuffix("activation")
    silu = isinstance(act, torch.nn.SiLU) or name == "silu"
    return bool(module.has_gate and silu and getattr(gate, "__name__", "") == "_default_apply_gate")
