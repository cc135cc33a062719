"""The experts of one layer of a vLLM model, run from a bundle's packed bytes by moepack's kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase

from moepack.pack.errors import InputError

from .served import ServedBundle, run_layer


class MoepackExperts(FusedMoEMethodBase):  # type: ignore[misc]
    """Runs the routed experts of one layer; vLLM's own code routes, and runs shared experts."""

    def __init__(self, layer: RoutedExperts, served: ServedBundle, position: int) -> None:
        """Check that vLLM wants what the bundle has. Raises InputError if not."""
        super().__init__(layer.moe_config)
        self._served = served
        self._position = position
        self._module: nn.Module | None = None
        of = served.layers[position]
        parallel = layer.moe_config.moe_parallel_config
        where = f"{served.bundle.path}: {layer.layer_name}"
        if parallel.tp_size > 1 or parallel.use_ep or parallel.dp_size > 1:
            raise InputError(f"{where}: experts are served whole, by one process: no parallel sizes over 1")
        if served.plan is not None and get_current_vllm_config().parallel_config.pipeline_parallel_size > 1:
            raise InputError(f"{where}: policy {served.policy} counts whole passes: no pipeline parallel size over 1")
        if layer.apply_router_weight_on_input:
            raise InputError(f"{where}: gates are applied to the experts' input, which a bundle's experts do not do")
        wanted = (layer.global_num_experts, layer.hidden_size)
        held = (of.experts, of.matrices[0].cols)
        if wanted != held:
            raise InputError(f"{where}: vLLM wants (experts, hidden size) {wanted}, the bundle has {held}")

    def create_weights(self, layer: RoutedExperts, *sizes: object, **attributes: object) -> None:
        """Make no parameters: weights stay packed, in memory of moepack's own."""

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Load the experts: of all layers, at the first one's call."""
        device = torch.device(self.moe.device)
        dtype = self.moe.in_dtype
        self._module = self._served.module(self._position, device, dtype)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """Nothing for vLLM's kernels, which do not run."""
        return None

    def apply(
        self,
        layer: RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: object,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """Run the chosen experts: [tokens, hidden] to [tokens, hidden]."""
        if torch.compiler.is_compiling():
            out: Tensor = torch.ops.moepack.vllm_experts(x, topk_ids, topk_weights, layer.layer_name)
            return out
        return self.run(x, topk_ids, topk_weights)

    def run(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Run this layer's experts. vLLM's trial passes, which attend to nothing, are no traffic."""
        traffic = is_forward_context_available() and get_forward_context().attn_metadata is not None
        return run_layer(self._module, x, index, weights, traffic)


@torch.library.custom_op("moepack::vllm_experts", mutates_args=())
def vllm_experts(x: Tensor, index: Tensor, weights: Tensor, layer: str) -> Tensor:
    """Run the experts that the running model of vLLM names `layer`, in a compiled pass."""
    method = get_forward_context().no_compile_layers[layer].routed_experts.quant_method
    out: Tensor = method.run(x, index, weights)
    return out.contiguous()


@vllm_experts.register_fake
def _(x: Tensor, index: Tensor, weights: Tensor, layer: str) -> Tensor:
    return x.new_empty(x.shape)
