"""Arithmetic that predicts the time of a kernel and of a decoding step, from what is published, counted and compiled.

A kernel takes a node of a graph, and then the longest of: its bytes at the rate of device memory; its instructions at
the rate at which SMs issue them; its bytes at the rate that loads in flight allow (Little's law); its products at the
tensor cores' rate. A step by graph is the sum over its nodes. Launched one by one it is that or the host's time for as
many launches, whichever is longer. Pure: numbers in, numbers out. Nothing here has been fitted to a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

from moepack.pack.spec import Matrix, Version

from .devices import Gpu

DECODER = "exponents' decoder"


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel (issue.py)."""

    tokens: int  # of a program
    rows: int
    weights: int  # of a turn of its loop
    gated: bool
    warps: int
    stages: int
    registers: int  # a thread
    shared: int  # bytes a program
    instructions: float  # thread-instructions a weight


@dataclass(frozen=True, slots=True)
class Assumed:
    """What is neither published nor counted: the first things that a run on a GPU is to correct."""

    stream: float = 0.9  # share of the published bandwidth that a long copy reaches
    gemv: float = 0.75  # the same of torch's products of one token with a BF16 matrix of megabytes
    link: float = 0.8  # share of PCIe's rate that a copy from pinned memory reaches
    node: float = 2.1e-6  # seconds of a graph's node beside its work
    host: float = 8.5e-6  # seconds of host time an operation: 36 to 44 ms for a step's 4,727, measured on a CPU alone
    latency: float = 0.7e-6  # seconds until a load from device memory arrives
    warp: float = 0.5  # instructions a cycle of one warp, by itself
    schedulers: int = 4  # of an SM, an instruction a cycle each
    tensor: float = 0.6  # share of the tensor cores' rate
    promotion: float = 1e-4  # seconds of host time a promotion: a thread wakes, issues a copy, and polls for its end
    register: float = 0.1e-9  # seconds a byte of cudaHostRegister (vLLM #51081)


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds that each limit alone would take."""

    bytes: float
    issue: float
    flight: float
    tensor: float

    @property
    def seconds(self) -> float:
        """The longest."""
        return max(self.bytes, self.issue, self.flight, self.tensor)

    @property
    def bound_by(self) -> str:
        """Which it is."""
        named = {"bytes": self.bytes, "issue": self.issue, "loads in flight": self.flight, "tensor": self.tensor}
        return max(named, key=lambda name: named[name])


def resident(gpu: Gpu, kernel: Kernel) -> int:
    """Programs that an SM holds at a time."""
    each = max(32 * kernel.registers, 256) * kernel.warps
    by_registers = 65536 // max(each, 1)
    by_shared = gpu.shared // (kernel.shared + 1024)
    return max(1, min(by_registers, by_shared, gpu.threads // (32 * kernel.warps), 32))


def limits(gpu: Gpu, a: Assumed, kernel: Kernel, programs: int, weights: float, read: float) -> Limits:
    """What a launch takes: `weights` that a program goes through, `read` bytes of them all from device memory."""
    deepest = ceil(programs / gpu.sms)  # programs of the busiest SM
    at_once = min(deepest, resident(gpu, kernel))
    rate = min(a.schedulers, at_once * kernel.warps * a.warp)  # warp-instructions a cycle of an SM
    issue = deepest * weights * kernel.instructions / 32 / rate / gpu.clock
    ahead = kernel.weights * read / (weights * programs) * max(kernel.stages - 1, 1)  # bytes that a program waits for
    in_flight = min(programs, gpu.sms) * at_once * ahead
    tensor = 2 * max(kernel.tokens, 1) * weights * programs / (gpu.tensor * a.tensor) if kernel.tokens else 0.0
    return Limits(read / (gpu.bandwidth * a.stream), issue, read * a.latency / in_flight, tensor)


def distinct(experts: int, top_k: int, tokens: int) -> float:
    """Experts that some token of a batch is routed to, if routing is even."""
    return experts * (1 - (1 - top_k / experts) ** tokens)


@dataclass(frozen=True, slots=True)
class Shape:
    """A layer's experts."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    bias: bool = False

    @property
    def matrices(self) -> tuple[Matrix, Matrix]:
        """Gate and up as one, and down."""
        return (
            Matrix("gate_up", 2 * self.inner, self.hidden, bias=self.bias),
            Matrix("down", self.hidden, self.inner, bias=self.bias),
        )


LAYER = Shape(2048, 768, 128, 8)  # Qwen3-30B-A3B's


@dataclass(frozen=True, slots=True)
class Products:
    """The two products of a layer's experts."""

    limits: tuple[Limits, Limits]
    read: float  # bytes

    @property
    def seconds(self) -> float:
        """Of both, without nodes."""
        return sum(x.seconds for x in self.limits)


def products(
    gpu: Gpu, a: Assumed, kernels: dict[str, Any], shape: Shape, version: Version, tokens: int
) -> Products | None:
    """What a layer's products take for a batch, or `None` where its kernels were not counted."""
    slots = tokens * shape.top_k
    of = str(gpu.capability)
    fused = f"{version.name} plain bias" if shape.bias else f"{version.name} gated"
    plain = f"{version.name} plain{' bias' * shape.bias}"
    if f"{plain} decode" not in kernels or f"{fused} decode" not in kernels:
        return None
    phase = "decode" if slots <= 2 * kernels[f"{plain} decode"][of]["tokens"] * shape.experts else "prefill"
    used = distinct(shape.experts, shape.top_k, tokens)
    size = version.resident_size(shape.matrices)
    every = sum(m.weights for m in shape.matrices)
    found = []
    read = used * size
    for name, matrix in zip((fused, plain), shape.matrices, strict=True):
        kernel = Kernel(**kernels[f"{name} {phase}"][of])
        made = matrix.rows // (1 + kernel.gated)
        blocks = used if slots / used <= kernel.tokens / 2 else slots / kernel.tokens + used / 2
        programs = ceil(blocks) * ceil(made / kernel.rows)
        weights = kernel.rows * (1 + kernel.gated) * matrix.cols
        found.append(limits(gpu, a, kernel, programs, weights, read * matrix.weights / every))
    return Products((found[0], found[1]), read)


@dataclass(frozen=True, slots=True)
class Step:
    """A decoding step of one sequence: seconds."""

    floor: float  # of its bytes alone, at the published bandwidth
    device: float  # of its nodes one after another, as a graph
    eager: float

    @property
    def rates(self) -> dict[str, float]:
        """Tokens a second."""
        return {"eager": 1 / self.eager, "graph": 1 / self.device, "byte floor": 1 / self.floor}


def step(
    gpu: Gpu, a: Assumed, kernels: dict[str, Any], counted: dict[str, Any], version: Version, dense_bits: float = 16
) -> Step | None:
    """A step with all experts resident at one version, and its matrices outside the experts at `dense_bits` a weight.

    Matrices of fewer bits are taken to run as BF16 ones do, byte for byte: no kernel of ours does so on a GPU yet.
    """
    shape = shape_of(counted)
    layer = products(gpu, a, kernels, shape, version, 1)
    if layer is None:
        return None
    dense = counted["bytes of matrices"] * dense_bits / 16
    read = dense + counted["layers"] * layer.read
    device = (
        counted["operations"] * a.node + counted["layers"] * layer.seconds + dense / (gpu.bandwidth * a.stream * a.gemv)
    )
    return Step(read / gpu.bandwidth, device, max(device, counted["operations"] * a.host))


def shape_of(counted: dict[str, Any]) -> Shape:
    """The experts of what steps.py counted."""
    return Shape(counted["hidden"], counted["inner"], counted["experts"], counted["top_k"], counted["bias"])


def decoder(gpu: Gpu, a: Assumed, kernels: dict[str, Any], weights: int, bits: float) -> tuple[float, str]:
    """Seconds to decode coded weights of `bits` each into BF16, by one launch, and what binds."""
    kernel = Kernel(**kernels[DECODER][str(gpu.capability)])
    tile = 8192 * kernel.warps  # weights of a program
    programs = ceil(weights / tile)
    moved = weights * (bits / 8 + 2)
    found = limits(gpu, a, kernel, programs, tile, moved)
    return a.node + found.seconds, found.bound_by


def offloaded(
    step: Step, a: Assumed, gpu: Gpu, counted: dict[str, Any], version: Version, hits: float
) -> dict[str, float]:
    """Tokens a second if a share of a token's experts is not resident and the pass waits for them from pinned memory.

    Misses of a layer are copied one after another and computing waits: no overlap is assumed.
    """
    size = version.resident_size(shape_of(counted).matrices)
    missed = counted["layers"] * counted["top_k"] * (1 - hits) * size
    wait = missed / (gpu.link * a.link)
    return {"eager": 1 / (step.eager + wait), "graph": 1 / (step.device + wait)}


def promotion(gpu: Gpu, a: Assumed, size: int, slots: int) -> float:
    """Seconds from one promotion to the next, of an extent in pinned memory, with so many under way."""
    copy = size / (gpu.link * a.link)
    return max(copy, (copy + a.promotion) / slots)
