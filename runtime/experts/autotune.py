"""Measures, on this machine, up to how many tokens an expert runs faster from its packed bytes than unpacked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels.affine_native import LayerForms, has_tiles, product, unpack
from moepack.runtime.kernels.forms import handle, resident_size

ROWS, COLS, RUNS = 1024, 2048, 5


def measure_limit(dtype: torch.dtype, name: str, candidates: Sequence[int]) -> int:
    """The most of `candidates` with which an encoding's fused kernel is not slower than tiles, ours or torch's."""
    m, version = Matrix("m", ROWS, COLS), Version.of(name)
    extent = torch.zeros(resident_size((m,), version), dtype=torch.uint8)
    extent.random_(0, 256, generator=torch.Generator().manual_seed(0))
    extent.view(torch.int16).bitwise_and_(0x3FFF)  # as scales: numbers, none of them huge
    plain = extent[: 2 * m.weights].view(torch.bfloat16).view(ROWS, COLS) if version.is_lossless else extent
    forms = LayerForms((m,), (version,))
    handles = np.array([handle(extent.data_ptr(), 0)], np.uint64)
    best = candidates[0]
    for tokens in candidates:
        x = torch.ones(tokens, COLS, dtype=dtype)
        index, out = torch.zeros(tokens, 1, dtype=torch.int64), torch.empty(tokens, ROWS, dtype=dtype)
        tile = torch.empty(COLS, 256, dtype=dtype)
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(RUNS + 1):
            began = time.perf_counter()
            product(forms, 0, handles, x, index, out)
            middle = time.perf_counter()
            if has_tiles(dtype):
                product(forms, 0, handles, x, index, out, np.zeros(1, np.int64))
            elif version.is_lossless:
                torch.nn.functional.linear(x, plain.to(dtype))
            else:
                for first in range(0, ROWS, 256):
                    unpack(forms, 0, 0, extent, tile, first)
                    torch.mm(x, tile, out=out[:, first : first + 256])
            times[0].append(middle - began)
            times[1].append(time.perf_counter() - middle)
        fused, unpacked = (statistics.median(t[1:]) for t in times)
        if fused > unpacked:
            break
        best = tokens
    return best
