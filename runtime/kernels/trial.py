"""The trial of the CPU kernels: every form at the level in use, against dequantised weights in NumPy's float64.

Sizes are awkward on purpose: rows that are not whole blocks, columns that are not whole groups, one token and as many
as take every width of a pass; many tokens where the level has tiles. Extents are random, as no checkpoint is needed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moepack.pack.encodings.base import SCALE_BITS
from moepack.pack.spec import Matrix, Version, align, encoding_of

from . import affine_native as native
from .dense_native import PLAIN_FORM, HeadMatrices, KernelMatrix, attend
from .forms import compiled_names, handle, make_forms
from .kv_rows import rotated
from .reference import dequantise, plain_weights, sections_of

Floats = npt.NDArray[np.float64]
MATRIX = Matrix("trial", 203, 321, bias=True)
FEW = (0, *(1,) * 7)  # the expert of each token: one has one token, the other 4 + 2 + 1
MANY = (0, *(1,) * 33)  # as many as leave a second tile unfilled
# The greatest error of a number, in root mean squares of all: of float32 sums of some hundred terms; of BF16 results,
# which are up to five of these and rounded to 8 bits, of weights that tiles round as well.
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.04}


def trial() -> str:
    """Return the names of what differs from the reference at the level in use; "" if nothing does."""
    random = np.random.default_rng(0)
    wrong = []
    for version in _versions():
        extent = extent_of(version, MATRIX, random)
        for what in _wrong_form(version, extent, random):
            form = make_forms((MATRIX,), version)[0]
            wrong.append(f"{version.name} (form {form.bits}, groups of {form.group}): {what}")
    return "; ".join([*wrong, *_wrong_others(random)])


def _versions() -> Iterator[Version]:
    """One version for each form that the library has a case for."""
    seen = set()
    for entry in sorted(map(encoding_of, compiled_names()), key=lambda e: e.released):  # names that a build gives first
        for group in entry.group_sizes or (0,):
            of_scales = SCALE_BITS[: 1 if entry.holds else 2]
            for scale_bits, symmetric in itertools.product(of_scales, (False, True)):
                version = Version.of(entry.name, group, scale_bits=scale_bits, symmetric=symmetric).at(1)
                form = make_forms((MATRIX,), version)[0]
                if (key := (form.bits, form.group, form.zeros)) not in seen:
                    seen.add(key)
                    yield version


def extent_of(version: Version, matrix: Matrix, random: np.random.Generator) -> Tensor:
    """Return a matrix's extent of random codes, uint8, at a multiple of 64 in memory.

    Scales and biases are from 2^-7 to 2, or from 1 to 16 where they have a byte.
    """
    room = np.zeros(version.resident_size((matrix,)), np.uint8)
    for s in version.sections((matrix,)):
        part = room[s.offset : s.end]
        part[:] = random.integers(0, 256, len(part))
        if s.kind.startswith("plane") and version.zero == "none" and version.bits == 8:
            part -= (part & 0x7F) == 0x7F  # NaN in E4M3
        elif s.kind == "weight":
            part.view(np.uint16)[:] = part.view(np.uint16) & 0x83FF | 0x3C00
        elif s.item == 4 and not s.kind.startswith("plane"):  # powers of two, as beside bytes they have to be
            part.view(np.float32)[:] = 2.0 ** random.integers(-3, 3, len(part) // 4)
        elif s.item == 2:
            part.view(np.uint16)[:] = part.view(np.uint16) & 0x03FF | 0x3C00
        elif s.kind == "scale":
            low, high = {"F8_E8M0": (120, 130), "F8_E4M3": (0x38, 0x58)}.get(version.scale_dtype, (0, 128))
            part[:] = random.integers(low, high, len(part))
    return torch.from_numpy(room).clone()  # into torch's own memory, which is aligned


def _wrong_form(version: Version, extent: Tensor, random: np.random.Generator) -> Iterator[str]:
    (sections,) = sections_of((MATRIX,), version)
    plain = plain_weights(extent, (sections,))
    weights = plain[0].float() if plain else dequantise(extent, sections, MATRIX, version, torch.float32)
    bias = sections["bias"]
    biases = extent[bias.offset : bias.end].view(torch.bfloat16).double().numpy()
    forms = native.LayerForms((MATRIX,), (version,))
    handles = np.array([handle(extent.data_ptr(), 0)] * 2, np.uint64)
    for dtype, allowed in ALLOWED.items():
        tiles = native.has_tiles(dtype)
        for experts, limits in ((FEW, None), *(((MANY, np.zeros(1, np.int64)),) if tiles else ())):
            x = _numbers(random, len(experts), MATRIX.cols).to(dtype)
            want = x.double().numpy() @ weights.double().numpy().T + biases
            out = torch.full((len(experts), MATRIX.rows), math.nan, dtype=dtype)
            native.product(forms, 0, handles, x, torch.tensor(experts)[:, None], out, limits, threads=1)
            if _differs(out, want, allowed):
                yield f"products of {str(dtype).removeprefix('torch.')}{' in tiles' if limits is not None else ''}"
        if not plain:
            rows = align(MATRIX.rows, 16)
            unpacked = torch.full((MATRIX.cols, rows), math.nan, dtype=dtype)
            native.unpack(forms, 0, 0, extent, unpacked, threads=1)
            if _differs(unpacked[:, : MATRIX.rows].T, weights.to(dtype).double().numpy(), allowed):
                yield f"unpacked to {str(dtype).removeprefix('torch.')}"


def _wrong_others(random: np.random.Generator) -> Iterator[str]:
    """Try what no model's own module is compared with when it is loaded: attention, rotation, weighted sums."""
    for cols, length in ((80, 37), (96, 1100)):  # of one span and of two (attention.c)
        if not _attends(random, cols, length):
            yield f"attention over {length} keys of {cols} numbers"
    weight = _numbers(random, 3 * (16 + 32), 96).bfloat16()
    heads = HeadMatrices(KernelMatrix(PLAIN_FORM, len(weight), 96, weight), 3, 16, 32)
    by_head = weight.double().numpy().reshape(3, 48, 96)
    for name, run, part, how in (
        ("lifted", heads.lift, by_head[:, :16], "thn,hnr->thr"),
        ("lowered", heads.lower, by_head[:, 16:], "thr,hvr->thv"),
    ):
        x = _numbers(random, 5, 3, 16 if name == "lifted" else 96).bfloat16()
        if _differs(run(x), np.einsum(how, x.double().numpy(), part), ALLOWED[torch.bfloat16]):
            yield f"heads' products, {name}"
    for block in (16, 256):
        mixed = np.ones((1, 1))
        while len(mixed) < block:
            mixed = np.block([[mixed, mixed], [mixed, -mixed]])
        for dtype, allowed in ALLOWED.items():
            x = _numbers(random, 5, block).to(dtype)
            if _differs(rotated(x), x.double().numpy() @ mixed / math.sqrt(block), allowed):
                yield f"rotation by {block} in {str(dtype).removeprefix('torch.')}"
    for dtype, allowed in ALLOWED.items():
        rows = _numbers(random, 15, MATRIX.cols).to(dtype)
        gates = _numbers(random, 5, 3).to(dtype)
        out = torch.full((5, MATRIX.cols), math.nan, dtype=dtype)
        native.combine(rows, torch.zeros(5, 3, dtype=torch.int64), gates, 1, out, threads=1)
        total = np.einsum("tkc,tk->tc", rows.double().numpy().reshape(5, 3, -1), gates.double().numpy())
        if _differs(out, total, allowed):
            yield f"weighted sums in {str(dtype).removeprefix('torch.')}"


def _attends(random: np.random.Generator, cols: int, length: int) -> bool:
    """Whether attention over keys in two parts, of which values are the first, has the reference's results."""
    batch = 2
    groups = 2
    shared = 3
    first = cols - 32
    query = _numbers(random, batch, groups * shared, 1, cols).bfloat16()
    keys = _numbers(random, batch, groups, length, cols).bfloat16()
    value = keys[..., :first]
    scale = cols**-0.5
    by_group = query.double().numpy().reshape(batch, groups, shared, cols)
    scores = np.einsum("bghc,bglc->bghl", by_group, keys.double().numpy()) * scale
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    want = np.einsum("bghl,bglc->bghc", weights, value.double().numpy()).reshape(batch, 1, groups * shared, first)
    parts = (query[..., :first], query[..., first:]), (value, keys[..., first:])
    return not _differs(attend(*parts, value, scale, threads=1), want, ALLOWED[torch.bfloat16])


def _numbers(random: np.random.Generator, *shape: int) -> Tensor:
    """Return float32 numbers that have a mean, which is what makes zero points matter."""
    return torch.from_numpy((random.standard_normal(shape) + 0.3).astype(np.float32))


def _differs(got: Tensor, want: Floats, allowed: float) -> bool:
    error: np.floating[Any] = np.abs(got.double().numpy() - want).max()
    return not error <= allowed * np.sqrt((want**2).mean())  # NaN differs
