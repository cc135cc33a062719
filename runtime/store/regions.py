"""Which extents are kept pinned, in which regions and order: arithmetic over sizes and calibration traffic, no more.

A region is one registration: a layer file's extents, or a part of them, never one expert's (a large model has some
30,000 extents, and drivers keep a table a registration; above 100 to 500 GiB a single one fails).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

PIECE = 1 << 30  # bytes of a region at the most, unless one extent has more
File = tuple[str, int]  # version, layer position


@dataclass(frozen=True, slots=True)
class Piece:
    """A region: some extents of one layer file.

    Attributes:
        file: version and layer position.
        experts: in the order in which they lie in the region.
        size: their bytes.
    """

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
    """The regions to pin, in order: the most wanted part of every layer, then the next of every layer.

    Args:
        sizes: bytes of every extent by its expert, by file in the order of versions and layers.
        wanted: how much each expert is wanted, likewise.
        limit: bytes for all regions.
        in_place: whether regions are parts of the files, in which extents lie one after another in expert order; else
            they are gathered, and the most wanted come first.
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
    """The extents with the most traffic a byte that fit."""
    every = [(-wanted[file][e] / size, i, file, e, size) for i, (file, of) in enumerate(sizes.items())
             for e, size in of.items()]  # fmt: skip
    kept = set()
    for _, _, file, e, size in sorted(every):
        if size <= limit:
            kept.add((file, e))
            limit -= size
    return kept


def _cut(file: File, order: Sequence[int], sizes: Mapping[int, int], most: int) -> list[Piece]:
    pieces: list[Piece] = []
    run: list[int] = []
    for e in order:
        if run and sum(sizes[x] for x in run) + sizes[e] > most:
            pieces.append(Piece(file, tuple(run), sum(sizes[x] for x in run)))
            run = []
        run.append(e)
    if run:
        pieces.append(Piece(file, tuple(run), sum(sizes[x] for x in run)))
    return pieces
