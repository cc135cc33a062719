"""Whole models served as on a GPU, on a machine without one: kernels by Triton's interpreter, or products by torch, and
streams by a stand-in.

The stand-in holds its callers to the rules. Device memory is the host's, and so is torch's device: `torch_cuda.is_gpu`
says otherwise.
"""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
import torch_products
from fake_cuda import FakeCudart, FakeGpu, Ranges, overlap
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs

from moepack.pack.codec import exponent_fast
from moepack.pack.codec.exponent import coded_size
from moepack.pack.errors import CodecError
from moepack.pack.spec import Version
from moepack.runtime.devices import cuda, torch_cuda
from moepack.runtime.experts import backends
from moepack.runtime.experts import gpu as gpu_module
from moepack.runtime.kernels import affine_triton, exponent_triton
from moepack.runtime.store.cudart import Cudart

PLAIN = Version.of("bf16").kernel


class StandIn:
    """One GPU: stand-ins of its streams, and of the runtime's calls on host memory."""

    def __init__(self, patience: int = 3, decodes_by=None):
        self.cudart = FakeCudart()
        self.gpu = FakeGpu(self.cudart, patience, decodes_by)
        self.brought = 0  # bytes that launches copied from pinned memory to a stage
        self.read_there = 0  # bytes of weights that products read in pinned memory, once for each block of slots

    def wrong(self) -> list[str]:
        """Every rule that was broken."""
        return self.gpu.wrong + self.cudart.wrong

    def leaks(self) -> list[str]:
        """What was not given back."""
        pinned = {**self.cudart.registered, **self.cudart.allocated}
        return [*(f"block at {a:#x}" for a in self.gpu.blocks), *(f"pinned at {a:#x}" for a in pinned)]


def install(monkeypatch: pytest.MonkeyPatch, patience: int = 3, decodes_by=None, computes: bool = True) -> StandIn:
    """Let whatever is loaded from now on be served by a stand-in; without `computes` products make zeros: where it
    is only memory that matters, this saves the interpreter's minutes."""
    made = StandIn(patience, decodes_by)
    monkeypatch.setattr(torch_cuda, "is_gpu", lambda device: True)
    monkeypatch.setattr(cuda, "TorchGpu", lambda device: made.gpu)
    monkeypatch.setattr(torch_cuda, "TorchGpu", lambda device: made.gpu)
    monkeypatch.setattr(cuda, "Cudart", lambda index: Cudart(0, made.cudart))
    kernels(monkeypatch)
    _decodes(made, monkeypatch)
    if not computes:
        monkeypatch.setattr(affine_triton, "dense", lambda matrix, form, extent, x, out: out.zero_())
    for name in ("product", "switched"):
        monkeypatch.setattr(gpu_module, name, _watched(made, getattr(gpu_module, name), computes))
    for name in ("route_few", "summed"):
        monkeypatch.setattr(gpu_module, name, _in_turn(made, getattr(gpu_module, name)))
    return made


def _in_turn(made: StandIn, real):
    """A launch that threads make in turn, because Triton's interpreter serves one."""

    def launch(table, index, *more, **given):
        with made.gpu.lock:
            return real(table, index, *more, **given)

    return launch


def _watched(made: StandIn, real, computes: bool):
    """A product that is held to the rules of memory; a recorder of operations does not see this check."""

    @_disable_current_modes()
    def watched(matrix: Any, forms: Any, served: Any, handles: Any, geometry: Any, *more: Any) -> None:
        active = geometry.expert[geometry.count > 0].unique()
        words = [w for w in handles[active].tolist() if w & 63 in served]
        plain = [w for w in words if forms[w & 63].bits == PLAIN]
        ranges: Ranges = [((w & ~63) + forms[w & 63].low, 2 * matrix.weights) for w in plain]
        at = [(w & ~63, 1) for w in words]
        ranges += [r for r in at if made.cudart.is_pinned(*r)]
        for block in handles[geometry.expert[geometry.count > 0]].tolist():
            made.read_there += matrix.weights * (block & 63 in served and made.cudart.is_pinned(block & ~63, 1))
        if handles.untyped_storage().nbytes() > handles.nbytes:  # a row of a step's table
            ranges.append((handles.data_ptr(), handles.nbytes))
        with made.gpu.lock:
            if overlap([r for r in at if not made.cudart.is_pinned(*r)], made.cudart.unpinned):
                made.gpu.wrong.append("read in host memory that is not pinned any more")
            if any(w < 64 for w in words):
                made.gpu.wrong.append("read where nothing is")
                raise RuntimeError("an illegal memory access was encountered")
            made.gpu.launch(ranges)
            if computes:
                real(matrix, forms, served, handles, geometry, *more)
            else:
                more[1].zero_()

    return watched


@torch.library.custom_op("stand_in::decode_chosen", mutates_args=("slots", "status"))
def _decoded(
    expert: Tensor, count: Tensor, coded: Tensor, fields: Tensor, slots: Tensor, status: Tensor, gpu: int
) -> None:
    """What `exponent_triton.decode_chosen` does, by the host's decoder; a graph keeps the call as it keeps torch's."""
    made, ranges = _served[gpu], []
    with made.gpu.lock:  # a stream's launches follow each other: what read the slots before has ended
        made.gpu.carry_out("compute", len(made.gpu._work["compute"]))
    for e in expert[count > 0].unique().tolist():
        address, slot = int(coded[e]), slots[e].numpy()
        if not address:
            continue
        for at, to, n, words, patches, bias, place, rows in fields[e].tolist():
            size = coded_size(n, words, patches)
            ranges.append(((address & ~1) + at, size))
            with made.gpu.lock:
                if bool(address & 1) != made.cudart.is_pinned(*ranges[-1]):
                    made.gpu.wrong.append("coded bytes are not where their address says")
            given = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(ranges[-1][0]))
            try:
                exponent_fast.decode_into(given, slot[to : to + 2 * n].view(np.uint16), 1)
            except CodecError:
                status[0] = e + 1
            if rows:
                slot[place : place + 2 * rows] = np.ctypeslib.as_array(
                    (ctypes.c_uint8 * (2 * rows)).from_address((address & ~1) + bias)
                )
    with made.gpu.lock:
        made.gpu.launch(ranges)


_served: list[StandIn] = []


def _decodes(made: StandIn, monkeypatch: pytest.MonkeyPatch):
    _served.append(made)

    def decode_chosen(of, experts: Tensor | None, counts: Tensor, coded: Tensor):
        of_whom = torch.arange(len(counts), dtype=torch.int32) if experts is None else experts
        torch.ops.stand_in.decode_chosen(of_whom, counts, coded, of.fields, of.slots, of.status, _served.index(made))

    monkeypatch.setattr(exponent_triton, "decode_chosen", decode_chosen)
    monkeypatch.setattr(exponent_triton, "bring", _bringing(made))


def _bringing(made: StandIn):
    """What `exponent_triton.bring` does, of all experts, by the host."""

    def bring(experts: None, counts: Tensor, sources: Tensor, sizes: Tensor, stage: Tensor, most: int):
        with made.gpu.lock:
            made.gpu.carry_out("compute", len(made.gpu._work["compute"]))  # a stream's launches follow each other
            for e in ((counts > 0) & (sources & 1 > 0)).nonzero().view(-1).tolist():
                size, address = 4 * int(sizes[e]), int(sources[e]) - 1
                if not made.cudart.is_pinned(address, size) or size > 4 * most:
                    made.gpu.wrong.append("brought from where no extent is pinned")
                ctypes.memmove(stage[e].data_ptr(), address, size)
                made.brought += size

    return bring


def kernels(monkeypatch: pytest.MonkeyPatch, real_products: bool = False):
    """Let the GPU's kernels run experts, in Triton's interpreter; skip where Triton compiles them for a real GPU.

    Without `real_products` torch computes those, which takes a twentieth of the time.
    conftest.py chooses before Triton is imported. Afterwards it is too late: Triton's own functions stay compiled.
    """
    if not knobs.runtime.interpret:
        pytest.skip("kernels are compiled for this machine's GPU: CUDA_VISIBLE_DEVICES= runs this on a stand-in")
    monkeypatch.setattr(backends, "backend", lambda device: "triton")
    monkeypatch.setenv("MOEPACK_DENSE_KERNELS", "off")  # trials of norms and routers take the interpreter seconds
    monkeypatch.setattr(backends, "native_layer", lambda *args: None)
    if not real_products:
        torch_products.install(monkeypatch)
