"""The decoder of coded BF16 matrices: its time for many experts."""

import torch

from benchmarks import codec
from benchmarks.kernels.gpu import seconds
from moepack.pack.codec import exponent_fast
from moepack.pack.codec.exponent import HEADER
from moepack.runtime.kernels.exponent_triton import DecodeJob, decode

from .rows import Entry, Measured, Rows, Setting

EXPERT = ((1536, 2048), (2048, 768))  # Qwen3-30B-A3B's matrices


def rows(setting: Setting) -> Rows:
    """The stage's rows."""
    return {"decoder: 32 experts": Entry(lambda: experts(setting))}


def _job(shape: tuple[int, int], seed: int, device: torch.device) -> DecodeJob:
    """A generated matrix, coded."""
    bits = codec.gaussian(shape, seed)
    coded = exponent_fast.encode(bits)
    room = torch.zeros(-(-len(coded) // 64) * 64, dtype=torch.uint8, device=device)
    room[: len(coded)] = torch.from_numpy(coded)
    out = torch.empty(bits.size, dtype=torch.bfloat16, device=device)
    return DecodeJob(room[: len(coded)], coded[:HEADER].copy(), out)


def experts(setting: Setting) -> Measured:
    """Microseconds for 32 experts of Qwen3-30B-A3B in one launch."""
    jobs = [_job(shape, i, setting.torch) for i in range(32) for shape in EXPERT]
    took = seconds(lambda: decode(jobs), 9)
    written = sum(2 * job.out.numel() for job in jobs)
    return Measured(took * 1e6, "us", more={"GB/s": written / took / 1e9})
