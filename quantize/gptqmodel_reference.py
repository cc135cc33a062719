"""GPTQ (Frantar et al., 2022) through the gptqmodel library, one matrix and one width a call.

The library's model classes support neither fused experts nor given second moments, so its GPTQ class is used directly
with injected moments. It makes widths 4, 3 and 2, and no one-bit form. The result, with scales rounded to BF16, is the
reference for `gptq`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from moepack.pack.errors import MissingExtraError
from moepack.pack.spec import Version

from .grid import Quantised, fix_scale, fix_zero, join

SCALE_SEARCH = 2.0  # norm of the library's scale search; without it, 2-bit output error is 20 to 65 % higher
DAMP = 0.05  # the library's own default, relative to the mean of the diagonal


def quantise_widths(weight: Tensor, moments: Tensor, versions: Sequence[Version]) -> dict[Version, Quantised]:
    """Quantise float32 [experts, rows, cols]; `moments` are its inputs' mean second moments, [experts, cols, cols]."""
    return {v: join([_one(w, m, v) for w, m in zip(weight, moments, strict=True)]) for v in versions}


def _one(weight: Tensor, moments: Tensor, version: Version) -> Quantised:
    config_class, gptq_class = _library()
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
    config = config_class(
        bits=version.bits,
        group_size=version.group_size,
        sym=False,
        desc_act=False,
        mse=SCALE_SEARCH,
        damp_percent=DAMP,
        offload_to_disk=False,
    )
    with _quiet():
        task = gptq_class(linear, config)
        task.quantizer.configure(perchannel=True)
        # the library overwrites H, which is twice the mean of x x^T
        task.H = 2 * moments
        task.nsamples = 1
        values, scale, zero, group, *_ = task.quantize()
    first = group.long()[:: version.group_size]  # from the library's order of columns to the matrix's
    scale = scale[:, first].float()
    zero = zero[:, first].float()
    values = values.float()
    spread = torch.arange(weight.shape[1], device=weight.device) // version.group_size
    codes = (values / scale[:, spread]).round() + zero[:, spread]
    codes = codes.clamp(0, (1 << version.bits) - 1).to(torch.uint8)
    return Quantised(codes[None], fix_scale(scale, version.scale_bits)[None], fix_zero(zero, version.bits)[None])


@functools.cache
def _library() -> tuple[type, type]:
    """Import the library's classes without its banner and its changes to the environment."""
    before = dict(os.environ)
    try:
        with _quiet():
            from gptqmodel.quantization.config import QuantizeConfig
            from gptqmodel.quantization.gptq import GPTQ
    except ImportError:
        raise MissingExtraError("gptqmodel", "gptqmodel") from None
    finally:
        os.environ.clear()
        os.environ.update(before)
    return QuantizeConfig, GPTQ


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield
