"""The kt-kernel side: a layer's experts in ggml's types, in kt-kernel's own 4 bits, and in BF16.

Runs in an environment that has kt-kernel, with the benchmark's own torch. What classes there are depends on the
processor: one that is missing is an answer, not a failure.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .ggml_types import TYPES
from .worker import answer, threads

GROUP = 32  # of RAWINT4: the size that its published checkpoints have
_MOST = 512  # tokens of a pass
_NATIVE = {"RAWINT4": ("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE"), "BF16": ("AMXBF16_MOE", "AVX2BF16_MOE")}
_layers: dict[str, tuple[list[Any], int, int, list[Any]]] = {}  # copies of a layer, hidden, experts, what they read
_kept: list[Any] = []


def _extension() -> tuple[Any, Any]:
    package = importlib.import_module("kt_kernel")
    if not _kept:
        wanted = package.kt_kernel_ext.WorkerPoolConfig()
        wanted.subpool_count = 1
        wanted.subpool_numa_map = [0]
        wanted.subpool_thread_count = [threads()]
        _kept.append(package.kt_kernel_ext.CPUInfer(wanted))
    return package.kt_kernel_ext, _kept[0]


def open_layer(
    key: str, encoding: str, sizes: Sequence[int], pool: int, file: str | None = None, parts: Sequence[int] = ()
) -> dict[str, float]:
    """Hold a layer's experts.

    Args:
        key: to call them by.
        encoding: a ggml type, "RAWINT4" or "BF16".
        sizes: hidden, intermediate, top_k and how many experts at the least.
        pool: bytes that the experts have at the least.
        file: of a ggml type, the bytes of one expert's gate, up and down.
        parts: their sizes.

    Raises:
        LookupError: when this build, or this processor, has no such kernel.
    """
    ext, infer = _extension()
    hidden, inner, top_k, least = sizes
    weights = 3 * hidden * inner
    if file is None:
        size = 2 * weights if encoding == "BF16" else weights // 2 + 2 * weights // GROUP
    else:
        size = sum(parts)
    off = torch.zeros(least, dtype=torch.bool)
    order = torch.arange(least, dtype=torch.int64)
    kept: list[Any] = [off, order]
    layers = []
    for number in range(max(1, -(-pool // (least * size)))):  # layers with more experts than a model's crash
        config = ext.moe.MOEConfig(least, top_k, hidden, inner, off.data_ptr())
        config.layer_idx = number
        config.pool = infer.backend_
        config.max_len = _MOST
        if file is not None:
            made = _of_ggml(ext, config, encoding, np.fromfile(file, np.uint8), parts, least, kept)
        else:
            made = _native(ext, config, encoding, (hidden, inner), least, kept)
        infer.submit(made.load_weights_task(order.data_ptr()))
        infer.sync()
        layers.append(made)
    _layers[key] = layers, hidden, least, kept
    return {"bytes": size, "bits": 8 * size / weights, "experts": least * len(layers)}


def _of_ggml(ext: Any, config: Any, encoding: str, data: Any, parts: Sequence[int], count: int, kept: list[Any]) -> Any:
    made = getattr(ext.moe, "MOE", None)
    if made is None:
        raise LookupError("this kt-kernel was built without its GGUF backend")
    kind = getattr(ext.kvcache.ggml_type, encoding, None)
    if kind is None or int(kind) != TYPES[encoding].number:
        raise LookupError(f"kt-kernel has no {encoding}")
    at = 0
    for name, size in zip(("gate", "up", "down"), parts, strict=True):
        kept.append(torch.from_numpy(np.tile(data[at : at + size], count)))
        setattr(config, f"{name}_proj", kept[-1].data_ptr())
        setattr(config, f"{name}_type", kind)
        at += size
    config.m_block = 32
    config.group_min_len = 10
    config.group_max_len = _MOST
    config.hidden_type = ext.kvcache.ggml_type.BF16
    return made(config)


def _native(ext: Any, config: Any, encoding: str, shape: tuple[int, int], count: int, kept: list[Any]) -> Any:
    made = next((c for name in _NATIVE[encoding] if (c := getattr(ext.moe, name, None)) is not None), None)
    if made is None:
        raise LookupError(f"kt-kernel has no {encoding} for this processor")
    hidden, inner = shape
    generator = torch.Generator().manual_seed(0)
    for name, (rows, cols) in {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}.items():
        if encoding == "BF16":
            weight = (torch.randn(rows, cols, generator=generator) * 0.02).bfloat16()
            scale = None
        else:
            weight = torch.randint(0, 256, (rows, cols // 2), generator=generator, dtype=torch.uint8)
            scale = (torch.rand(rows, cols // GROUP, generator=generator) * 0.005 + 0.005).bfloat16()
        kept += [weight, scale]
        setattr(config, f"{name}_projs", [[weight.data_ptr()] * count])
        setattr(config, f"{name}_scales", [[0 if scale is None else scale.data_ptr()] * count])
    if encoding == "RAWINT4":
        config.quant_config.bits = 4
        config.quant_config.group_size = GROUP
        config.quant_config.zero_point = False
    return made(config)


def run_layer(key: str, index: list[list[int]], step: int, first: int, passes: int, warm: int) -> list[float]:
    """Seconds of each of so many passes after `warm` others; pass i takes the experts `index` + i * `step`."""
    _, infer = _extension()
    layers, hidden, count, _ = _layers[key]
    ids = torch.tensor(index)
    x = torch.randn(len(ids), hidden, generator=torch.Generator().manual_seed(1)).bfloat16()
    out = torch.empty_like(x)
    gates = torch.full(ids.shape, 1 / ids.shape[1])
    length = torch.tensor([len(ids)], dtype=torch.int32)
    times = []
    for i in range(first, first + warm + passes):
        chosen = ((ids + i * step) % count).contiguous()
        layer = layers[i * step // count % len(layers)]
        began = time.perf_counter()
        infer.submit(
            layer.forward_task(
                length.data_ptr(),
                ids.shape[1],
                chosen.data_ptr(),
                gates.data_ptr(),
                x.data_ptr(),
                out.data_ptr(),
                False,
            )
        )
        infer.sync()
        times.append(time.perf_counter() - began)
    if not bool(out.isfinite().all()):
        raise ArithmeticError("kt-kernel's results are not finite")
    return times[warm:]


def close_layer(key: str) -> None:
    """Give its memory back."""
    _layers.pop(key)


def versions() -> dict[str, str]:
    """What this side is."""
    package = importlib.import_module("kt_kernel")
    return {"kt-kernel": package.__version__, "kernels of": package.__cpu_variant__}


if __name__ == "__main__":
    torch.set_num_threads(threads())
    answer({f.__name__: f for f in (open_layer, run_layer, close_layer, versions)})
