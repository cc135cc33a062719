"""A loaded model's methods that replace transformers' own: they count experts too, or refuse what cannot work.

Without these, a saved decoder would silently lack its experts, a cast or a paged cache would take memory that the
budget does not count, and other implementations of experts would look for weights that are not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.runtime.dense.file_rows import FileRows
from moepack.runtime.dense.packed import PackedLinear
from moepack.runtime.experts.forward import IMPLEMENTATION
from moepack.runtime.residency.kv_reserve import UNCOUNTED

ServedModel = Any  # a transformers model of a class that `ForwardWrapper` has derived


def model_methods(kind: Any) -> dict[str, Callable[..., object]]:
    """Return methods for a class derived from `kind`, a transformers model class with a `_moepack_wrapper`."""

    def get_memory_footprint(self: ServedModel, return_buffers: bool = True) -> int:
        """Return the bytes of parameters, buffers and experts."""
        return int(kind.get_memory_footprint(self, return_buffers) + self._moepack_wrapper.expert_bytes())

    def num_parameters(self: ServedModel, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Count parameters as the checkpoint's model does, with experts and packed matrices."""
        own = kind.num_parameters(self, only_trainable, exclude_embeddings)
        packed = (m.matrix for m in self.modules() if isinstance(m, PackedLinear))
        held = sum(x.weights + x.rows * x.bias for x in packed) + self._moepack_wrapper.expert_parameters()
        if not exclude_embeddings:
            held += sum(m.weight.numel() for m in self.modules() if isinstance(m, FileRows))
        return int(own + (0 if only_trainable else held))

    def refuse_copies(self: ServedModel, *_: object) -> None:
        """Refuse pickles and copies."""
        self._moepack_wrapper.refuse_copies()

    def save_pretrained(self: ServedModel, *args: object, **kwargs: object) -> object:
        """Save adapters alone: the model, saved without its experts, would load as a different one."""
        _adapters_alone(self)
        return kind.save_pretrained(self, *args, **kwargs)

    def push_to_hub(self: ServedModel, *args: object, **kwargs: object) -> object:
        """Push adapters alone."""
        _adapters_alone(self)
        return kind.push_to_hub(self, *args, **kwargs)

    def _apply(self: ServedModel, fn: Callable[[Tensor], Tensor], *args: object, **kwargs: object) -> object:
        """Refuse other devices, and in a budget wider dtypes (`to`, `cuda`, `double` call this)."""
        _refuse_moves(self, fn)
        return kind._apply(self, fn, *args, **kwargs)

    def resize_token_embeddings(
        self: ServedModel, new_num_tokens: int | None = None, *args: object, **kwargs: object
    ) -> object:
        """Refuse a new size in a budget, which has counted the embeddings, and where `lm_head` is packed."""
        now = self.get_input_embeddings().num_embeddings
        if self._moepack_wrapper.in_budget and (new_num_tokens or now) != now:
            raise InputError("embeddings of a model served in a budget keep their size: load it without one")
        if isinstance(head := self.get_output_embeddings(), PackedLinear) and (new_num_tokens or now) != now:
            raise InputError(f"lm_head is packed at {head.version.name} and keeps its size: load it with dense='bf16'")
        return kind.resize_token_embeddings(self, new_num_tokens, *args, **kwargs)

    def set_experts_implementation(self: ServedModel, experts_implementation: object) -> None:
        """Refuse other implementations: moepack runs a bundle's experts."""
        named = experts_implementation if isinstance(experts_implementation, dict) else {"": experts_implementation}
        if set(named.values()) - {IMPLEMENTATION}:
            raise InputError("a bundle's experts are run by moepack's own implementation, and by no other")
        kind.set_experts_implementation(self, experts_implementation)

    def init_continuous_batching(self: ServedModel, *args: object, **kwargs: object) -> object:
        """Refuse in a budget: the paged cache takes all free memory."""
        if self._moepack_wrapper.in_budget:
            raise InputError(UNCOUNTED)
        return kind.init_continuous_batching(self, *args, **kwargs)

    def generate(
        self: ServedModel,
        inputs: Tensor | None = None,
        generation_config: object = None,
        logits_processor: Iterable[object] | None = None,
        *args: object,
        **kwargs: object,
    ) -> object:
        """Generate as transformers does. Raises NotFiniteError if logits are NaN or infinite."""
        from .checked_logits import CheckedLogits

        checked = CheckedLogits()
        made = kind.generate(self, inputs, generation_config, [checked, *(logits_processor or ())], *args, **kwargs)
        checked.check()
        return made

    made = (
        get_memory_footprint,
        num_parameters,
        save_pretrained,
        push_to_hub,
        _apply,
        set_experts_implementation,
        resize_token_embeddings,
        init_continuous_batching,
        generate,
    )
    return {"__reduce_ex__": refuse_copies, **{m.__name__: m for m in made if hasattr(kind, m.__name__)}}


def _refuse_moves(model: ServedModel, fn: Callable[[Tensor], Tensor]) -> None:
    for device, dtype in {(t.device, t.dtype) for t in (*model.parameters(), *model.buffers())}:
        made = fn(torch.empty(0, device=device, dtype=dtype))
        if made.device != device:
            where = f"it is on {device}, and not on {made.device}"
            raise InputError(f"{where}: a loaded bundle does not move; pass device= to moepack.load")
        if made.dtype.itemsize > dtype.itemsize and model._moepack_wrapper.in_budget:
            raise InputError("a cast would take more than the budget counted: pass dtype= to moepack.load instead")


def _adapters_alone(model: ServedModel) -> None:
    if not getattr(model, "_hf_peft_config_loaded", False):
        raise InputError("a loaded bundle is not saved as a checkpoint: copy its directory, or use moepack push")
