"""The colours of versions and of a budget's parts, the same on the server's page, in reports and in charts.

A hue stands for a number of bits: these are the colours of Okabe and Ito, which people with any colour vision can tell
apart. Versions with the same number of bits have shades of it. Every colour stands out from a light and from a
dark ground.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby

from moepack.pack.spec import KNOWN, Version

BITS: Mapping[int, str] = {
    16: "#0072b2", 8: "#cc79a7", 4: "#56b4e9", 3: "#009e73", 2: "#e69f00", 1: "#d55e00",
}  # fmt: skip
DEEPEST = 0.3  # the most black or white in a shade


def _hue(version: Version) -> str:
    return BITS[min(BITS, key=lambda bits: abs(bits - version.bits))]


def _mixed(colour: str, other: int, share: float) -> str:
    """Mix a colour with a share of a grey, from 0 (black) to 255."""
    channels = bytes.fromhex(colour[1:])
    return "#" + "".join(f"{round(value + (other - value) * share):02x}" for value in channels)


def _shades() -> dict[str, str]:
    """The colour of every version: of those with one hue the last has it as it is, others darker and lighter shades."""
    out = {}
    for hue, group in groupby(KNOWN, key=_hue):
        names = [version.name for version in group]
        for n, name in enumerate(reversed(names)):
            share = DEEPEST * ((n + 1) // 2) / max(1, len(names) // 2)
            out[name] = _mixed(hue, 0 if n % 2 else 255, share)
    return out


VERSIONS = _shades()
PARTS: Mapping[str, str] = {
    "dense": "#7f8791", "kv": "#b0a160", "activations": "#a5adb8", "staging": "#697283", "window": "#8a7f5c",
    "stored": "#8f8f8f", "absent": "#a9a4b0",
}  # fmt: skip
GREY = 0x80
# The share of grey in a version's colour, by the place where it is.
FADED: Mapping[str, float] = {"packed": 0.2, "pinned": 0.35, "packed-pinned": 0.5, "host": 0.6}


def colour(name: str) -> str:
    """Return the colour of a version (`w4`), of one elsewhere (`w4@host`), or of another part of memory (`kv`).

    Raises:
        KeyError: for any other name.
    """
    version, _, place = name.partition("@")
    found = PARTS.get(version) or VERSIONS[version]
    if not place:
        return found
    return _mixed(found, GREY, FADED[place])
