"""The GPUs that times are predicted for: what their makers publish. Measures nothing.

RTX 3090: NVIDIA Ampere GA102 GPU Architecture, appendix A. RTX 4090: NVIDIA Ada GPU Architecture, appendix A. RTX 5090:
NVIDIA RTX Blackwell GPU Architecture, appendix A. H100 and H200 SXM: NVIDIA's data sheets; the clock is that at which
989.4 TFLOPS are 4,096 operations a clock and SM. Tensor cores' rates are dense, BF16 with float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU and its slot: bytes, hertz, operations a second."""

    name: str
    capability: int  # 10 times the compute capability
    sms: int
    clock: float
    bandwidth: float  # bytes a second of device memory
    cache: int  # bytes of L2
    memory: float  # bytes
    tensor: float  # BF16 operations a second
    link: float  # bytes a second from the host: PCIe, 16 lanes
    shared: int  # bytes of shared memory of an SM
    threads: int  # that an SM holds


GPUS = {
    g.name: g
    for g in (
        Gpu("RTX 3090", 86, 82, 1.695e9, 936e9, 6 << 20, 24e9, 71e12, 31.5e9, 100 << 10, 1536),
        Gpu("RTX 4090", 89, 128, 2.52e9, 1008e9, 72 << 20, 24e9, 165.2e12, 31.5e9, 100 << 10, 1536),
        Gpu("RTX 5090", 120, 170, 2.407e9, 1792e9, 96 << 20, 32e9, 209.5e12, 63e9, 100 << 10, 1536),
        Gpu("H100", 90, 132, 1.83e9, 3350e9, 50 << 20, 80e9, 989.4e12, 63e9, 228 << 10, 2048),
        Gpu("H200", 90, 132, 1.83e9, 4800e9, 50 << 20, 141e9, 989.4e12, 63e9, 228 << 10, 2048),
    )
}


def named(shown: str) -> Gpu | None:
    """The GPU that torch shows by this name: "NVIDIA H100 80GB HBM3" and the like; None for one that is not listed."""
    words = shown.split()
    return next((g for name, g in GPUS.items() if name in shown and name.split()[-1] in words), None)
