"""What the GPU's kernels of products and of slots' blocks compute, in plain torch: for tests of what is around them.

Triton's interpreter takes seconds for a layer. Launches keep their arguments, addresses among them, and come through
`GridExecutor.__call__` as before, where recorders of launches see them. The kernels' own tests do not use this.
"""

import ctypes
import inspect
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from moepack.pack.codec import trellis
from moepack.pack.codec.released import E2M1
from moepack.runtime.kernels.gemv_triton import TRELLIS
from moepack.runtime.kernels.reference import unpack
from moepack.runtime.kernels.switch_triton import SCALES

_VERSION = (
    "version", "low", "high", "scale", "zero", "bias", "outer", "BITS", "MANTISSA", "SCALE", "GROUP", "COLUMNS",
    "ZEROS", "BIAS", "OUTER",
)  # fmt: skip


def install(monkeypatch: pytest.MonkeyPatch):
    """Let torch compute what `_switch`, `few`, `arrange`, `many`, and of given experts `_routing` launch."""
    real = GridExecutor.__call__

    def launch(self, *args, **named):
        given_experts = self.fn.__name__ == "_routing" and named["GIVEN"]
        if self.fn.__name__ not in ("_switch", "few", "many", "arrange") and not given_experts:
            real(self, *args, **named)
            return
        given = SimpleNamespace(**dict(zip(inspect.signature(self.fn).parameters, args, strict=False)) | named)
        with _disable_current_modes(), torch.inference_mode():
            if self.fn.__name__ in ("arrange", "_routing"):
                (_route if given_experts else _arrange)(given)
                return
            if self.fn.__name__ == "many":
                given.x = given.x.float().sum(0)[:, : given.cols]
            if self.fn.__name__ != "_switch":
                _launch(given)
            for version in getattr(given, "VERSIONS", ()):
                one = dict(zip(_VERSION, version, strict=False))
                one["SCALE"] = SCALES[one["SCALE"]]
                _launch(SimpleNamespace(**vars(given) | one | {"DENSE": False}))

    monkeypatch.setattr(GridExecutor, "__call__", launch)


def _route(of):
    """Blocks and counters of experts and gates that are given. Slots past the experts are in no block."""
    slots = of.tokens * of.TOP_K
    index, gates = of.chosen.reshape(-1).clamp(0, of.EXPERTS), of.weights.reshape(-1).double()
    valid, at = index < of.EXPERTS, torch.arange(slots)
    same = (index[:, None] == index) & valid
    before, first = (same & (at < at[:, None])).sum(1), same.int().argmax(1)
    text = same & (of.mask.reshape(-1) != 0).repeat_interleave(of.TOP_K) if of.MASKED else same
    leads = valid & (before == 0)
    if of.COUNTS:
        of.counts[index[leads]] += text.sum(1)[leads]
    if of.SUMS:
        of.sums[index[leads]] += (text.double() @ gates)[leads]
    live = valid & (of.table[index.clamp(max=of.EXPERTS - 1)] != 0)
    alone = before >= of.WIDTH
    size = torch.where(alone, 1, torch.where(before == 0, same.sum(1).clamp(max=of.WIDTH), 0))
    blocks = torch.stack([index * live, at * of.WIDTH, size * live, live])
    of.room[: 4 * slots] = blocks.reshape(-1)
    to = torch.where(alone, at * of.WIDTH, first * of.WIDTH + before)
    of.room[4 * slots :][to[live]] = at[live].int()


def _arrange(of):
    """Activations as several BF16 numbers, whose columns stay in their order."""
    rest = of.x.float()
    of.out.zero_()
    for term in of.out:
        term[:, : of.cols] = rest
        rest = rest - term[:, : of.cols].float()


def _launch(of):
    """One version's product for every slot, each by itself: so a slot's bits depend on nothing beside it."""
    if of.DENSE:
        _slots(of, of.handles.data_ptr(), range(of.slots))
        return
    for expert, first, count in zip(
        *(t.tolist() for t in (of.block_expert, of.block_first, of.block_count)), strict=True
    ):
        word = int(of.handles[expert]) if count > 0 else 0
        if word and word & 63 == of.version:
            _slots(of, word & ~63, of.order[first : first + count].tolist())


def _slots(of, base: int, slots):
    weights, bias = _weights(of, base), torch.zeros(of.rows)
    if of.BIAS:
        bias = _read(base + of.bias, torch.bfloat16, of.rows).float()
    for slot in slots:
        y = (weights * of.x.reshape(-1, of.cols)[slot // of.share].float()).sum(
            1
        ) + bias  # rows apart: no bit depends on others
        if of.GATED:
            y = torch.nn.functional.silu(y[: of.rows // 2]) * y[of.rows // 2 :]
        of.out.view(-1, len(y))[slot] = y.to(of.out.dtype)


def _read(address: int, dtype: torch.dtype, count: int) -> Tensor:
    raw = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(raw, dtype=dtype)


def _weights(of, base: int) -> Tensor:
    """A matrix [rows, cols] in float32."""
    if of.BITS == 16:
        return _read(base + of.low, torch.bfloat16, of.rows * of.cols).view(of.rows, of.cols).float()
    blocks, groups = -(-of.rows // 16), -(-of.cols // of.GROUP)

    def plane(offset: int, bits: int) -> Tensor:
        words = (of.cols * bits + 31) // 32
        raw = _read(base + offset, torch.uint8, blocks * words * 64).view(blocks, words, 16, 4)
        return unpack(raw.transpose(1, 2).reshape(blocks * 16, words * 4), bits, of.cols)

    def by_group(offset: int, dtype: torch.dtype) -> Tensor:
        raw = _read(base + offset, dtype, blocks * groups * 16).view(blocks, groups, 16)
        return raw.transpose(1, 2).reshape(blocks * 16, groups).float()

    if of.BITS in (3, 5):
        codes = plane(of.low, of.BITS - 1) | plane(of.high, 1) << (of.BITS - 1)
    else:
        codes = plane(of.low, of.BITS)
    if TRELLIS.value == of.MANTISSA:
        values = trellis.levels(codes.int(), of.BITS).float() - trellis.ZERO
    elif of.MANTISSA == 1:
        values = torch.from_numpy(E2M1)[codes.int()]
    elif of.MANTISSA == 3:
        values = codes.contiguous().view(torch.float8_e4m3fn).float()
    else:
        values = codes.float()
        if of.ZEROS == 1:
            zero = by_group(of.zero, torch.uint8) * 2.0 ** (of.BITS - 8)
            values -= zero.repeat_interleave(of.GROUP, 1)[:, : of.cols]
        else:
            values -= 2 ** (of.BITS - 1) if of.ZEROS == 2 else (2**of.BITS - 1) / 2
    if of.SCALE == "row":
        values *= _read(base + of.scale, torch.float32, blocks * 16)[:, None]
    elif of.SCALE == "block":
        scales = _read(base + of.scale, torch.float32, blocks * groups).view(blocks, groups)
        values *= scales.repeat_interleave(16, 0).repeat_interleave(of.GROUP, 1)[:, : of.cols]
    else:
        dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}
        scales = by_group(of.scale, dtypes.get(of.SCALE, torch.uint8))
        if of.SCALE == "e3m5":
            scales = ((scales.int() << 18) + 0x3F800000).view(torch.float32)
        if of.SCALE == "e8m0":
            scales = (scales.int() << 23).clamp(min=1 << 22).view(torch.float32)
        values *= scales.repeat_interleave(of.GROUP, 1)[:, : of.cols]
    if of.OUTER:
        values *= _read(base + of.outer, torch.float32, blocks).repeat_interleave(16)[:, None]
    return values[: of.rows]
