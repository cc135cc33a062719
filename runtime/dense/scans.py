"""The scan of Mamba's layers (Jamba), which begins with the state in the cache, in passes of several tokens too.

transformers' scan of several tokens begins with zeros, so a prompt that is read in several passes would be wrong. It
also makes three tensors of channels * size numbers for each token, where the kernel makes none. The layer's other
operations are its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .linears import FamilyModule, learns, with_name

SCAN, STEP = "mamba_selective_scan", "mamba_selective_state_update"  # names in a family's own file
Results = Tensor | tuple[Tensor, Tensor]
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]  # `scan` of kernels/mamba_native.py


def has_scan(kind: type[nn.Module]) -> bool:
    """Whether a class's own code calls the scan."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and SCAN in code.co_names


def going_on(plain: Callable[..., object]) -> Callable[..., object]:
    """Make a forward whose scan begins with the state in the cache, for `plain`, a forward that calls the scan.

    Modules with a `_moepack_scan` run that, for example the kernel (kernels/mamba_native.py).
    """
    code: Any = inspect.unwrap(plain)
    own_scan, own_step = (code.__globals__[name] for name in (SCAN, STEP))

    @functools.wraps(plain)
    def forward(self: FamilyModule, *args: object, **kwargs: object) -> object:
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)
        cache = next((v for v in (*args, *kwargs.values()) if isinstance(v, Cache)), None)
        state = None if cache is None else cache.get_recurrent_state(self.layer_idx, state_idx=0)
        kernel = getattr(self, "_moepack_scan", None)
        scan = functools.partial(_scan, kernel, own_scan, own_step, state)
        step = functools.partial(_step, kernel, own_step)
        run: Any = with_name(with_name(plain, SCAN, scan), STEP, step)  # type: ignore[arg-type]
        return run(self, *args, **kwargs)

    return forward


def _scan(
    kernel: Kernel | None,
    own_scan: Callable[..., Results],
    own_step: Callable[..., Tensor],
    state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    z: Tensor,
    delta_bias: Tensor,
    delta_softplus: bool,
    return_last_state: bool = False,
    **more: object,
) -> Results:
    """Return what transformers' scan of this name does: results [batch, channels, tokens], and the last state.

    `state` is [batch, channels, size], `x`, `dt` and `z` are as results are, `b` and `c` [batch, size, tokens].
    """
    if kernel is not None and delta_softplus and _fits(x, dt, a, b, c, D, z, delta_bias):
        last = x.new_zeros(len(x), *a.shape, dtype=torch.float32)
        if state is not None:
            last.copy_(state)
        out = _by_kernel(kernel, last, x, dt, a, b.transpose(1, 2), c.transpose(1, 2), D, z, delta_bias)
    elif state is None:
        given = {"D": D, "z": z, "delta_bias": delta_bias, "delta_softplus": delta_softplus}
        return own_scan(x, dt, a, b, c, return_last_state=return_last_state, **given, **more)
    else:
        last = state.clone()
        given = {"D": D, "dt_bias": delta_bias, "dt_softplus": delta_softplus}
        made = []
        for t in range(x.shape[-1]):
            made.append(own_step(last, x[..., t], dt[..., t], a, b[..., t], c[..., t], z=z[..., t], **given))
        out = torch.stack(made, dim=-1)
    return (out, last) if return_last_state else out


def _step(
    kernel: Kernel | None, own_step: Callable[..., Tensor], state: Tensor, *given: Tensor, **named: Any
) -> Tensor:
    """Return what transformers' step of this name does for one token, and move the state on."""
    x, dt, a, b, c, skip = given
    z = named["z"]
    bias = named["dt_bias"]
    in_place = state.dtype == torch.float32 and state.is_contiguous()
    if kernel is None or not (in_place and named["dt_softplus"] and _fits(state, *given, z, bias)):
        return own_step(state, *given, **named)
    out = _by_kernel(kernel, state, x[..., None], dt[..., None], a, b[:, None], c[:, None], skip, z[..., None], bias)
    return out[..., 0].to(x.dtype)


def _by_kernel(
    kernel: Kernel,
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    D: Tensor,
    z: Tensor,
    bias: Tensor,
) -> Tensor:
    """Return the gated results of a scan by the kernel, float32; steps and gates are rounded as transformers does."""
    steps = F.softplus(dt + bias.to(dt.dtype)[:, None])
    out = kernel(x, steps, a, b, c, state)
    return (out + x * D.float()[:, None]) * F.silu(z)


def _fits(*tensors: Tensor) -> bool:
    """Whether the kernel takes these tensors."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # those of vmap and jvp have no memory
    return all(t.device.type == "cpu" and t.is_floating_point() and not (learns(t) or wrapped(t)) for t in tensors)
