"""Routers and attention of a served model on a CPU: their modules' own code, with one name in it standing for a kernel.

A router's code is the family's; what costs is its linear map, and `F.linear` in it becomes the kernels' product. In
attention code `ALL_ATTENTION_FUNCTIONS` hands out a function that does a single new token by the kernel and all else by
the one that was asked for. A module whose code does not read these names, or whose results then differ, stays as it is.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from moepack.runtime.kernels.affine_native import Dense, DenseMatrix, attend, dense, plain_form

from .linears import FEW

ROWS = 16  # random tokens that a router is tried on
CLOSE = 2.0**-6  # of the greatest number, that results may be apart
REGISTRY = "ALL_ATTENTION_FUNCTIONS"


class _Names:
    """A module of functions with one of them replaced."""

    def __init__(self, of: Any, **replaced: Any) -> None:
        self._of = of
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


def _with_name(function: types.FunctionType, name: str, value: Any) -> types.FunctionType:
    """The same code with a global name that stands for something else."""
    names = {**function.__globals__, name: value}
    made = types.FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _reads(module: nn.Module, name: str) -> types.FunctionType | None:
    """A module's forward, where its code reads a global name and nobody has put another in its place."""
    function = type(module).forward
    if "forward" in module.__dict__ or not isinstance(function, types.FunctionType):
        return None
    return function if name in function.__code__.co_names else None


def serve_routers(model: nn.Module, experts: Sequence[str]) -> dict[str, int]:
    """Let the kernels do the linear maps of BF16 routers; returns how many of each class.

    Args:
        model: on a CPU, its weights loaded.
        experts: the names of its experts' modules, beside which routers stand.
    """
    done: dict[str, int] = {}
    for name in experts:
        for last, module in model.get_submodule(name.rpartition(".")[0]).named_children():
            weight, function = getattr(module, "weight", None), _reads(module, "F")
            if last not in ("gate", "router") or function is None or not isinstance(weight, Tensor):
                continue
            if weight.dtype != torch.bfloat16 or weight.dim() != 2 or not weight.is_contiguous():
                continue
            shim = _Names(function.__globals__["F"], linear=_router_linear(module))
            own = types.MethodType(_with_name(function, "F", shim), module)
            if _agree(module, own):
                module.forward = own
                done[type(module).__name__] = done.get(type(module).__name__, 0) + 1
    return done


def _router_linear(module: Any) -> Callable[..., Tensor]:
    rows, cols = module.weight.shape
    of = Dense([DenseMatrix(plain_form(), rows, cols, module.weight.detach())])
    at = module.weight.data_ptr()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        few = x.dtype == torch.bfloat16 and 0 < x.numel() <= FEW * x.shape[-1]
        plain = torch.compiler.is_compiling() or (x.requires_grad and torch.is_grad_enabled())
        if few and not plain and bias is None and weight is module.weight and weight.data_ptr() == at:
            return dense(of, x)[0]
        return nn.functional.linear(x, weight, bias)

    return linear


def _agree(module: nn.Module, own: Callable[..., Any]) -> bool:
    """Whether a router gives the same by both ways, but for rounding: numbers, not choices, which are made of them."""
    weight: Any = module.weight
    x = torch.randn(ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        with torch.no_grad():
            wanted, got = type(module).forward(module, x), own(x)
    except (TypeError, RuntimeError, ValueError):
        return False
    wanted, got = (found if isinstance(found, tuple) else (found,) for found in (wanted, got))
    if len(wanted) != len(got):
        return False
    for a, b in zip(wanted, got, strict=True):
        if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return False
    floats = [(a, b) for a, b in zip(wanted, got, strict=True) if a.is_floating_point()]
    a, b = floats[0]
    return bool((a - b).abs().max() <= CLOSE * a.abs().max())


class _Registry:
    """transformers' attention functions, with one new token's by the kernel."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def get_interface(self, name: str, default: Any) -> Any:
        """As transformers' own."""
        found = self._of.get_interface(name, default)
        return _one_token(found) if name == "sdpa" else found

    def __getitem__(self, name: str) -> Any:
        return _one_token(self._of[name]) if name == "sdpa" else self._of[name]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)


_made: dict[Any, Callable[..., Any]] = {}


def _one_token(plain: Callable[..., Any]) -> Callable[..., Any]:
    """An attention function that does one new token without a mask by the kernel."""
    if plain not in _made:

        def attention(
            module: Any,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None,
            dropout: float = 0.0,
            scaling: float | None = None,
            is_causal: bool | None = None,
            **kwargs: Any,
        ) -> Any:
            if (
                query.shape[2] == 1
                and attention_mask is None
                and not dropout
                and query.dtype == key.dtype == value.dtype == torch.bfloat16
                and query.device.type == "cpu"
                and not torch.compiler.is_compiling()
                and not (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
                and not any(kwargs.get(name) is not None for name in SPECIAL)
                and query.shape[1] % key.shape[1] == 0
                and query.stride(3) == key.stride(3) == value.stride(3) == 1
            ):
                return attend(query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling), None
            kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
            return plain(module, query, key, value, attention_mask, **kwargs)

        _made[plain] = attention
    return _made[plain]


SPECIAL = ("softcap", "s_aux", "position_bias", "cache", "sinks")  # what the kernel does not do


def serve_attention(model: nn.Module) -> dict[str, int]:
    """Let the kernel do the attention of single new tokens; returns how many modules of each class."""
    done: dict[str, int] = {}
    for module in model.modules():
        function = _reads(module, REGISTRY)
        if function is None or REGISTRY not in function.__globals__:
            continue
        registry = _Registry(function.__globals__[REGISTRY])
        module.forward = types.MethodType(_with_name(function, REGISTRY, registry), module)
        done[type(module).__name__] = done.get(type(module).__name__, 0) + 1
    return done
