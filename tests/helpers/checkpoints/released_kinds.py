"""Random weights in each released format, packed here bit by bit and valued in NumPy, apart from moepack's readers."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E2M1 = np.concatenate([E2M1, -E2M1])
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's order_map
Rng = np.random.Generator
Made = tuple[dict[str, Tensor], np.ndarray]  # tensors by suffix, and the value in float32


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes packed along the last axis in 32-bit words, the first in the low bits."""
    per = 32 // bits
    padded = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] // per) * per), np.uint32)
    padded[..., : codes.shape[-1]] = codes
    lanes = padded.reshape(*codes.shape[:-1], -1, per)[..., list(order or range(per))]
    return (lanes << (bits * np.arange(per, dtype=np.uint32))).sum(-1, dtype=np.uint32).view(np.int32)


def fp4(rng: Rng, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed codes and values."""
    codes = rng.integers(0, 16, (rows, cols), dtype=np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, E2M1[codes]


def fp8(rng: Rng, rows: int, cols: int) -> tuple[Tensor, np.ndarray]:
    codes = torch.from_numpy(rng.normal(0, 50, (rows, cols)).astype(np.float32)).to(torch.float8_e4m3fn)
    return codes, codes.float().numpy()


def spread(scale: np.ndarray, group: int, cols: int) -> np.ndarray:
    return np.repeat(scale, group, axis=-1)[..., :cols]


def t(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


def mxfp4(rng: Rng, rows: int, cols: int, codes: str, scale: str, dtype: torch.dtype) -> Made:
    packed, value = fp4(rng, rows, cols)
    exponent = rng.integers(115, 125, (rows, cols // 32), dtype=np.uint8)
    stored = t(packed).view(torch.int8 if dtype == torch.float8_e8m0fnu else torch.uint8)
    value = value * spread(2.0 ** (exponent.astype(np.float32) - 127), 32, cols)
    return {codes: stored, scale: t(exponent).view(dtype)}, value


def mxfp8(rng: Rng, rows: int, cols: int, scale: str) -> Made:
    codes, value = fp8(rng, rows, cols)
    exponent = rng.integers(115, 125, (rows, cols // 32), dtype=np.uint8)
    return {"weight": codes, scale: t(exponent)}, value * spread(2.0 ** (exponent.astype(np.float32) - 127), 32, cols)


def nvfp4(rng: Rng, rows: int, cols: int, divides: bool) -> Made:
    packed, value = fp4(rng, rows, cols)
    scale = torch.from_numpy(rng.uniform(1, 400, (rows, cols // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
    outer = np.float32(rng.uniform(500, 900)) if divides else np.float32(rng.uniform(1e-4, 2e-4))
    by = np.float32(1) / outer if divides else outer
    names = ("weight_packed", "weight_global_scale", "input_global_scale")
    codes, own, unused = names if divides else ("weight", "weight_scale_2", "input_scale")
    one = t(np.array([outer])) if divides else torch.tensor(outer)
    value = value * spread(scale.float().numpy(), 16, cols) * by
    return {codes: t(packed), "weight_scale": scale, own: one, unused: torch.ones(1)}, value


def scaled_fp8(rng: Rng, rows: int, cols: int, shape: tuple[int, ...], name: str, dtype: torch.dtype) -> Made:
    """A scale a tensor (shape () or (1,)) or a row (shape (-1,) or (-1, 1))."""
    codes, value = fp8(rng, rows, cols)
    full = tuple(rows if n < 0 else n for n in shape)
    scale = torch.from_numpy(np.asarray(rng.uniform(0.001, 0.01, full), np.float32)).to(dtype)
    by = scale.float().numpy().reshape(-1, 1)
    return {"weight": codes, name: scale, "input_scale": torch.ones(())}, value * by


def block_fp8(rng: Rng, rows: int, cols: int, size: int, name: str, dtype: torch.dtype) -> Made:
    codes, value = fp8(rng, rows, cols)
    grid = np.asarray(rng.uniform(0.001, 0.01, (-(-rows // size), -(-cols // size))), np.float32)
    scale = torch.from_numpy(grid).to(dtype)
    by = np.repeat(spread(scale.float().numpy(), size, cols), size, axis=0)[:rows]
    return {"weight": codes, name: scale}, value * by


def integers(rng: Rng, rows: int, cols: int, bits: int, group: int, dtype: torch.dtype, symmetric: bool):
    codes = rng.integers(0, 1 << bits, (rows, cols), dtype=np.uint8)
    groups = -(-cols // group) if group else 1
    zero = rng.integers(1, 1 << bits, (rows, groups), dtype=np.uint8)
    zero = np.full_like(zero, 1 << (bits - 1)) if symmetric else zero
    scale = torch.from_numpy(rng.uniform(0.001, 0.1, (rows, groups)).astype(np.float32)).to(dtype)
    wide = codes.astype(np.float32) - spread(zero.astype(np.float32), group or cols, cols)
    return codes, zero, scale, wide * spread(scale.float().numpy(), group or cols, cols)


def packed(rng: Rng, rows: int, cols: int, bits: int, group: int, symmetric: bool, dtype: torch.dtype) -> Made:
    codes, zero, scale, value = integers(rng, rows, cols, bits, group, dtype, symmetric)
    out = {"weight_packed": t(words(codes, bits)), "weight_scale": scale, "weight_shape": torch.tensor([rows, cols])}
    return out if symmetric else out | {"weight_zero_point": t(words(zero.T, bits).T)}, value


def signed(rng: Rng, rows: int, cols: int) -> Made:
    codes, _, scale, value = integers(rng, rows, cols, 8, 0, torch.bfloat16, True)
    return {"weight": t((codes.astype(np.int16) - 128).astype(np.int8)), "weight_scale": scale}, value


def gptq(rng: Rng, rows: int, cols: int, bits: int, group: int, offset: int) -> Made:
    codes, zero, scale, value = integers(rng, rows, cols, bits, group, torch.float16, False)
    g_idx = np.arange(cols, dtype=np.int32) // (group or cols)
    out = {"qweight": t(words(codes, bits).T), "qzeros": t(words(zero.T - offset, bits))}
    return out | {"scales": scale.T.contiguous(), "g_idx": t(g_idx)}, value


def awq(rng: Rng, rows: int, cols: int, group: int) -> Made:
    codes, zero, scale, value = integers(rng, rows, cols, 4, group, torch.float16, False)
    out = {"qweight": t(words(codes.T, 4, AWQ)), "qzeros": t(words(zero.T, 4, AWQ))}
    return out | {"scales": scale.T.contiguous()}, value


@dataclass(frozen=True)
class Kind:
    """A format with the encoding it should be read as."""

    quantization: dict[str, Any]
    make: Callable[[Rng, int, int], Made]
    version: str
    group: int
    leftovers: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)


def compressed(form: str, **weights) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def _float(strategy: str, **more) -> dict[str, Any]:
    return compressed("float-quantized", num_bits=8, type="float", strategy=strategy, **more)


def _int(bits: int, symmetric: bool, group: int = 32) -> dict[str, Any]:
    own = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return compressed("pack-quantized", num_bits=bits, type="int", symmetric=symmetric, **own)


BF16, F16, F32, E8M0 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e8m0fnu
_FP8: dict[str, Any] = {"quant_method": "fp8"}
_BLOCKS = _FP8 | {"weight_block_size": [32, 32]}
_NV: dict[str, Any] = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_MX: dict[str, Any] = {"type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
KINDS = {
    "fp8 blocks": Kind(_BLOCKS, lambda r, n, c: block_fp8(r, n, c, 32, "weight_scale_inv", F32), "fp8", 32),
    "fp8 blocks BF16": Kind(_BLOCKS, lambda r, n, c: block_fp8(r, n, c, 32, "weight_scale_inv", BF16), "fp8", 32),
    "fp8 blocks E8M0": Kind(_BLOCKS, lambda r, n, c: block_fp8(r, n, c, 32, "scale", E8M0), "fp8", 32),
    "fp8 tensor": Kind(
        _FP8, lambda r, n, c: scaled_fp8(r, n, c, (), "weight_scale_inv", BF16), "fp8", 0, ("input_scale",)
    ),
    "fp8 rows": Kind(
        {"quant_method": "fbgemm_fp8"},
        lambda r, n, c: scaled_fp8(r, n, c, (-1, 1), "weight_scale", F32),
        "fp8",
        0,
        ("input_scale",),
    ),
    "fp8 mx": Kind(
        _FP8 | {"weight_block_size": [1, 32]}, lambda r, n, c: mxfp8(r, n, c, "weight_scale_inv"), "mxfp8", 32
    ),
    "deepseek mxfp4": Kind(
        _FP8 | {"weight_block_size": [128, 128]},
        lambda r, n, c: mxfp4(r, n, c, "weight", "scale", E8M0),
        "mxfp4",
        32,
        config={"expert_dtype": "fp4"},
    ),
    "int4": Kind(_int(4, True), lambda r, n, c: packed(r, n, c, 4, 32, True, BF16), "int4", 32, ("weight_shape",)),
    "int4 zeros": Kind(
        _int(4, False), lambda r, n, c: packed(r, n, c, 4, 32, False, F16), "int4fp16", 32, ("weight_shape",)
    ),
    "int8 zeros": Kind(
        _int(8, False), lambda r, n, c: packed(r, n, c, 8, 32, False, BF16), "int8", 32, ("weight_shape",)
    ),
    "int8 rows": Kind(
        _int(8, True, 0), lambda r, n, c: packed(r, n, c, 8, 0, True, BF16), "int8", 128, ("weight_shape",)
    ),
    "int8 signed": Kind(
        compressed("int-quantized", num_bits=8, type="int", strategy="channel", symmetric=True), signed, "int8", 128
    ),
    "ct fp8 tensor": Kind(
        _float("tensor"), lambda r, n, c: scaled_fp8(r, n, c, (1,), "weight_scale", BF16), "fp8", 0, ("input_scale",)
    ),
    "ct fp8 rows": Kind(
        _float("channel"), lambda r, n, c: scaled_fp8(r, n, c, (-1, 1), "weight_scale", F32), "fp8", 0, ("input_scale",)
    ),
    "ct fp8 blocks": Kind(
        _float("block", block_structure=[32, 32]),
        lambda r, n, c: block_fp8(r, n, c, 32, "weight_scale", F32),
        "fp8",
        32,
    ),
    "ct nvfp4": Kind(
        compressed("nvfp4-pack-quantized", **_NV),
        lambda r, n, c: nvfp4(r, n, c, True),
        "nvfp4",
        16,
        ("weight_global_scale", "input_global_scale"),
    ),
    "ct mxfp4": Kind(
        compressed("mxfp4-pack-quantized", num_bits=4, **_MX),
        lambda r, n, c: mxfp4(r, n, c, "weight_packed", "weight_scale", torch.uint8),
        "mxfp4",
        32,
    ),
    "ct mxfp8": Kind(
        compressed("mxfp8-quantized", num_bits=8, **_MX), lambda r, n, c: mxfp8(r, n, c, "weight_scale"), "mxfp8", 32
    ),
    "modelopt nvfp4": Kind(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16},
        lambda r, n, c: nvfp4(r, n, c, False),
        "nvfp4",
        16,
        ("input_scale",),
    ),
    "modelopt mxfp8": Kind(
        {"quant_method": "modelopt", "quant_algo": "MXFP8"}, lambda r, n, c: mxfp8(r, n, c, "weight_scale"), "mxfp8", 32
    ),
    "modelopt fp8": Kind(
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        lambda r, n, c: scaled_fp8(r, n, c, (), "weight_scale", F32),
        "fp8",
        0,
        ("input_scale",),
    ),
    "gptq": Kind(_GPTQ, lambda r, n, c: gptq(r, n, c, 4, 32, 1), "int4fp16", 32, ("g_idx",)),
    "gptq v2": Kind(
        _GPTQ | {"checkpoint_format": "gptq_v2"}, lambda r, n, c: gptq(r, n, c, 4, 32, 0), "int4fp16", 32, ("g_idx",)
    ),
    "gptq int8": Kind(
        _GPTQ | {"bits": 8, "group_size": -1}, lambda r, n, c: gptq(r, n, c, 8, 0, 1), "int8fp16", 128, ("g_idx",)
    ),
    "awq": Kind(_AWQ, lambda r, n, c: awq(r, n, c, 32), "int4fp16", 32),
}


def weight(kind: str, rows: int, cols: int, module: str = "m.experts.0.up_proj", seed: int = 0):
    """A random weight's tensors under a module's name, and its value in BF16."""
    tensors, value = KINDS[kind].make(np.random.default_rng(seed), rows, cols)
    return {f"{module}.{n}": x for n, x in tensors.items()}, torch.from_numpy(value).to(torch.bfloat16)
