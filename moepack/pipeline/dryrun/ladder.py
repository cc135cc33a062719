"""Which versions of a recipe no policy would ever choose. Numbers in, sentences out."""

from __future__ import annotations

from collections.abc import Sequence

from moepack.pack.spec import Matrix, Version


def never_smaller(sizes: Sequence[tuple[str, int]]) -> dict[str, str]:
    """The versions that are no smaller than a more precise one, each with the smallest of these.

    `sizes`: versions with the bytes of an expert in memory, from the most to the least precise.
    """
    out: dict[str, str] = {}
    for i, (name, size) in enumerate(sizes):
        better = min(sizes[:i], key=lambda item: item[1], default=None)
        if better is not None and better[1] <= size:
            out[name] = better[0]
    return out


def never_chosen(versions: Sequence[Version], matrices: Sequence[Matrix]) -> list[str]:
    """A line for each version that is never chosen: it takes the bytes of a more precise one, or more.

    `versions` from the most to the least precise; `matrices` are those of an expert.
    """
    sizes = {v.name: v.resident_size(matrices) for v in versions}
    weights = max(1, sum(m.weights for m in matrices))
    bits = {name: f"{8 * size / weights:.4g}" for name, size in sizes.items()}
    return [
        f"{name} takes {bits[name]} bits a weight and is never chosen: {better}, which is more precise, takes "
        f"{bits[better]}: leave {name} out of the recipe's versions"
        for name, better in never_smaller(list(sizes.items())).items()
    ]
