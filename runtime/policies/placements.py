"""Where and as what an expert is served: a version on the device, a version executed on the host, or absent. Data."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from moepack.pack.errors import InputError
from moepack.pack.spec import Version


class Where(enum.Enum):
    """Where an expert's bytes are and its products are made."""

    DEVICE = "device"
    PACKED = "packed"  # on the device as it is stored, and decoded into a window there when its layer runs (paging/)
    STORED = "stored"  # in the backing store alone, and read into that window when its layer runs
    HOST = "host"  # in the host's memory, which no device budget counts; the host's processor makes the products
    ABSENT = "absent"  # nowhere: the expert adds nothing to the sum of those that a token goes to


PAGED = frozenset({Where.PACKED, Where.STORED})  # whose weights have memory while they are needed


@dataclass(frozen=True, slots=True)
class Placement:
    """One way to serve an expert.

    Attributes:
        version: its encoding; None where it is absent.
        where: where it is.
    """

    version: Version | None
    where: Where = Where.DEVICE

    def __post_init__(self) -> None:
        if (self.version is None) != (self.where is Where.ABSENT):
            raise ValueError("what is absent has no version, and nothing else lacks one")
        if self.where in PAGED and self.version is not None and not self.version.entropy_coded:
            raise ValueError(f"{self.version.name} is served as it is stored: it has no packed form")

    def __str__(self) -> str:
        if self.version is None:
            return "absent"
        return self.version.name if self.where is Where.DEVICE else f"{self.version.name}@{self.where.value}"


ABSENT = Placement(None, Where.ABSENT)


def read_placement(text: str, versions: Sequence[Version]) -> Placement:
    """The placement that `str` wrote: `w4`, `w4@host`, `bf16@packed`, `bf16@stored` or `absent`.

    Raises:
        InputError: for one that there is not among these versions.
    """
    if text == "absent":
        return ABSENT
    name, _, place = text.partition("@")
    found = next((v for v in versions if v.name == name), None)
    places = {"": Where.DEVICE, "host": Where.HOST}
    if found is not None and found.entropy_coded:
        places |= {where.value: where for where in PAGED}
    if found is None or place not in places:
        here = ", ".join(v.name for v in versions)
        raise InputError(
            f"has no {text!r}: here are {here}, each also as NAME@host, and absent; the lossless one also as "
            "NAME@packed and NAME@stored"
        )
    return Placement(found, places[place])


def on_device(name: str, versions: Sequence[Version]) -> Placement:
    """A version, by its name alone, on the device.

    Raises:
        InputError: for one that there is not.
    """
    found = next((v for v in versions if v.name == name), None)
    if found is None:
        raise InputError(f"has no version {name!r}: here are {', '.join(v.name for v in versions)}")
    return Placement(found)
