"""Writes a BF16 checkpoint as it would be released: its experts rounded to MXFP4, NVFP4 or FP8, all else as it was.

Each weight goes to the nearest code. Released models were often trained further in their format, and lose less by it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 128  # rows and columns of a block of FP8
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


def nvfp4(weight: Tensor) -> Tensors:
    """Codes, E4M3 scales of groups of 16, and the divisor that stands for the whole matrix."""
    groups = weight.view(len(weight), -1, 16)
    divisor = 448 * 6 / weight.abs().max()
    scale = (groups.abs().amax(-1) / 6 * divisor).clamp_min(2.0**-9).to(torch.float8_e4m3fn)
    codes = _packed((groups * divisor / scale.float().unsqueeze(-1)).view_as(weight))
    return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor.view(1)}


def fp8(weight: Tensor) -> Tensors:
    """Codes and an FP32 scale for each block."""
    rows, cols = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -cols % BLOCK, 0, -rows % BLOCK))
    blocks = padded.view(-(-rows // BLOCK), BLOCK, -(-cols // BLOCK), BLOCK)
    scale = blocks.abs().amax((1, 3)) / 448
    by = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:rows, :cols]
    return {"weight": (weight / by).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def _magnitudes(values: Tensor) -> Tensor:
    return torch.bucketize(values, _STEPS)


def _packed(scaled: Tensor) -> Tensor:
    """E2M1 codes of values that are divided by their scale, two in a byte."""
    codes = (_magnitudes(scaled.abs()) | (scaled < 0).int() << 3).to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", **weights}, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


FORMATS = {
    "mxfp4": (mxfp4, _compressed("mxfp4-pack-quantized", strategy="group", group_size=32, scale_dtype="torch.uint8")),
    "nvfp4": (nvfp4, _compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16)),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
}


def release(plain: Path, path: Path, name: str) -> Path:
    """Write the checkpoint `plain`, whose experts are tensors of their own, to `path` in a format; return `path`."""
    make, quantization = FORMATS[name]
    stored: Tensors = {}
    for key, tensor in load_file(plain / "model.safetensors").items():
        if ".experts." not in key:
            stored[key] = tensor
            continue
        stored |= {f"{key.removesuffix('weight')}{n}": t.contiguous() for n, t in make(tensor.float()).items()}
    shutil.copytree(plain, path, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((plain / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path
