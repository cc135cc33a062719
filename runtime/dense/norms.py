"""Normalisations of a served model's BF16 rows on a CPU by one kernel call, in place of eight of torch's operations.

Which arithmetic a module does is not read from its name: each of the kernel's forms is run beside it on random rows
when the model is loaded, and the one that agrees takes its place; where none does the module stays as it is.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from moepack.runtime.kernels.affine_native import norm

FORMS = (0, 1, 2)  # small.c
ROWS = 64  # random rows that a form is tried on
EQUAL = 0.998  # of their numbers that must be the same bits
APART = 2  # units in the last place: one of the rounding before the weight, which the weight may double


class Norm:
    """In place of a normalisation's `forward`."""

    def __init__(self, module: nn.Module, form: int, epsilon: float) -> None:
        self._module, self._form, self._epsilon = module, form, ctypes.c_double(epsilon)
        self._plain = type(module).forward

    def __call__(self, x: Tensor) -> Tensor:
        """Of x [..., cols]."""
        weight: Any = self._module.weight
        if (
            torch.compiler.is_compiling()
            or x.dtype != torch.bfloat16
            or weight.dtype != torch.bfloat16
            or not x.is_contiguous()
            or not x.numel()
            or (x.requires_grad and torch.is_grad_enabled())
            or x.device.type != "cpu"
        ):
            plain: Tensor = self._plain(self._module, x)
            return plain
        return norm(x, weight, self._form, self._epsilon)


def serve_norms(model: nn.Module) -> dict[str, int]:
    """Let the kernel do a model's normalisations that it does the same way; returns how many of each class it does.

    A class is tried once for each size of rows.
    """
    tried: dict[tuple[type, int, float], int | None] = {}
    done: dict[str, int] = {}
    for module in model.modules():
        weight, epsilon = getattr(module, "weight", None), _epsilon(module)
        if epsilon is None or not isinstance(weight, Tensor) or weight.dtype != torch.bfloat16 or weight.dim() != 1:
            continue
        if "forward" in module.__dict__ or next(module.children(), None) is not None or weight.device.type != "cpu":
            continue
        key = type(module), len(weight), epsilon
        if key not in tried:
            tried[key] = _form(module, weight, epsilon)
        if (form := tried[key]) is not None:
            module.forward = Norm(module, form, epsilon)
            done[type(module).__name__] = done.get(type(module).__name__, 0) + 1
    return done


def _epsilon(module: nn.Module) -> float | None:
    if "RMSNorm" not in type(module).__name__:
        return None
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(found := getattr(module, name, None), float):
            return found
    return None


def _form(module: nn.Module, weight: Tensor, epsilon: float) -> int | None:
    """The kernel's form that gives what the module does; None where none does."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.logspace(-4, 4, ROWS)[:, None]
    x = (torch.randn(ROWS, len(weight), generator=generator) * spread).bfloat16()
    try:
        with torch.no_grad():
            wanted = module(x)
    except (TypeError, RuntimeError):  # it takes more than rows
        return None
    if not isinstance(wanted, Tensor) or wanted.dtype != torch.bfloat16 or wanted.shape != x.shape:
        return None
    for form in FORMS:
        made = norm(x, weight, form, ctypes.c_double(epsilon))
        apart = (made.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
        if int(apart.max()) <= APART and float((apart == 0).float().mean()) >= EQUAL:
            return form
    return None
