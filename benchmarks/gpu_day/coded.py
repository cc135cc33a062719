"""The decoder of coded BF16 matrices, beside DFloat11's."""

from __future__ import annotations

import importlib.util

import numpy as np
import torch

from benchmarks import codec
from moepack.pack.codec import exponent_fast
from moepack.pack.codec.exponent import HEADER

from .rows import Entry, Measured, Rows, Setting


def rows(setting: Setting) -> Rows:
    """The stage's rows."""
    needs = next((f"{n} is not installed" for n in ("dfloat11", "cupy") if importlib.util.find_spec(n) is None), "")
    return {
        "decoder: wrong weights": Entry(lambda: exact(setting), on_cpu=True),
        "decoder: 32 experts": Entry(lambda: experts(setting)),
        "decoder: DFloat11's time over ours, one matrix": Entry(lambda: beside(setting), needs=needs),
    }


def exact(setting: Setting) -> Measured:
    """Weights that come back otherwise, of a small matrix; the decoder's own report counts, too."""
    from moepack.runtime.kernels.exponent_triton import DecodeJob, decode

    bits = codec.gaussian((48, 200) if setting.small else (768, 2048), 0)
    coded = exponent_fast.encode(bits)
    room = torch.zeros(-(-len(coded) // 64) * 64, dtype=torch.uint8, device=setting.torch)
    room[: len(coded)] = torch.from_numpy(coded)
    out = torch.empty(bits.size, dtype=torch.bfloat16, device=setting.torch)
    status = decode([DecodeJob(room[: len(coded)], coded[:HEADER].copy(), out)])
    got = out.view(torch.int16).cpu().numpy().view(np.uint16)
    return Measured(int((got != bits).sum()) + int(status.sum()), "weights", limit=0)


def experts(setting: Setting) -> Measured:
    """Microseconds for 32 experts of Qwen3-30B-A3B in one launch."""
    found, targets = codec.gpu(9, None)
    rate = found[0]["decode GB/s"]
    size = 2 * 32 * 3 * 2048 * 768
    more = {"GB/s": rate, "of the byte floor": targets[0].value}
    return Measured(size / rate / 1e3, "us", more=more)


def beside(setting: Setting) -> Measured:
    """DFloat11's time over ours."""
    found, targets = codec.gpu(9, codec.dfloat11())
    ratio = next(t.value for t in targets if "DFloat11" in t.name)
    return Measured(ratio, "times", more={r["codec"]: r["decode GB/s"] for r in found})
