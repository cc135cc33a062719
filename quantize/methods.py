"""The table of quantisers, from which recipes, builds, loss tables and reports read.

A new quantiser is a file here with a function `quantise_widths`, and a line at the end of METHODS. Importing this
module imports neither torch nor a quantiser: an entry's function is imported when it is first called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from moepack.pack.errors import MissingExtraError
from moepack.pack.spec import Version

if TYPE_CHECKING:
    from torch import Tensor

    from .grid import Quantised

    Quantiser = Callable[..., dict[Version, Quantised]]

ASYMMETRIC = ("hqq", "gptqmodel")  # methods whose search is for a zero point: moved to the middle, little is left of it
# Which zero points a recipe allows: any that the format stores (fractions of a code), whole codes, or the middle code
# 2**(bits-1) alone.
FREE, INTEGER, SYMMETRIC = ZEROS = ("fractional", "integer", "symmetric")


@dataclass(frozen=True, slots=True)
class Library:
    """A Python distribution that a method needs, and the lowest version that works."""

    name: str
    least: str
    extra: str = "build"  # the extra of moepack that brings it


@dataclass(frozen=True, slots=True)
class Method:
    """One quantiser."""

    name: str  # its name in recipes, loss tables and reports
    quantise: Quantiser  # quantises a batch of experts at several widths; arguments and result as in `quantise_all`
    needs_moments: bool = False  # whether it reads second moments; if not, these may be None
    one_bit: str | None = None  # the method that makes one-bit versions instead
    # Methods also tried for starved experts, in this order; the best on held-out tokens is kept. A fallback reads no
    # moments.
    fallbacks: tuple[str, ...] = ()
    least_bits: int = 1  # as a fallback, the fewest bits at which it is tried
    # As a fallback, it is tried if the best error so far is more than this share of the first fallback's error.
    worth: float = 0.0
    named: bool = True  # whether a recipe may name it
    library: Library | None = None  # the library that it needs
    # Whether `quantise` takes `zeros`, one of ZEROS, as a fourth argument; `grid.with_zeros` moves others' zero points.
    takes_zeros: bool = False


def in_file(name: str) -> Quantiser:
    """Make a function that imports a module of this folder and calls the module's `quantise_widths`."""

    def quantise(
        weight: Tensor, moments: Tensor | None, versions: Sequence[Version], *zeros: str
    ) -> dict[Version, Quantised]:
        module = importlib.import_module(f".{name}", __package__)
        made: dict[Version, Quantised] = module.quantise_widths(weight, moments, versions, *zeros)
        return made

    return quantise


_GPTQ = in_file("gptq")  # one function for two names: it makes one bit in the same pass as the other widths
_FALLBACKS = ("rtn", "hqq")

# The order is part of the bundles' bytes (loss tables number methods by it): new ones go to the end.
METHODS: tuple[Method, ...] = (
    Method("gptq", _GPTQ, needs_moments=True, one_bit="sign", fallbacks=_FALLBACKS, takes_zeros=True),
    Method("sign", _GPTQ, needs_moments=True, named=False, takes_zeros=True),
    # hqq takes longer than all else together, and its error was never below 0.7 of rounding's: `worth` 0.6 skips it
    # where it cannot win. At one bit it equals `rtn`.
    Method("hqq", in_file("hqq"), least_bits=2, worth=0.6, library=Library("hqq", "0.2.8")),
    Method("rtn", in_file("rtn")),
    Method(
        "gptqmodel",
        in_file("gptqmodel_reference"),
        needs_moments=True,
        one_bit="sign",
        fallbacks=_FALLBACKS,
        library=Library("gptqmodel", "7.7", extra="gptqmodel"),
    ),
    Method("trellis", in_file("trellis"), needs_moments=True, named=False),  # trellis versions, whatever is named
)


DEFAULT = METHODS[0].name


def get(name: str) -> Method:
    """The entry of METHODS with this name. Raises ValueError for an unknown name."""
    for entry in METHODS:
        if entry.name == name:
            return entry
    raise ValueError(f"unknown method {name}")


def named() -> tuple[str, ...]:
    """The methods that a recipe may name."""
    return tuple(m.name for m in METHODS if m.named)


def numbered() -> tuple[str, ...]:
    """Map the numbers in loss tables to method names; 0 means a lossless version."""
    return ("none", *(m.name for m in METHODS))


def libraries() -> tuple[Library, ...]:
    """The libraries that methods need."""
    return tuple(m.library for m in METHODS if m.library is not None)


def method_for(name: str, version: Version) -> Method:
    """The method that makes a version if a recipe names `name`."""
    if version.trellis:
        return get("trellis")
    entry = get(name)
    return get(entry.one_bit) if version.zero == "midpoint" and entry.one_bit is not None else entry


def fallbacks(name: str, version: Version) -> tuple[Method, ...]:
    """The methods that may replace a method for starved experts at a version."""
    if version.trellis:
        return ()
    return tuple(m for m in map(get, get(name).fallbacks) if version.bits >= m.least_bits)


def installed(library: str) -> str | None:
    """Return a distribution's version, or None if it is not installed."""
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return None


def check_libraries(name: str, versions: Iterable[Version]) -> None:
    """Raise MissingExtraError if a method, or a fallback, lacks the library with which it makes one of `versions`."""
    makers = (entry for v in versions for entry in (method_for(name, v), *fallbacks(name, v)))
    for library in dict.fromkeys(entry.library for entry in makers):
        if library is not None and installed(library.name) is None:
            raise MissingExtraError(library.name, library.extra)


def quantise_all(
    name: str, weight: Tensor, moments: Tensor | None, versions: Sequence[Version], zeros: str = FREE, matrix: int = 0
) -> dict[Version, Quantised]:
    """Quantise a batch of matrices, float32 [experts, rows, cols], at several versions, in their order.

    `matrix` is their index in an expert, which says which bits of a mixed version they get.
    `moments` are the inputs' mean second moments, float32 [experts, cols, cols], or None if the method needs none.
    `gptq` shares its work among the widths of a call. `zeros` is one of ZEROS.
    """
    wanted: dict[tuple[Quantiser, bool], list[Version]] = {}
    own = {v: v.at(matrix) for v in versions}
    for version in own.values():
        entry = method_for(name, version)
        if entry.needs_moments and moments is None:
            raise ValueError(f"{name} needs second moments")
        wanted.setdefault((entry.quantise, entry.takes_zeros), []).append(version)
    made: dict[Version, Quantised] = {}
    for (quantise_widths, takes_zeros), widths in wanted.items():
        if zeros == FREE:
            made |= quantise_widths(weight, moments, widths)
        elif takes_zeros:
            made |= quantise_widths(weight, moments, widths, zeros)
        else:
            from .grid import with_zeros

            found = quantise_widths(weight, moments, widths)
            made |= {v: with_zeros(weight, q, v, zeros == SYMMETRIC) for v, q in found.items()}
    if any(v.scale_bits == 8 for v in versions):
        from .grid import raised

        made = {v: raised(weight, q, v) if v.scale_bits == 8 and not v.trellis else q for v, q in made.items()}
    return {v: made[own[v]] for v in versions}


def quantise(
    name: str, weight: Tensor, moments: Tensor | None, version: Version, zeros: str = FREE, matrix: int = 0
) -> Quantised:
    """Quantise a batch of matrices at one width; see `quantise_all`."""
    return quantise_all(name, weight, moments, (version,), zeros, matrix)[version]
