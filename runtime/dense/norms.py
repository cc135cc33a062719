"""Normalisations of a served model's BF16 rows on a CPU by one kernel call, in place of eight of torch's operations.

Which arithmetic a module does is not read from its name: each of the kernel's forms is run beside it on random rows and
weights when the model is loaded, and the one that agrees takes its place; where none does the module stays as it is.
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

from .linears import learns, names_of

FORMS = (0, 1, 2)  # small.c
ROWS = 64  # random rows that a form is tried on
EQUAL = 0.998  # of their numbers that must be the same bits
APART = 2  # units in the last place: one of the rounding before the weight, which the weight may double


@functools.cache
def _served(kind: type[nn.Module], form: int, epsilon: float) -> type[nn.Module]:
    """A class of normalisations whose forward is the kernel's where it can be; otherwise `kind`, by its name too."""
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

    return type(kind.__name__, (kind,), {**names_of(kind), "forward": forward})


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
        if not _takes_rows_alone(type(module)):
            continue
        kind: Any = type(module)
        key = kind, len(weight), epsilon
        if key not in tried:
            tried[key] = _form(module, epsilon)
        if (form := tried[key]) is not None:
            module.__class__ = _served(kind, form, epsilon)
            done[kind.__name__] = done.get(kind.__name__, 0) + 1
    return done


def _takes_rows_alone(kind: type[nn.Module]) -> bool:
    """Whether a class's forward has one argument: one that may be given more does more than normalise."""
    kinds = [p.kind for p in inspect.signature(kind.forward).parameters.values()]
    return kinds == [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2


def _epsilon(module: nn.Module) -> float | None:
    if "RMSNorm" not in type(module).__name__:
        return None
    for name in ("variance_epsilon", "eps", "epsilon"):
        if isinstance(found := getattr(module, name, None), float):
            return found
    return None


def _form(module: nn.Module, epsilon: float) -> int | None:
    """The kernel's form that gives what the module does; None where none does. Not on its own weights: of ones, as an
    untrained module has, all forms are alike."""
    generator = torch.Generator().manual_seed(0)
    try:
        probe: Any = copy.deepcopy(module)
        weight = torch.randn(len(probe.weight), generator=generator).bfloat16()
        probe.weight.data = weight
        spread = torch.logspace(-4, 4, ROWS)[:, None]
        x = (torch.randn(ROWS, len(weight), generator=generator) * spread).bfloat16()
        with torch.no_grad():
            wanted = probe(x)
    except Exception:  # whatever a family's code raises: then it stays
        return None
    if not isinstance(wanted, Tensor) or wanted.dtype != torch.bfloat16 or wanted.shape != x.shape:
        return None
    for form in FORMS:
        made = norm(x, weight, form, ctypes.c_double(epsilon))
        apart = (made.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
        if int(apart.max()) <= APART and float((apart == 0).float().mean()) >= EQUAL:
            return form
    return None
