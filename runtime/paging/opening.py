"""What fills pages on a device, and how fast experts are brought there. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moepack.pack.reader import Bundle
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.devices import torch_cuda
from moepack.runtime.devices.contract import Device
from moepack.runtime.devices.cpu import CpuDevice
from moepack.runtime.kernels.forms import Form
from moepack.runtime.policies.contract import Ladder
from moepack.runtime.store.files import Stored

from .address_space import CpuAddressSpace
from .cpu_filler import CpuFiller
from .filler import PageFiller


def open_filler(
    device: Device,
    layers: Sequence[tuple[ExpertLayer, Sequence[Form]]],
    version: Version,
    stored: Callable[[int, int], Stored],
    staging: int,
) -> PageFiller:
    """A device's, with addresses for every expert.

    Args:
        device: of the plan.
        layers: and where the matrices of their experts stand once decoded.
        version: the lossless one.
        stored: where an expert's extent stands, by layer position and expert.
        staging: bytes of the largest extent.

    Raises:
        InputError: where the device or the system does not give what it takes.
    """
    if isinstance(device, CpuDevice):
        described = [(layer.matrices, layer.experts) for layer, _ in layers]
        return CpuFiller(CpuAddressSpace(described, version), layers, stored, staging)
    from moepack.runtime.devices.cuda import CudaDevice

    from .gpu_filler import GpuFiller

    assert isinstance(device, CudaDevice)
    return GpuFiller(device, layers, version, stored, staging)


def gpu_rates(bundle: Bundle, ladder: Ladder, device: torch.device) -> tuple[float, ...]:
    """Bytes of weights a second that experts are brought at on a GPU from each placement of a ladder.

    Raises:
        BundleError: when an extent that it is measured on is damaged.
    """
    from .gpu_rates import forget_what_torch_keeps, measure_rates

    rates = measure_rates(bundle, ladder, torch_cuda.TorchGpu(device))
    forget_what_torch_keeps()
    return rates
