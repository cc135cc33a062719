"""Codes and scales of a model's matrices as the checkpoint has them, in the model's layout, and back into its tensors.

transformers' own renaming and conversion says where each row of each of the checkpoint's weights goes: it is run once
on row numbers. What is done with the codes is not decided here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.codec.bits import Buffer
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.codec.released import ReleasedMatrix
from moepack.pack.errors import InputError, NotFiniteError
from moepack.pack.spec import BLOCK_ROWS, Matrix, Version

from .experts import ExpertWeights, bits_of
from .released import Encoded

if TYPE_CHECKING:
    from .released.encoded import Get
    from .skeleton import Parts, Skeleton


@dataclass(frozen=True)
class NativeWeight:
    """One matrix of some experts, or a dense one, as a native encoding; the first axis is the experts', or absent."""

    version: str  # as Encoded has it, and `group`
    group: int
    codes: Tensor  # uint8 [.., rows, cols]
    scale: Tensor  # [.., rows, groups]; see Encoded.scale
    outer: Tensor | None  # float32 [.., rows, 1]
    zeros: Tensor | None  # uint8 [.., rows, groups]

    def arrays(self) -> dict[str, Tensor]:
        """The arrays that the encoding has, by name."""
        own = {"codes": self.codes, "scale": self.scale, "outer": self.outer, "zeros": self.zeros}
        return {name: array for name, array in own.items() if array is not None}


@dataclass(frozen=True)
class RowPlaces:
    """The sources of a matrix's rows: for each source in turn, the row numbers in the matrix."""

    sources: tuple[tuple[str, Encoded], ...]  # the checkpoint's weights, with only the experts of the matrix
    places: tuple[Tensor, ...]  # for each source, int64: row r of it is row places[r] of the matrix, experts counted
    lead: tuple[int, ...]  # the matrix's axes before its columns: (experts, rows), or (rows,)

    def select(self, some: range, parts: Parts) -> RowPlaces:
        """The places in a matrix of some experts alone; `parts` has their sources, or the ranges of them."""
        each = math.prod(self.lead[1:])
        kept = []
        places = []
        for source, own in zip(self.sources, self.places, strict=True):
            if source[0] in parts:
                part = parts[source[0]]
                rows = own if part is None else own.view(self.lead[0], -1)[part.start : part.stop].flatten()
                kept.append(source)
                places.append(rows - some.start * each)
        lead = (len(some), *self.lead[1:])
        assert all(int(p.min()) >= 0 and int(p.max()) < math.prod(lead) for p in places), "another expert's rows"
        return RowPlaces(tuple(kept), tuple(places), lead)

    def native(self, arrays: Iterator[dict[str, Tensor | None]]) -> NativeWeight:
        """Put the sources' arrays, in the order of `sources`, in the matrix's layout."""
        first = self.sources[0][1]
        out = dict[str, Tensor]()
        total = math.prod(self.lead)
        for places, own in zip(self.places, arrays, strict=True):
            for name, array in own.items():
                if array is None:
                    continue
                rows = array.reshape(-1, array.shape[-1])
                if name not in out:
                    out[name] = torch.empty(total, rows.shape[-1], dtype=rows.dtype)
                indexable(out[name])[places] = indexable(rows)
        made = {name: array.reshape(*self.lead, array.shape[-1]) for name, array in out.items()}
        return NativeWeight(
            first.version, first.group, made["codes"], made["scale"], made.get("outer"), made.get("zeros")
        )

    def fits(self, version: Version) -> bool:
        """Whether rows have one scale wherever the version keeps one for a block of rows."""
        matrix = Matrix("weight", math.prod(self.lead), self.sources[0][1].shape[-1])
        if all(len(shape) == 3 for kind, shape, _ in version.parts(matrix) if kind in ("scale", "outer")):
            return True
        owner = torch.empty(matrix.rows, 2, dtype=torch.int64)  # of each row: its source, and its block of rows there
        for number, ((_, encoded), places) in enumerate(zip(self.sources, self.places, strict=True)):
            owner[places, 0] = number
            block = encoded.block_rows if encoded.version == "fp8" else len(places)
            owner[places, 1] = torch.arange(len(places)) // block
        return bool((owner == owner[::BLOCK_ROWS].repeat_interleave(BLOCK_ROWS, 0)[: matrix.rows]).all())

    def restore(self, weight: NativeWeight) -> dict[str, Tensor]:
        """The sources' tensors of the checkpoint, byte for byte, by their names, without their leftovers."""
        flat = {name: indexable(a.reshape(-1, a.shape[-1])) for name, a in weight.arrays().items()}
        own = weight.arrays()
        out: dict[str, Tensor] = {}
        for (_, encoded), places in zip(self.sources, self.places, strict=True):
            batch = self._batch(encoded, len(places))
            read = {n: a[places].view(own[n].dtype).reshape(*batch, -1, a.shape[-1]) for n, a in flat.items()}
            out |= encoded.restore(**read)
        return out

    @staticmethod
    def _batch(encoded: Encoded, rows: int) -> tuple[int, ...]:
        """The axes before a source's rows; the first of them may be a range."""
        *batch, each, _ = encoded.shape
        return (rows // math.prod((*batch[1:], each)), *batch[1:]) if batch else ()


def indexable(array: Tensor) -> Tensor:
    """A view of an array that torch indexes: it does not index every dtype."""
    return array.view(torch.int16) if array.dtype == torch.uint16 else array


def place(stream: Skeleton, parameter: str, transposed: bool = False) -> RowPlaces:
    """Find where the rows of the checkpoint's weights go in the parameter that is made of them.

    Raises InputError if one of the weights is not encoded, if their encodings differ, or if the parameter is more or
    less than their rows in another order.
    """
    name = stream.checkpoint.name
    weights = stream.weights_of(parameter)
    known = stream.checkpoint.encoded
    plain = [key for key in weights if key not in known]
    if plain or not weights:
        raise InputError(f"{name}: {plain[0] if plain else parameter} is not stored as codes and scales")
    kinds = {(known[key].version, known[key].group) for key in weights}
    if len(kinds) != 1:
        raise InputError(f"{name}: {parameter} is made of weights in several encodings: {sorted(kinds)}")
    shapes = {key: known[key].shape for key in weights}
    turned = {key for key in weights if known[key].transposed}
    lead, split = row_places(stream, parameter, shapes, turned, transposed)
    return RowPlaces(tuple((key, known[key]) for key in weights), split, lead)


def row_places(
    stream: Skeleton,
    parameter: str,
    shapes: Mapping[str, Sequence[int]],
    turned: Collection[str],
    transposed: bool,
    experts: int | None = None,
) -> tuple[tuple[int, ...], tuple[Tensor, ...]]:
    """Find where the rows of weights go in a parameter; see `place`. `shapes`: of the weights, [.., rows, cols].

    `turned`: those that the checkpoint has as [.., cols, rows]. With `experts`, the weights are of so many experts
    alone. Returns the parameter's axes before its columns, and for each weight the places of its rows.
    """
    tags: dict[str, Tensor] = {}
    begins: dict[str, int] = {}
    name = stream.checkpoint.name
    total = 0
    for key, (*lead, _) in shapes.items():
        tag = torch.arange(total, total + math.prod(lead)).reshape(*lead, 1)
        begins[key], total = total, total + tag.numel()
        tags[key] = tag.mT if key in turned else tag
    shape = list(stream.model.get_parameter_or_buffer(parameter).shape)
    if experts is not None:
        shape[0] = experts
    cols = shape[-2 if transposed else -1]
    shape[-2 if transposed else -1] = 1
    got = stream.convert_apart(tags, parameter, shape)
    if got is None or any(own[-1] != cols for own in shapes.values()):
        raise InputError(f"{name}: {parameter} keeps the columns of its weights in another order: not supported")
    order = (got.mT if transposed else got)[..., 0]
    places = torch.argsort(order.flatten())
    if not torch.equal(order.flatten()[places], torch.arange(total)):
        raise InputError(f"{name}: {parameter} is not a reordering of its weights' rows, which is not supported")
    ends = [*list(begins.values())[1:], total]
    return tuple(order.shape), tuple(places[begins[key] : end] for key, end in zip(begins, ends, strict=True))


def write_plain(stream: Skeleton, parameter: str, parts: Parts, values: Tensor, transposed: bool) -> dict[str, Tensor]:
    """The weights in `parts`, plain tensors of the checkpoint, from `values` [experts, rows, cols] of a parameter.

    Raises InputError if the parameter is more or less than their rows in another order.
    """
    stored: dict[str, tuple[int, ...]] = {}
    for key, part in parts.items():
        shape = tuple(stream.checkpoint.shape(key))
        stored[key] = shape if part is None else (len(part), *shape[1:])
    swapped = {key: (*shape[:-2], shape[-1], shape[-2]) for key, shape in stored.items()}
    turned = False
    try:
        _, split = row_places(stream, parameter, stored, (), transposed, len(values))
    except InputError:  # the checkpoint has them [.., cols, rows]
        turned = True
        _, split = row_places(stream, parameter, swapped, tuple(parts), transposed, len(values))
    flat = values.reshape(-1, values.shape[-1])
    out = dict[str, Tensor]()
    for key, places in zip(parts, split, strict=True):
        own = flat[places].reshape(swapped[key] if turned else stored[key])
        out[key] = (own.mT if turned else own).contiguous()
    return out


def read(name: str, reader: Callable[[range | None], Get], placement: RowPlaces, parts: Parts) -> NativeWeight:
    """Read a matrix, one source at a time. `reader` reads ranges of the tensors of the checkpoint called `name`."""

    def arrays() -> Iterator[dict[str, Tensor | None]]:
        for key, encoded in placement.sources:
            get = reader(parts[key])
            try:
                own = {"codes": encoded.codes(get), "scale": encoded.scale(get)}
                yield {**own, "outer": encoded.outer(get), "zeros": encoded.zeros(get)}
            except NotFiniteError as error:
                raise error.within(name, parts[key]) from None
            except InputError as error:
                raise InputError(f"{name}: {error}") from None

    return placement.native(arrays())


def as_released(weight: NativeWeight, expert: int | None, bias: Tensor | None) -> AffineMatrix | ReleasedMatrix:
    """A matrix and its bias, BF16 [rows], as `Version.encode` takes them; `expert` is None for a dense matrix."""
    arrays = {k: (t if expert is None else t[expert]).numpy() for k, t in weight.arrays().items()}
    codes = arrays["codes"]
    scale = arrays["scale"]
    raw = None if bias is None else bits_of(bias)
    if "zeros" in arrays:
        return AffineMatrix(codes, scale, arrays["zeros"], raw)
    return ReleasedMatrix(codes, scale, arrays["outer"][:, 0] if "outer" in arrays else None, raw)


def expert_extent(
    version: Version,
    weights: ExpertWeights,
    expert: int,
    native: Sequence[NativeWeight] = (),
    threads: int | None = None,
) -> tuple[Buffer, int]:
    """Encode an expert in a lossless version, on `threads` threads or all cores: its extent, and the unpadded size.

    `expert` is its index in `weights`. A released version takes its codes from `native`, the matrices of this expert
    alone. Raises InputError for codes that the version cannot hold.
    """
    layer = weights.layer
    biases = [weights.bias(expert, m) for m in range(len(layer.matrices))]
    values: list[AffineMatrix | LosslessMatrix | ReleasedMatrix] = []
    for m, bias in enumerate(biases):
        if version.released:
            values.append(as_released(native[m], 0, bias))
        else:
            values.append(LosslessMatrix(bits_of(weights.matrix(expert, m)), None if bias is None else bits_of(bias)))
    try:
        return version.encode(layer.matrices, values, threads)
    except ValueError as error:
        raise InputError(f"{version.name} cannot hold an expert of layer {layer.index}: {error}") from None


def dense_extent(
    version: Version,
    matrix: Matrix,
    weight: Tensor,
    bias: Tensor | None,
    native: NativeWeight | None = None,
    threads: int | None = None,
) -> tuple[Buffer, int]:
    """Encode a dense matrix in a lossless version, as `expert_extent` does; weight and bias are rounded to BF16.

    A released version takes the codes of `native` in place of the weight.
    """
    bias = None if bias is None else bias.bfloat16()
    if version.released:
        assert native is not None, f"{matrix.name} is not encoded"
        return version.encode((matrix,), [as_released(native, None, bias)], threads)
    value = LosslessMatrix(bits_of(weight.bfloat16()), None if bias is None else bits_of(bias))
    return version.encode((matrix,), [value], threads)
