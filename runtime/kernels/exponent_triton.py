"""Decode coded matrices on a GPU: compressed bytes in device memory to BF16, many matrices in one launch.

FORMAT.md, "Coded matrices", has the format. A program decodes a few tiles: a warp for each tile, a lane of the warp for
each lane of the tile. A table on the device says where the matrices are, so experts of any shapes share a launch. Bytes
have passed their digest; still every index is bounded, writes stay inside `out`, and lanes that end wrongly are
reported. A weight costs its coded bits read and 2 bytes written: 10.7 / 8 + 2 = 3.3 bytes, a lower bound of the time.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton's functions have no types.
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from moepack.pack.codec.bits import Buffer
from moepack.pack.codec.exponent import Code, coded_size

from .current import current

TILES = 4  # tiles of a program, and its warps
CHUNK = 4096  # words of 4 bytes that a program copies
PLACES = 8  # numbers that say where a coded matrix is (`places_of`)

_TILE: tl.constexpr = tl.constexpr(8192)
_ROW: tl.constexpr = tl.constexpr(128)  # weights that the lanes of a tile decode in one step
_HEADER_WORDS: tl.constexpr = tl.constexpr(12)
_LANE_WORDS: tl.constexpr = tl.constexpr(9)
_FIELDS: tl.constexpr = tl.constexpr(5)
_PLACES: tl.constexpr = tl.constexpr(PLACES)


@triton.jit
def _four(p, exponents):
    """Return four BF16 numbers as int64, made of four bytes of signs and mantissas (`p`) and four of exponents."""
    low = (p & 0x7F7F7F7F) | ((exponents << 7) & 0x80808080)
    high = (p & 0x80808080) | ((exponents >> 1) & 0x7F7F7F7F)
    a = (low & 0xFF) | ((high & 0xFF) << 8) | ((low & 0xFF00) << 8) | ((high & 0xFF00) << 16)
    b = ((low >> 16) & 0xFF) | (((high >> 16) & 0xFF) << 8) | ((low >> 24) << 16) | ((high >> 24) << 24)
    return a.to(tl.int64) | (b.to(tl.int64) << 32)


@triton.jit
def _patch(patch_starts, patches, n_patches, plane, out, tile, live, size, lane):
    """Write the weights whose exponents have no code word: they are stored apart, as patches."""
    begin = tl.load(patch_starts + tile, mask=live, other=0).to(tl.int64)
    count = tl.load(patch_starts + tile + 1, mask=live, other=0).to(tl.int64) - begin
    count = tl.minimum(count, n_patches - begin)
    for start in range(0, tl.max(count), 32):
        nth = start + lane[None, :]
        given = nth < count[:, None]
        patch = tl.load(patches + begin[:, None] + nth, mask=given, other=0)
        where = (patch & 0xFFFF).to(tl.int64)
        given = given & (where < size[:, None])
        index = (tile * _TILE)[:, None] + where
        p = tl.load(plane.to(tl.pointer_type(tl.uint8)) + index, mask=given, other=0).to(tl.uint32)
        value = ((p & 0x80) << 8) | (((patch >> 16) & 0xFF) << 7) | (p & 0x7F)
        tl.store(out + index, value.to(tl.uint16), mask=given)


@triton.jit
def _tiles(words, out, n, stream_words, n_patches, table, status, flag, AXIS: tl.constexpr, K: tl.constexpr):
    """Decode K tiles of one matrix, those of this program in AXIS: `words` are its coded bytes, `out` its BF16 numbers.

    `flag` is stored at `status` if a lane does not end where it should.
    """
    tiles = (n + _TILE - 1) // _TILE
    tile = tl.program_id(AXIS) * K + tl.arange(0, K).to(tl.int64)
    if tl.program_id(AXIS) * K < tiles:
        live = tile < tiles
        starts = words + _HEADER_WORDS
        patch_starts = starts + tiles + 1
        patches = patch_starts + tiles + 1
        stream = patches + n_patches
        plane = stream + stream_words
        first = tl.load(starts + tile, mask=live, other=0).to(tl.int64)
        head = tl.load(stream + first, mask=live & (first < stream_words), other=0)
        raw = (head >> 16) == 1
        size = tl.minimum(n - tile * _TILE, _TILE)  # weights of each tile
        size = tl.where(live, size, 0)

        lane = tl.arange(0, 32)
        last = stream_words - 1
        at = first[:, None] + 1 + (lane >> 2)[None, :]
        deltas = tl.load(stream + tl.minimum(at, last), mask=live[:, None], other=0)
        delta = (deltas >> ((lane & 3) * 8)[None, :].to(tl.uint32)) & 0xFF
        length = (head & 0xFFFF)[:, None].to(tl.int32) + delta.to(tl.int32)
        end = tl.cumsum(length, 1)
        position = end - length
        payload = first + _LANE_WORDS
        rest = tl.zeros([K, 32], dtype=tl.int64)
        rows = (tl.max(size) + _ROW - 1) // _ROW
        for q in range(0, rows):
            i = q * _ROW + lane[None, :] * 4
            here = i < size[:, None]
            coded = (size[:, None] > q * _ROW) & (lane >= 0)[None, :]  # fill included
            word = payload[:, None] + (position >> 5)
            w0 = tl.load(stream + tl.minimum(word, last), mask=coded, other=0)
            w1 = tl.load(stream + tl.minimum(word + 1, last), mask=coded, other=0)
            shift = (position & 31).to(tl.uint32)
            window = (w0 << shift) | ((w1 >> 1) >> (31 - shift))
            exponents = tl.zeros([K, 32], dtype=tl.uint32)
            for k in tl.static_range(4):
                entry = tl.load(table + (window >> 24).to(tl.int32)).to(tl.int32)  # exponent << 8 | code length
                step = (entry & 15).to(tl.uint32)
                window = window << step
                position += tl.where(coded, step.to(tl.int32), 0)
                exponents = exponents | ((entry >> 8).to(tl.uint32) << (8 * k))
            as_bytes = first[:, None] + 1 + (i >> 2)
            plain = tl.load(stream + tl.minimum(as_bytes, last), mask=here & raw[:, None], other=0)
            exponents = tl.where(raw[:, None], plain, exponents)
            p = tl.load(plane + ((tile * _TILE)[:, None] + i) // 4, mask=here, other=0)
            four = _four(p, exponents)
            whole = i + 4 <= size[:, None]
            to = ((tile * _TILE)[:, None] + i) // 4
            tl.store(out.to(tl.pointer_type(tl.int64)) + to, four, mask=whole)
            rest = tl.where(here & (i + 4 > size[:, None]), four, rest)
        for k in tl.static_range(3):  # a last quad of fewer than four weights
            i = (size[:, None] // 4) * 4 + k + lane[None, :] * 0
            mine = (((size[:, None] // 4) % 32) == lane[None, :]) & (i < size[:, None])
            tl.store(out + (tile * _TILE)[:, None] + i, (rest >> (16 * k)).to(tl.uint16), mask=mine)
        wrong = (position != end) & ~raw[:, None] & live[:, None]
        bad = tl.max(tl.max(wrong.to(tl.int32), 1), 0)
        if bad != 0:
            tl.store(status, flag)
        tl.debug_barrier()  # patches overwrite what the loop above stored
        _patch(patch_starts, patches, n_patches, plane, out, tile, live, size, lane)


@triton.jit
def _decode(descriptors, tables, status, K: tl.constexpr):
    matrix = tl.program_id(1)
    at = descriptors + matrix * _FIELDS
    words = tl.load(at).to(tl.pointer_type(tl.uint32))
    out = tl.load(at + 1).to(tl.pointer_type(tl.uint16))
    n = tl.load(at + 2)
    stream_words = tl.load(at + 3)
    n_patches = tl.load(at + 4)
    _tiles(words, out, n, stream_words, n_patches, tables + matrix * 256, status + matrix, 1, 0, K)


@triton.jit
def _first(experts, counts, EARLIER: tl.constexpr):
    """Return this program's expert, and whether it has slots and is the first so among EARLIER; 0: the n-th is n."""
    at = tl.program_id(0)
    if EARLIER:
        expert = tl.load(experts + at)
        wanted = tl.load(counts + at) > 0
        before = tl.arange(0, EARLIER)
        there = before < at
        other = tl.load(experts + before, mask=there, other=-1)
        again = (other == expert) & (tl.load(counts + before, mask=there, other=0) > 0)
        wanted = wanted & (tl.max(again.to(tl.int32), 0) == 0)
    else:
        expert = at
        wanted = tl.load(counts + at) > 0
    return expert.to(tl.int64), wanted


@triton.jit
def _bring(experts, counts, coded, sizes, stage, apart, EARLIER: tl.constexpr, CHUNK: tl.constexpr):
    expert, wanted = _first(experts, counts, EARLIER)
    source = tl.load(coded + expert)
    if wanted & ((source & 1) != 0):
        at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
        words = tl.multiple_of(tl.load(sizes + expert), 4)
        given = tl.multiple_of((source - 1).to(tl.pointer_type(tl.int32)), 16)
        to = stage + expert * apart
        tl.store(to + at, tl.load(given + at, mask=at < words), mask=at < words)


@triton.jit(do_not_specialize=["apart", "stride"])
def _decode_chosen(
    experts,
    counts,
    coded,
    fields,
    tables,
    stage,
    apart,
    slots,
    stride,
    status,
    EARLIER: tl.constexpr,
    MATRICES: tl.constexpr,
    K: tl.constexpr,
    BIASES: tl.constexpr,
):
    expert, wanted = _first(experts, counts, EARLIER)
    source = tl.load(coded + expert)
    if wanted & (source != 0):
        number = expert * MATRICES + tl.program_id(2)
        at = fields + number * _PLACES
        brought = (stage + expert * apart).to(tl.int64)
        extent = tl.where((source & 1) != 0, brought, source)
        words = (extent + tl.load(at)).to(tl.pointer_type(tl.uint32))
        place = slots + expert * stride
        out = (place + tl.load(at + 1)).to(tl.pointer_type(tl.uint16))
        n = tl.load(at + 2)
        stream_words = tl.load(at + 3)
        n_patches = tl.load(at + 4)
        _tiles(words, out, n, stream_words, n_patches, tables + number * 256, status, expert.to(tl.int32) + 1, 1, K)
        if BIASES:
            rows = tl.load(at + 7)
            given = (extent + tl.load(at + 5)).to(tl.pointer_type(tl.uint16))
            to = (place + tl.load(at + 6)).to(tl.pointer_type(tl.uint16))
            for start in range(tl.program_id(1) * 256, rows, tl.num_programs(1) * 256):
                row = start + tl.arange(0, 256)
                tl.store(to + row, tl.load(given + row, mask=row < rows), mask=row < rows)


@dataclass(frozen=True)
class DecodeJob:
    """One coded matrix to decode."""

    coded: Tensor  # the coded bytes on the device, uint8, from a multiple of 4 and readable up to the next multiple
    header: Buffer  # the first 48 of these bytes on the host, of a matrix that `pack.exponent.parse` accepted
    out: Tensor  # memory for the weights, bfloat16 on the same device, contiguous, beginning on a multiple of 8 bytes


@lru_cache(1 << 14)
def _table(code: bytes) -> npt.NDArray[np.int32]:
    """What the kernel looks up, int32 [256]: exponents times 256, plus code lengths. Made in 40 us, for each matrix."""
    given = np.frombuffer(code, np.uint8)
    made = Code(given[:16], given[16:])
    table = made.table()
    entries: npt.NDArray[np.int32] = made.exponent[table >> 4].astype(np.int32) << 8 | (table & 15)
    return entries


def decode(jobs: Sequence[DecodeJob]) -> Tensor:
    """Decode matrices in one launch on the current stream, without waiting.

    Returns:
        int32 [jobs] on the device: 0 for a good matrix, 1 for a matrix whose lanes did not end where they should.

    Raises ValueError for buffers that do not fit the header, or are not aligned.
    """
    rows = []
    tables = []
    most = 0
    for job in jobs:
        n, tiles, words, patches = (int(v) for v in job.header[:16].view("<u4"))
        if job.out.numel() != n or job.out.dtype != torch.bfloat16 or not job.out.is_contiguous():
            raise ValueError(f"a coded matrix of {n} weights needs a contiguous bfloat16 tensor of as many")
        if job.coded.numel() != coded_size(n, words, patches) or job.coded.dtype != torch.uint8:
            raise ValueError(f"the coded matrix has {job.coded.numel()} bytes, not {coded_size(n, words, patches)}")
        if job.coded.data_ptr() % 4 or job.out.data_ptr() % 8:
            raise ValueError("coded bytes begin on a multiple of 4, weights on a multiple of 8 bytes")
        tables.append(_table(bytes(job.header[16:48])))
        rows.append([job.coded.data_ptr(), job.out.data_ptr(), n, words, patches])
        most = max(most, tiles)
    device = jobs[0].out.device
    status = torch.zeros(len(jobs), dtype=torch.int32, device=device)
    if most:
        described = np.concatenate([*tables, np.array(rows, np.int64).view(np.int32).ravel()])
        given = torch.from_numpy(described)
        at = sum(map(len, tables))
        with current(device):
            if device.type == "cuda":  # a copy from other memory may wait for the stream
                given = given.pin_memory().to(device, non_blocking=True)
            _decode[(triton.cdiv(most, TILES), len(jobs))](
                given[at:].view(torch.int64), given[:at], status, K=TILES, num_warps=TILES
            )
    return status


@dataclass(frozen=True)
class CodedLayer:
    """Where the coded matrices of a layer's experts are in their extents, and where each expert is decoded to."""

    fields: Tensor  # int64 [experts, matrices, PLACES], made by `places_of`
    tables: Tensor  # uint16 [experts, matrices, 256], made by `places_of`
    sizes: Tensor  # int64 [experts], words of 4 bytes of each extent, a multiple of 4
    stage: Tensor  # int32 [experts, words]: extents that are brought from host memory
    slots: Tensor  # uint8 [experts, bytes]: memory of decoded experts
    status: Tensor  # int32 [1]: 0, or the number of a damaged expert plus 1
    most: tuple[int, int]  # the most tiles of a matrix, and the most words of an extent
    biases: bool  # whether matrices have biases


def places_of(header: Buffer, at: int, to: int, bias: tuple[int, int, int]) -> tuple[list[int], npt.NDArray[np.int32]]:
    """Return a matrix's row of `CodedLayer.fields` and of `tables`.

    Args:
        header: as in `DecodeJob`.
        at: and `to`, the matrix's offsets in its extent and in the memory of its decoded expert.
        bias: offsets of its bias there, and its rows; 0 rows without one.
    """
    n, _, words, patches = (int(v) for v in header[:16].view("<u4"))
    return [at, to, n, words, patches, *bias], _table(bytes(header[16:48])).astype(np.uint16)


def bring(experts: Tensor | None, counts: Tensor, sources: Tensor, sizes: Tensor, stage: Tensor, most: int) -> None:
    """Copy extents of experts that have slots from host memory to a stage, each once, on the current stream.

    Args:
        experts: and `counts`, as for `decode_chosen`.
        sources: as its `coded`.
        sizes: int64 [experts], words of 4 bytes of each extent, a multiple of 4; `most` is the largest.
        stage: int32 [experts, words].
    """
    given, earlier = (counts, 0) if experts is None else (experts, 1 << (len(counts) - 1).bit_length())
    with current(counts.device):
        _bring[len(counts), triton.cdiv(most, CHUNK)](
            given, counts, sources, sizes, stage, stage.shape[1], EARLIER=earlier, CHUNK=CHUNK
        )


def decode_chosen(of: CodedLayer, experts: Tensor | None, counts: Tensor, coded: Tensor) -> None:
    """Decode the experts that have slots, each once, on the current stream, without waiting: two launches.

    Args:
        of: the layer.
        experts: int32, experts in any order and number; `None` for all.
        counts: int32, slots of each of these.
        coded: int64 [experts], the address of each expert's extent, plus one if it is in host memory; 0 for experts
            that are not decoded.
    """
    tiles, words = of.most
    blocks = len(counts)
    matrices = of.fields.shape[1]
    apart = of.stage.shape[1]
    given, earlier = (counts, 0) if experts is None else (experts, 1 << (blocks - 1).bit_length())
    bring(experts, counts, coded, of.sizes, of.stage, words)
    with current(counts.device):
        _decode_chosen[blocks, triton.cdiv(tiles, TILES), matrices](
            given,
            counts,
            coded,
            of.fields,
            of.tables,
            of.stage,
            apart,
            of.slots,
            of.slots.shape[1],
            of.status,
            EARLIER=earlier,
            MATRICES=matrices,
            K=TILES,
            BIASES=of.biases,
            num_warps=TILES,
        )
