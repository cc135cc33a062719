"""Ideas that spend fewer bits beside the codes, or put the levels elsewhere. Measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .trial import Trial, gaussian_levels

BLOCKS = ", scales of 6 bits in blocks"  # of 16 rows, which kernels read together: a group of them shares a BF16 scale


def grids(bits: int) -> Iterator[tuple[str, Trial, Trial]]:
    """Instead of today's version of so many bits: a name, and how gate and up, and down, are stored."""
    plain = Trial(bits, 64, 8 if bits > 1 else 0)
    small = replace(plain, scale_bits=6, shared=(1, 16))
    found = {
        "groups of 128": replace(plain, group=128),
        "scales of 8 bits, floats": replace(plain, scale_bits=8, mantissa=4),
        "scales of 6 bits, floats": replace(plain, scale_bits=6, mantissa=3),
        BLOCKS[2:]: small,
    }
    if bits > 1:
        book = replace(plain, levels=gaussian_levels(bits))
        coded = replace(small, levels=book.levels, learned=True)
        found |= {
            "zero points of 4 bits": replace(plain, zero_bits=4),
            "zero points as wide as codes": replace(plain, zero_bits=bits),
            "zero points shared by two rows": replace(plain, zero_rows=2),
            f"zero points of 6 bits{BLOCKS}": replace(small, zero_bits=6),
            f"groups of 32, zero points of 6 bits{BLOCKS}": replace(small, zero_bits=6, group=32),
            "fixed levels": book,
            "learned levels": replace(book, learned=True),
            f"learned levels{BLOCKS}": coded,
            f"learned levels, no zero points{BLOCKS}": replace(coded, zero_bits=0),
        }
    if bits == 2:
        found |= {"three levels": Trial(1.6), f"three levels{BLOCKS}": replace(small, bits=1.6, zero_bits=0)}
    for name, trial in found.items():
        yield f"w{bits}, {name}", trial, trial
    wide = replace(plain, group=128)
    yield f"w{bits}, groups of 128, down rotated", wide, replace(wide, rotated=True)
    yield f"w{bits}d{bits + 1}{BLOCKS}", small, replace(small, bits=bits + 1, zero_bits=8)
