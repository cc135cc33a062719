"""The colours of versions and of a budget's parts, the same on the server's page, in reports and in charts.

A hue stands for a number of bits: these are the colours of Okabe and Ito, which people with any colour vision can tell
apart. Forms with the same number of bits have shades of it. Every colour stands out from a light and from a
dark ground.
"""

from __future__ import annotations

from collections.abc import Mapping

VERSIONS: Mapping[str, str] = {
    "bf16": "#0072b2",
    "fp8": "#8f4f9f", "fp8row": "#b5588f", "mxfp8": "#d98fc4", "int8": "#7d6bb8", "int8fp16": "#a58bd0",
    "w8": "#cc79a7",
    "w4d5": "#3d8fc4", "mxfp4": "#2fa3a8", "nvfp4": "#5fbcc4", "int4": "#6f8fd6", "int4fp16": "#93aae0",
    "w4": "#56b4e9",
    "w3d4": "#53bf9b", "w3": "#009e73",
    "w2d3": "#c9a227", "w2": "#e69f00",
    "w1d2": "#e8845a", "w1": "#d55e00",
}  # fmt: skip
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
    grey = FADED[place]
    channels = bytes.fromhex(found[1:])
    return "#" + "".join(f"{round(value + (GREY - value) * grey):02x}" for value in channels)
