"""Placements: where and at which version an expert is served (on the device, by the host), or that it is absent.

The word `stored` means that an expert's bytes are on the disk alone, and are fetched when a layer needs them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from moepack.pack.errors import InputError
from moepack.pack.spec import Version


class Where(enum.Enum):
    """The memory that holds an expert's bytes, and the processor that runs it."""

    DEVICE = "device"
    PACKED = "packed"  # on the device, entropy-coded; decoded to a block there before its layer runs
    # Entropy-coded in host memory, outside the device's budget; a GPU's kernels read it there when its layer runs, and
    # decode it to device memory
    PACKED_PINNED = "packed-pinned"
    HOST = "host"  # in host memory, outside the device's budget; the host's processor runs it
    PINNED = "pinned"  # in host memory, outside the device's budget; the device's kernels read it there, over the bus
    ABSENT = "absent"  # nowhere: the expert adds nothing to its tokens' sums
    ON_DISK = "on disk"  # in the backing store alone; fetched to one of the other places before its layer runs


NOWHERE = frozenset({Where.ABSENT, Where.ON_DISK})  # places without bytes in memory, and so without a version
READ_THERE = frozenset({Where.PINNED, Where.PACKED_PINNED})  # pinned host memory, where the device's kernels read
ON_HOST = READ_THERE | {Where.HOST}  # places in host memory
CODED = frozenset({Where.PACKED, Where.PACKED_PINNED})  # places of entropy-coded bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """One way to serve an expert; `version` is `None` if the expert is absent, or stored and not fetched."""

    version: Version | None
    where: Where = Where.DEVICE

    def __post_init__(self) -> None:
        if (self.version is None) != (self.where in NOWHERE):
            raise ValueError("an absent or stored expert has no version, and every other has one")
        if self.where in CODED and self.version is not None and not self.version.entropy_coded:
            raise ValueError(f"{self.version.name} is served as it is stored: it has no packed form")

    def __str__(self) -> str:
        if self.version is None:
            return "absent" if self.where is Where.ABSENT else "stored"
        return self.version.name if self.where is Where.DEVICE else f"{self.version.name}@{self.where.value}"


ABSENT = Placement(None, Where.ABSENT)
STORED = Placement(None, Where.ON_DISK)


def read_placement(text: str, versions: Sequence[Version]) -> Placement:
    """Return the placement with a name such as `w4`, `w4@host`, `w4@pinned`, `bf16@packed`, `stored` or `absent`.

    Raises:
        InputError: for a placement that these versions do not have.
    """
    if text in ("absent", "stored"):
        return ABSENT if text == "absent" else STORED
    name, _, place = text.partition("@")
    found = next((v for v in versions if v.name == name), None)
    places = {"": Where.DEVICE, "host": Where.HOST, "pinned": Where.PINNED}
    if found is not None and found.entropy_coded:
        places |= {where.value: where for where in CODED}
    if found is None or place not in places:
        here = ", ".join(v.name for v in versions)
        raise InputError(
            f"has no {text!r}: here are {here}, each also as NAME@host and NAME@pinned, stored and absent; one "
            "whose codes are entropy-coded also as NAME@packed and NAME@packed-pinned"
        )
    return Placement(found, places[place])


def find_version(name: str, versions: Sequence[Version]) -> Version:
    """Return a version by its name.

    Raises:
        InputError: for a version that is not among `versions`.
    """
    found = next((v for v in versions if v.name == name), None)
    if found is None:
        raise InputError(f"has no version {name!r}: here are {', '.join(v.name for v in versions)}")
    return found


def version_name(placement: str) -> str:
    """Return the version in a placement's name; nothing for `absent` and `stored`."""
    return "" if placement in ("absent", "stored") else placement.partition("@")[0]
