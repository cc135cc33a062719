"""A calibration pass taken through a model's layers by hand, as a build does."""

from collections.abc import Iterable

import torch
from torch import Tensor

from moepack.calibrate.forward import CalibrationPass, Observation
from moepack.calibrate.stream import StreamedModel


def begun(stream: StreamedModel, ids: Tensor, batch_size: int, dtype: torch.dtype = torch.float32) -> CalibrationPass:
    """A pass before the first layer; the part outside the layers stays loaded."""
    walk = CalibrationPass(stream, ids, batch_size, dtype)
    stream.load(None)
    stream.to_compute(None, dtype)
    walk.start()
    return walk


def through(
    walk: CalibrationPass, stream: StreamedModel, layers: Iterable[int], dtype: torch.dtype = torch.float32
) -> list[Observation | None]:
    """Run some layers; what reached the experts of each."""
    seen = []
    for i in layers:
        stream.load(i)
        stream.to_compute(i, dtype)
        seen.append(walk.run_layer(i))
        stream.free(i)
    return seen
