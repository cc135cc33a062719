"""The quantisers, as a table: what recipes, builds, loss tables and reports know of any of them follows from its entry.

A new one is a file of this folder with a function `quantise_widths`, and a line at the end of METHODS. Importing this
imports neither torch nor a quantiser: an entry's function is imported when it is first called.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moepack.pack.spec import Version

if TYPE_CHECKING:
    from torch import Tensor

    from .grid import Quantised

    Quantiser = Callable[[Tensor, Tensor | None, Sequence[Version]], dict[Version, Quantised]]


@dataclass(frozen=True, slots=True)
class Library:
    """A Python distribution that a method runs on, and the least version of it."""

    name: str
    least: str


@dataclass(frozen=True, slots=True)
class Method:
    """One quantiser.

    Attributes:
        name: what recipes, loss tables and reports call it.
        quantise: makes a batch of experts at several widths; arguments and result as in `quantise_all`.
        needs_moments: whether it reads second moments. Without, they may be None.
        one_bit: the method that makes one bit in its stead.
        fallbacks: what is tried as well for an expert that too few tokens reached, in this order; the one that does
            best on tokens nobody learnt from is kept. A fallback reads no moments.
        least_bits: as a fallback, it is tried at this many bits or more.
        worth: as a fallback, it is tried where the best so far has more than this share of the first fallback's error.
        named: whether a recipe may ask for it.
        library: what it needs beyond moepack itself.
    """

    name: str
    quantise: Quantiser
    needs_moments: bool = False
    one_bit: str | None = None
    fallbacks: tuple[str, ...] = ()
    least_bits: int = 1
    worth: float = 0.0
    named: bool = True
    library: Library | None = None


def in_file(name: str) -> Quantiser:
    """`quantise_widths` of a module of this folder, which is imported when the function is called."""

    def quantise(weight: Tensor, moments: Tensor | None, versions: Sequence[Version]) -> dict[Version, Quantised]:
        module = importlib.import_module(f".{name}", __package__)
        made: dict[Version, Quantised] = module.quantise_widths(weight, moments, versions)
        return made

    return quantise


_GPTQ = in_file("gptq")  # one function for two names: it makes one bit in the same pass as the other widths
_FALLBACKS = ("rtn", "hqq")

# The order is part of the bundles' bytes (loss tables number methods by it): new ones go to the end.
METHODS: tuple[Method, ...] = (
    Method("gptq", _GPTQ, needs_moments=True, one_bit="sign", fallbacks=_FALLBACKS),
    Method("sign", _GPTQ, needs_moments=True, named=False),
    # It takes longer than all else together, and its error was never below 0.7 of rounding's: not tried below 0.6. At
    # one bit it would be `rtn` again.
    Method("hqq", in_file("hqq"), least_bits=2, worth=0.6, library=Library("hqq", "0.2.8")),
    Method("rtn", in_file("rtn")),
    Method(
        "gptqmodel", in_file("gptqmodel_reference"), needs_moments=True, one_bit="sign", fallbacks=_FALLBACKS,
        library=Library("gptqmodel", "7.7"),
    ),
)  # fmt: skip


DEFAULT = METHODS[0].name


def get(name: str) -> Method:
    """The entry of that name.

    Raises:
        ValueError: when there is none.
    """
    for entry in METHODS:
        if entry.name == name:
            return entry
    raise ValueError(f"unknown method {name}")


def named() -> tuple[str, ...]:
    """The names that a recipe may ask for."""
    return tuple(m.name for m in METHODS if m.named)


def numbered() -> tuple[str, ...]:
    """The names by their numbers in loss tables; number 0 is no method at all, for what is stored as it is."""
    return ("none", *(m.name for m in METHODS))


def libraries() -> tuple[Library, ...]:
    """What some method needs beyond moepack itself."""
    return tuple(m.library for m in METHODS if m.library is not None)


def method_for(name: str, version: Version) -> Method:
    """The method that makes a version where a recipe asks for `name`."""
    entry = get(name)
    return get(entry.one_bit) if not version.stores_zeros and entry.one_bit is not None else entry


def fallbacks(name: str, version: Version) -> tuple[Method, ...]:
    """What may replace a method for an expert that too few tokens reached, at a version's width."""
    return tuple(m for m in map(get, get(name).fallbacks) if version.bits >= m.least_bits)


def quantise_all(
    name: str, weight: Tensor, moments: Tensor | None, versions: Sequence[Version]
) -> dict[Version, Quantised]:
    """Quantise a batch of matrices at several widths; one call for all of them is what makes `gptq` fast.

    Args:
        name: a method's.
        weight: float32 [experts, rows, cols].
        moments: mean second moments of the inputs, float32 [experts, cols, cols]; only for methods that need them.
        versions: affine versions.

    Returns:
        One batch a version, in their order.
    """
    wanted: dict[Quantiser, list[Version]] = {}
    for version in versions:
        entry = method_for(name, version)
        if entry.needs_moments and moments is None:
            raise ValueError(f"{name} needs second moments")
        wanted.setdefault(entry.quantise, []).append(version)
    made: dict[Version, Quantised] = {}
    for quantise_widths, widths in wanted.items():
        made |= quantise_widths(weight, moments, widths)
    return {v: made[v] for v in versions}


def quantise(name: str, weight: Tensor, moments: Tensor | None, version: Version) -> Quantised:
    """Quantise a batch of matrices at one width; see `quantise_all`."""
    return quantise_all(name, weight, moments, (version,))[version]
