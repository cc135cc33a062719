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
    HOST = "host"  # in the host's memory, which no device budget counts; the host's processor makes the products
    ABSENT = "absent"  # nowhere: the expert adds nothing to the sum of those that a token goes to


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

    def __str__(self) -> str:
        if self.version is None:
            return "absent"
        return self.version.name if self.where is Where.DEVICE else f"{self.version.name}@host"


ABSENT = Placement(None, Where.ABSENT)


def read_placement(text: str, versions: Sequence[Version]) -> Placement:
    """The placement that `str` wrote: `w4`, `w4@host` or `absent`.

    Raises:
        InputError: for one that there is not among these versions.
    """
    if text == "absent":
        return ABSENT
    name, _, host = text.partition("@")
    found = next((v for v in versions if v.name == name), None)
    if found is None or host not in ("", "host"):
        here = ", ".join(v.name for v in versions)
        raise InputError(f"has no {text!r}: here are {here}, each also as NAME@host, and absent")
    return Placement(found, Where.HOST if host else Where.DEVICE)


def on_device(name: str, versions: Sequence[Version]) -> Placement:
    """A version, by its name alone, on the device.

    Raises:
        InputError: for one that there is not.
    """
    found = next((v for v in versions if v.name == name), None)
    if found is None:
        raise InputError(f"has no version {name!r}: here are {', '.join(v.name for v in versions)}")
    return Placement(found)
