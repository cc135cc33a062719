"""Pages of a GPU that stay where they are: an expert's slot is the same in every layer and step.

A layer's launches decode the experts that its tokens chose, and the products follow on the same stream. All that they
read is on the device: which experts, where their coded bytes are (in device memory, or in pinned host memory, from
where a launch first brings them), and the slots. So no launch waits for the host, and a CUDA graph holds them. Steps
share the slots, so they take turns. The bytes of every expert stay in host memory; the device holds as many of them,
coded, as fit.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.codec.exponent import TILE
from moepack.pack.errors import BundleError, CodecError
from moepack.pack.spec import Version
from moepack.runtime.devices.cuda import CudaDevice, StreamMark
from moepack.runtime.experts.handles import LayerExperts, Snapshot
from moepack.runtime.experts.packed import CodedPart, GpuPackedExtent, parts_of
from moepack.runtime.kernels import exponent_triton
from moepack.runtime.planning.paging import InPlaceSize
from moepack.runtime.policies.placements import Where

log = logging.getLogger("moepack.runtime")
Array = npt.NDArray[Any]


class PagesInPlace:
    """The slots of the experts of one layer, in which all layers take turns. Steps call it one at a time."""

    def __init__(self, device: CudaDevice, layers: Sequence[LayerExperts], version: Version, size: InPlaceSize) -> None:
        """Allocate the slots."""
        self._device = device
        self._version = version
        self._layers = tuple(x.of for x in layers)
        self._bytes = device.gpu.block(size.bytes)
        parts = self._bytes[: size.bytes].split([size.experts * size.slot, size.experts * size.stage, size.places])
        self._slots = parts[0].view(size.experts, size.slot)
        self._places = parts[2]
        self._stage = parts[1].view(size.experts, size.stage).view(torch.int32)
        self._parts: dict[tuple[int, int], tuple[CodedPart, ...]] = {}
        self._of: list[Any] = []  # the `CodedLayer` of each layer, once all experts are loaded
        self._status = device.gpu.memory(4 * len(layers)).view(torch.int32).zero_()
        self._report = device.gpu.pinned(4 * len(layers)).view(torch.int32).zero_()
        self._reported: StreamMark | None = None
        for position, layer in enumerate(self._layers):
            layer.in_place = partial(self.decode, position)
            layer.second = _coded_bytes

    # --- handles

    def extent(self, position: int, expert: int) -> Tensor:
        """Return the memory of an expert's slot, uint8."""
        slot: Tensor = self._slots[expert]
        return slot[: self._version.resident_size(self._layers[position].layer.matrices)]

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> GpuPackedExtent:
        """Return the coded bytes of an expert in host memory, or copied from there to the device.

        Raises BundleError when they are malformed.
        """
        of = self._layers[position]
        key = (position, expert)
        if key not in self._parts:  # its bytes in host memory, which come first
            try:
                self._parts[key] = parts_of(of.layer, extent.numpy())
            except CodecError as error:
                raise BundleError.single(where, "codec", str(error)) from None
        return GpuPackedExtent(extent, of.layer, of.forms[self._version.name], where, self._parts[key])

    # --- steps

    def serve(self) -> None:
        """Begin to serve, when all experts are loaded."""
        self._of = self._all_places()

    def begin(self) -> None:
        """Begin a step: later work on this thread's compute stream waits for the step before, the host for nothing.

        Raises BundleError if an earlier step met bytes that do not decode.
        """
        if self._reported is not None:
            with self._device.gpu.computing():
                self._device.gpu.wait(self._reported.event)
            if self._reported.done():
                self._check()

    def end(self) -> None:
        """End a step: have the decoders' reports copied to the host."""
        gpu = self._device.gpu
        with gpu.computing():
            try:
                gpu.copy(self._report, self._status)
            finally:
                self._reported = StreamMark(gpu.record())

    def _check(self) -> None:
        self._reported = None
        for position, number in enumerate(self._report.tolist()):
            if number:
                self._status.zero_()
                self._report.zero_()
                where = f"layer {self._layers[position].layer.index}, expert {number - 1}, version {self._version.name}"
                raise BundleError.single(
                    where, "codec", "a matrix does not decode: tokens of an earlier pass are wrong"
                )

    def decode(self, position: int, snapshot: Snapshot, experts: Tensor | None, counts: Tensor) -> None:
        """Decode the paged ones of some experts that have slots, on the current stream (`decode_chosen`)."""
        exponent_triton.decode_chosen(self._of[position], experts, counts, snapshot.seconds)

    def _all_places(self) -> list[Any]:
        """Copy to the device where each expert's matrices are in its extent."""
        out = []
        begins = 0
        for position, of in enumerate(self._layers):
            made = self._places_in(position)
            given = np.concatenate([x.reshape(-1).view(np.uint8) for x in made])
            there = self._places[begins : begins + len(given)]
            there.copy_(torch.from_numpy(given))
            begins += len(given)
            fields, words, tables = there.split([x.nbytes for x in made])
            most = max(-(-m.weights // TILE) for m in of.layer.matrices), int(made[1].max())
            out.append(
                exponent_triton.CodedLayer(
                    fields.view(torch.int64).view(made[0].shape),
                    tables.view(torch.uint16).view(made[2].shape),
                    words.view(torch.int64),
                    self._stage,
                    self._slots,
                    self._status[position : position + 1],
                    most,
                    any(m.bias for m in of.layer.matrices),
                )
            )
        return out

    def _places_in(self, position: int) -> tuple[Array, Array, Array]:
        """Return a layer's `fields`, `sizes` and `tables`, as in `CodedLayer`."""
        of = self._layers[position]
        fields = []
        tables = []
        sizes = []
        shape = of.layer.experts, len(of.layer.matrices)
        for e in range(of.layer.experts):
            end = 0
            for part, form, m in zip(
                self._parts[position, e], of.forms[self._version.name], of.layer.matrices, strict=True
            ):
                bias = (part.bias, form.bias, m.rows) if part.bias >= 0 else (0, 0, 0)
                row, table = exponent_triton.places_of(part.header, part.at, form.low, bias)
                fields.append(row)
                tables.append(table)
                end = max(end, part.at + part.size, bias[0] + 2 * bias[2])
            sizes.append(-(-end // 16) * 4)  # blocks are whole pages
        return (
            np.array(fields, np.int64).reshape(*shape, -1),
            np.array(sizes, np.int64),
            np.array(tables, np.uint16).reshape(*shape, -1),
        )

    # --- the end

    def forget(self) -> None:
        """Free all memory, once no step can run any more and all its work has ended."""
        try:
            if self._reported is not None:
                self._reported.wait()
                self._check()
        except RuntimeError:  # the device is gone
            pass
        except BundleError as error:
            log.warning("%s", error)
        self._device.gpu.free(self._bytes)
        self._device.free()


def _coded_bytes(snapshot: Snapshot) -> npt.NDArray[np.int64]:
    """The address of each paged expert's coded bytes, plus one in host memory; 0 for others."""
    out = np.zeros(len(snapshot.handles), np.int64)
    for e, handle in enumerate(snapshot.handles):
        if handle.packed is not None:
            out[e] = handle.packed.extent.data_ptr() + (handle.where is Where.PACKED_PINNED)
    return out
