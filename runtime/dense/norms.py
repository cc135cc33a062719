"""Normalisations of a served model's BF16 rows on a CPU by one kernel call, in place of eight of torch's operations.

A module's name does not tell its arithmetic. So when a model is loaded, each variant (form) of the kernel is compared
with the module on random rows and weights. A form that agrees replaces the module's code; else the code stays.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
from collections.abc import Callable, Collection, Hashable
from typing import Any

import torch
from torch import Tensor, nn

from moepack.runtime.kernels.dense_native import norm
from moepack.runtime.kernels.forms import Norm

from .linears import FamilyModule, in_place_of, learns
from .values import Trials

FORMS = (0, 1, 2)  # of `Norm`
ROWS = 64  # random rows per kernel trial
EQUAL = 0.998  # share of the rows' numbers that must have the same bits
APART = 2  # units in the last place by which others may differ: rounding before the weight makes one, doubled by it


@functools.cache
def _served(kind: type[nn.Module], form: int, epsilon: float) -> type[nn.Module]:
    """Make a subclass of `kind` that calls the kernel when inputs allow it."""
    plain = kind.forward
    added = ctypes.c_double(epsilon)

    def forward(self: FamilyModule, x: Tensor) -> Tensor:
        weight = self.weight
        if (
            torch.compiler.is_compiling()
            or x.dtype != torch.bfloat16
            or weight.dtype != torch.bfloat16
            or not x.numel()
            or x.device.type != "cpu"
            or learns(x, weight)
        ):
            made: Tensor = plain(self, x)
            return made
        # A part of wider rows, as of a latent layer's, is copied: all ways of computing have the kernel's bits
        return norm(x.contiguous(), weight, form, added)

    return in_place_of(kind, forward)


def described(module: nn.Module) -> Norm | None:
    """Return what a served module computes; `None` for any other module."""
    found = vars(type(module)).get("_moepack_form")
    return None if found is None else Norm(module.weight, *found)  # type: ignore[arg-type]


def serve_norms(model: nn.Module) -> dict[str, int]:
    """Let the kernel compute the normalisations that it reproduces; return the number of modules changed, by class."""
    return replace_norms(model, (torch.bfloat16,), {}, _form, _served)


def replace_norms(
    model: nn.Module,
    dtypes: Collection[torch.dtype],
    tried: dict[Hashable, int | None],
    tries: Callable[[FamilyModule, float], int | None],
    served: Callable[[Any, int, float], type[nn.Module]],
) -> dict[str, int]:
    """Replace the class of normalisation modules whose weights are in `dtypes` by what `served` returns for them.

    Args:
        tried: the form of each kind of module that was tried, by its values; results are added.
        tries: returns the form of a module's numbers; None where there is none.
    """
    trials_of = Trials(tried)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        epsilon = epsilon_of(module)
        kind = type(module)
        if epsilon is None or not isinstance(weight, Tensor) or weight.dtype not in dtypes or weight.dim() != 1:
            continue
        if "forward" in module.__dict__ or next(module.children(), None) is not None:
            continue
        parameters = [p.kind for p in inspect.signature(kind.forward).parameters.values()]
        if parameters != [inspect.Parameter.POSITIONAL_OR_KEYWORD] * 2:
            continue  # with more arguments, it may do more than normalise
        form = trials_of.result(module, functools.partial(tries, module, epsilon))
        if trials_of.count(module, form is not None):
            assert form is not None
            module.__class__ = made = served(kind, form, epsilon)
            made._moepack_form = form, epsilon  # type: ignore[attr-defined]
    return trials_of.done()


def epsilon_of(module: nn.Module) -> float | None:
    """Return what a normalisation by the root mean square adds to the mean square; `None` for any other module."""
    if "RMSNorm" not in type(module).__name__:
        return None
    found = (getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon"))
    return next((epsilon for epsilon in found if isinstance(epsilon, float)), None)


def form_of(
    module: FamilyModule,
    rows: int,
    run: Callable[[Tensor, Tensor, int], Tensor],
    same: Callable[[Tensor, Tensor], bool],
) -> int | None:
    """Return the form with which `run` makes of rows and a weight the `same` as the module; None if no form does.

    The weights are random (on ones, all forms agree). The rows are one token's, many tokens' and many tokens' heads, in
    the dtype and on the device of the weight. A module that does something else than make rows of rows, or that fails,
    raises.
    """
    generator = torch.Generator().manual_seed(0)
    probe = copy.deepcopy(module)
    like = {"dtype": module.weight.dtype, "device": module.weight.device}
    for tensor in (*probe.parameters(), *probe.buffers()):
        tensor.data = torch.randn(tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    cols = len(module.weight)
    x = (torch.randn(rows, cols, generator=generator) * torch.logspace(-4, 4, rows)[:, None]).to(**like)
    found = []
    for some in (x, x[rows // 2].view(1, 1, cols), x.view(2, rows // 4, 2, cols)):
        with torch.no_grad():
            wanted = probe(some)
        if not isinstance(wanted, Tensor) or wanted.dtype != x.dtype or wanted.shape != some.shape:
            raise ValueError(f"{type(module).__name__} does not make rows of rows")
        found.append((some, wanted))
    agree = (form for form in FORMS if all(same(run(some, probe.weight, form), wanted) for some, wanted in found))
    return next(agree, None)


def _form(module: FamilyModule, epsilon: float) -> int | None:
    if module.weight.device.type != "cpu":
        return None
    added = ctypes.c_double(epsilon)
    return form_of(module, ROWS, lambda x, weight, form: norm(x, weight, form, added), _near)


def _near(made: Tensor, wanted: Tensor) -> bool:
    apart = (made.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
    few = 1 / apart.numel()  # a single row may be short
    return int(apart.max()) <= APART and float((apart == 0).float().mean()) >= min(EQUAL, 1 - few)
