"""Choose the extents to keep pinned, their regions and their order, from sizes and calibration traffic.

A region is one registration: a layer file's extents, or a part of them. A region per expert would be too many (a large
model has some 30,000 extents, and drivers keep a table for each); a single one fails above 100 to 500 GiB.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PIECE = 1 << 30  # the most bytes of a region, unless one extent is larger
File = tuple[str, int]  # version, layer position


@dataclass(frozen=True, slots=True)
class Piece:
    """A region: some extents of one layer file, in the region's order, and their bytes."""

    file: File
    experts: tuple[int, ...]
    size: int


def plan_pieces(
    sizes: Mapping[File, Mapping[int, int]],
    wanted: Mapping[File, Sequence[float]],
    limit: int,
    in_place: bool,
    most: int = PIECE,
) -> list[Piece]:
    """Return the regions to pin, in order: the most wanted part of every layer, then the next of every layer.

    Args:
        sizes: bytes of every extent by its expert, by file in the order of versions and layers.
        wanted: the traffic of each expert, by file.
        limit: bytes for all regions.
        in_place: whether regions are parts of the files, with extents in expert order; otherwise extents are gathered,
            the most wanted first.
        most: bytes of a region.
    """
    rounds: list[tuple[int, Piece]] = []
    kept = None if in_place else _most_wanted(sizes, wanted, limit)
    for file, of in sizes.items():
        order = sorted(of)
        if kept is not None:
            order = sorted((e for e in order if (file, e) in kept), key=lambda e: (-wanted[file][e], e))
        pieces = _cut(file, order, of, most)
        if in_place:
            pieces.sort(key=lambda p: (-sum(wanted[p.file][e] for e in p.experts) / p.size, p.experts))
        rounds.extend(enumerate(pieces))
    out, left = [], limit
    for _, piece in sorted(rounds, key=lambda r: r[0]):  # stable: in the order of files within a round
        if piece.size <= left:
            out.append(piece)
            left -= piece.size
    return out


def _most_wanted(
    sizes: Mapping[File, Mapping[int, int]], wanted: Mapping[File, Sequence[float]], limit: int
) -> set[tuple[File, int]]:
    """Return the extents with the most traffic per byte that fit."""
    every = [(-wanted[file][e] / size, i, file, e, size) for i, (file, of) in enumerate(sizes.items())
             for e, size in of.items()]  # fmt: skip
    kept = set()
    for _, _, file, e, size in sorted(every):
        if size <= limit:
            kept.add((file, e))
            limit -= size
    return kept


def _cut(file: File, order: Sequence[int], sizes: Mapping[int, int], most: int) -> list[Piece]:
    runs: list[list[int]] = []
    for e in order:
        if not runs or sum(sizes[x] for x in runs[-1]) + sizes[e] > most:
            runs.append([])
        runs[-1].append(e)
    return [Piece(file, tuple(run), sum(sizes[x] for x in run)) for run in runs]
