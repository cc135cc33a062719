"""Rounds BF16 weights to MXFP4, as a model would be released: each weight goes to the nearest code."""

from __future__ import annotations

import torch
from torch import Tensor

_STEPS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between the magnitudes of E2M1
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, Tensor]


def mxfp4(weight: Tensor) -> Tensors:
    """Codes and E8M0 scales of groups of 32: the power of two with the smaller squared error of the nearest two."""
    groups = weight.view(len(weight), -1, 32)
    low = torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)).floor() - 2
    errors = []
    for exponent in (low, low + 1):
        scaled = groups.abs() / torch.exp2(exponent)
        errors.append(((_E2M1[_magnitudes(scaled)] - scaled) * torch.exp2(exponent)).square().sum(-1, keepdim=True))
    exponent = torch.where(errors[1] < errors[0], low + 1, low)
    codes = _packed((groups / torch.exp2(exponent)).view_as(weight))
    return {"weight_packed": codes, "weight_scale": (exponent.squeeze(-1) + 127).to(torch.uint8)}


def _magnitudes(values: Tensor) -> Tensor:
    return torch.bucketize(values, _STEPS)


def _packed(scaled: Tensor) -> Tensor:
    """E2M1 codes of values that are divided by their scale, two in a byte."""
    codes = (_magnitudes(scaled.abs()) | (scaled < 0).int() << 3).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4
