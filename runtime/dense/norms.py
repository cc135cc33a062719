"""Normalisations of a served model's BF16 rows on a CPU by one kernel call, in place of eight of torch's operations.

A module's name does not tell its arithmetic. So when a model is loaded, each variant (form) of the kernel is compared
with the module on random rows and weights. A form that agrees replaces the module's code; else the code stays.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from moepack.runtime.kernels.dense_native import norm
from moepack.runtime.kernels.token_native import Norm

from .linears import in_place_of, learns

FORMS = (0, 1, 2)  # small.c
ROWS = 64  # random rows on which a form is tried
EQUAL = 0.998  # share of the rows' numbers that must have the same bits
APART = 2  # units in the last place by which others may differ: rounding before the weight makes one, doubled by it


@functools.cache
def _served(kind: type[nn.Module], form: int, epsilon: float) -> type[nn.Module]:
    """Make a subclass of `kind` that calls the kernel when inputs allow it."""
    plain, added = kind.forward, ctypes.c_double(epsilon)

    def forward(self: Any, x: Tensor) -> Tensor:
        weight = self.weight
        if (
            torch.compiler.is_compiling()
            or x.dtype != torch.bfloat16
            or weight.dtype != torch.bfloat16
            or not x.is_contiguous()
            or not x.numel()
            or x.device.type != "cpu"
            or learns(x, weight)
        ):
            made: Tensor = plain(self, x)
            return made
        return norm(x, weight, form, added)

    made = in_place_of(kind, forward)
    made._moepack_form = form, epsilon  # type: ignore[attr-defined]
    return made


def described(module: nn.Module) -> Norm | None:
    """Return what a served module computes; `None` for any other module."""
    found = vars(type(module)).get("_moepack_form")
    return None if found is None else Norm(module.weight, *found)  # type: ignore[arg-type]


def serve_norms(model: nn.Module) -> dict[str, int]:
    """Let the kernel compute the normalisations that it reproduces; return the number of modules changed, by class.

    A class is tried once for each size of rows.
    """
    tried: dict[tuple[type, int, float], int | None] = {}
    done: dict[str, int] = {}
    for module in model.modules():
        weight, epsilon = getattr(module, "weight", None), _epsilon(module)
        kind: Any = type(module)
        if epsilon is None or not isinstance(weight, Tensor) or weight.dtype != torch.bfloat16 or weight.dim() != 1:
            continue
        if "forward" in module.__dict__ or next(module.children(), None) is not None or weight.device.type != "cpu":
            continue
        parameters = [p.kind for p in inspect.signature(kind.forward).parameters.values()]
        if parameters != [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2:
            continue  # with more arguments, it may do more than normalise
        key = kind, len(weight), epsilon
        if key not in tried:
            tried[key] = _form(module, epsilon)
        if (form := tried[key]) is not None:
            module.__class__ = _served(kind, form, epsilon)
            done[kind.__name__] = done.get(kind.__name__, 0) + 1
    return done


def _epsilon(module: nn.Module) -> float | None:
    if "RMSNorm" not in type(module).__name__:
        return None
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((epsilon for epsilon in found if isinstance(epsilon, float)), None)


def _form(module: nn.Module, epsilon: float) -> int | None:
    """The kernel's form that agrees with the module on random weights (on ones, all agree); `None` if no form does."""
    generator = torch.Generator().manual_seed(0)
    try:
        probe: Any = copy.deepcopy(module)
        weight = torch.randn(len(probe.weight), generator=generator).bfloat16()
        probe.weight.data = weight
        spread = torch.logspace(-4, 4, ROWS)[:, None]
        x = (torch.randn(ROWS, len(weight), generator=generator) * spread).bfloat16()
        with torch.no_grad():
            wanted = probe(x)
    except Exception:  # of any kind, from a family's code
        return None
    if not isinstance(wanted, Tensor) or wanted.dtype != torch.bfloat16 or wanted.shape != x.shape:
        return None
    for form in FORMS:
        made = norm(x, weight, form, ctypes.c_double(epsilon))
        apart = (made.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
        if int(apart.max()) <= APART and float((apart == 0).float().mean()) >= EQUAL:
            return form
    return None
