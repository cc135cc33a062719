"""Generated experts for benchmarks: memory, a module, torch's side, routing."""

import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from benchmarks.random_matrices import Coded, coded, gaussian
from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels.reference import plain_weights, sections_of

SIZES = (2048, 768, 128, 8)  # of Qwen3-30B-A3B: hidden, intermediate, experts, top_k
VERSIONS = (Version.of("bf16"), *(Version.of(f"w{bits}", 128) for bits in (8, 4, 3, 2, 1)))
RELEASED = tuple(Version.of(n) for n in ("mxfp4", "nvfp4", "fp8", "mxfp8", "fp8row"))  # which a GPU does not run yet
NAMED = tuple(map(Version.of, ("w4d5", "w3d4", "w2d3", "w1d2", "t3", "t2d3", "t2")))  # measured where they are named
HUGE = 2 << 20


def paged(count: int, size: int) -> torch.Tensor:
    """Memory of its own for `count` extents, uint8 [count, size], in huge pages."""
    room = mmap.mmap(-1, -(-count * size // HUGE) * HUGE + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        room.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(room, dtype=torch.uint8)  # which keeps the mapping
    begin = -flat.data_ptr() % HUGE
    return flat[begin : begin + count * size].view(count, size)


class Pool:
    """Many experts of one version: copies of one, each in its own memory."""

    def __init__(self, matrices: tuple[Matrix, ...], version: Version, count: int) -> None:
        self.version = version
        self.size = version.resident_size(matrices)
        self.memory = paged(count, -(-self.size // 64) * 64)
        self.memory[:, : self.size] = extent_like(matrices, version, np.random.default_rng(0))
        self.addresses = np.array([row.data_ptr() for row in self.memory], np.uint64)

    def __len__(self) -> int:
        return len(self.memory)

    def __getitem__(self, which: int) -> torch.Tensor:
        """One expert's extent."""
        return self.memory[which][: self.size]


def extent_like(matrices: tuple[Matrix, ...], version: Version, rng: np.random.Generator) -> torch.Tensor:
    """One expert like a trained one: scales of one size, zero points about the middle, biases where it has them."""
    extent = torch.zeros(version.resident_size(matrices), dtype=torch.uint8)
    plain = plain_weights(extent, sections_of(matrices, version))
    for weights in plain:
        weights.copy_(torch.from_numpy(rng.standard_normal(weights.shape, np.float32) * np.float32(0.02)))
    if not plain:
        values: list[Coded] = []
        for i, m in enumerate(matrices):
            seed = int(rng.integers(1 << 31))
            if version.entropy_coded:  # what it takes in a file depends on its values
                values.append(gaussian(m, version, seed))
            else:
                values.append(coded(m, version.at(i), seed, small=0.0))  # denormal numbers cost a processor time
        version.restore(matrices, version.encode(matrices, values)[0], extent.numpy())
    return extent


def module_like() -> Any:
    """An experts module whose gate is silu(gate) * up, which kernels fuse."""
    from transformers.integrations.moe import _default_apply_gate

    members = {"has_gate": True, "act_fn": torch.nn.SiLU(), "_apply_gate": _default_apply_gate}
    return type("Experts", (), members)()


def torch_forward(
    weights: Sequence[Sequence[torch.Tensor]], x: torch.Tensor, index: torch.Tensor, gates: torch.Tensor
) -> torch.Tensor:
    """BF16 experts as plain torch runs them: sorted once, two F.linear an expert."""
    tokens, top_k = index.shape
    flat = index.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=len(weights)).tolist()
    out = x.new_empty(tokens * top_k, x.shape[-1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            slots = order[start : start + count]
            h = torch.nn.functional.linear(x[slots // top_k], weights[expert][0])
            gate, up = h.chunk(2, dim=-1)
            out[slots] = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, weights[expert][1])
            start += count
    return (out * gates.reshape(-1, 1)).view(tokens, top_k, -1).sum(dim=1).to(x.dtype)


def routed(tokens: int, experts: int, top_k: int) -> torch.Tensor:
    """Distinct experts for every token."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)])
