"""Whether modules are as they were when a kernel took their place: the same, where they were, with the same weights.

A kernel reads weights by address, and knows numbers and flags from a trial. Whoever changes a module, or listens to it,
gets the module's own code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.utils import output_capturing

from .norms import described
from .packed import PackedLinear
from .values import keeps, plain_values


class Watched:
    """The modules inside some parts of a module. It does not refer to the module itself, which goes when let go."""

    def __init__(self, module: nn.Module, parts: Sequence[str]) -> None:
        """Note how the module's `parts`, given by their names, and all modules inside them are now."""
        self._own = plain_values(module)
        # A module's owner, its name there, the module, its class and its attributes
        self._modules: list[tuple[dict[str, Any], str, nn.Module, type, dict[str, Any]]] = []
        # Parameters or buffers, with the name and address of each
        self._tensors: list[tuple[dict[str, Any], list[tuple[str, Tensor | None, int]]]] = []
        self._values: list[tuple[nn.Module, dict[str, object]]] = []
        self._hooks: list[dict[int, Any]] = []
        inside = [(module, name) for name in parts]
        for owner, name in inside:
            part: Any = owner._modules[name]
            self._modules.append((owner._modules, name, part, type(part), vars(part)))
            self._hooks += [part._forward_hooks, part._forward_pre_hooks]
            for of in (part._parameters, part._buffers):
                self._tensors.append((of, [(n, t, 0 if t is None else t.data_ptr()) for n, t in of.items()]))
            if not isinstance(part, nn.Linear | PackedLinear) and described(part) is None:  # whose numbers are sizes
                self._values.append((part, plain_values(part)))
            inside += [(part, n) for n, m in part._modules.items() if m is not None]

    def unchanged(self, module: nn.Module) -> bool:
        """Whether the module's own numbers and flags, and all that is watched, are as they were, and nobody listens."""
        if _has_any_global_hook() or (any(self._hooks) and any(map(listens, self._hooks))):
            return False
        for owner, name, part, kind, own in self._modules:
            if owner.get(name) is not part or type(part) is not kind or "forward" in own:
                return False
        for of, tensors in self._tensors:
            if len(of) != len(tensors):
                return False
            for name, tensor, at in tensors:
                if of.get(name) is not tensor or (tensor is not None and tensor.data_ptr() != at):
                    return False
        return keeps(module, self._own) and all(keeps(part, values) for part, values in self._values)


def listens(hooks: dict[int, Any]) -> bool:
    """Whether a module's hooks do anything: those of transformers' outputs stay once asked for, and mostly do not."""
    capturing = all(getattr(hook, "__module__", "") == output_capturing.__name__ for hook in hooks.values())
    return bool(hooks) and not (capturing and not output_capturing._active_collector.get())
