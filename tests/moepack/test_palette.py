"""One colour a version: every version and place has its own, and stands out from light and from dark grounds."""

import itertools

import pytest

from moepack.pack.spec import KNOWN
from moepack.runtime.policies.placements import ABSENT, STORED, Placement, Where
from moepack.shared.palette import PARTS, VERSIONS, colour

GROUNDS = ("#ffffff", "#f5f6f8", "#1b1e23", "#161616")  # of the server's page and of reports


def luminance(shade):
    """WCAG's relative luminance."""
    values = [channel / 255 for channel in bytes.fromhex(shade[1:])]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
    return sum(weight * v for weight, v in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_version_and_part_has_its_own_colour():
    assert set(VERSIONS) == {version.name for version in KNOWN}
    shades = [*VERSIONS.values(), *PARTS.values()]
    assert len(set(shades)) == len(shades)
    for shade, ground in itertools.product(shades, GROUNDS):
        dark, light = sorted((luminance(shade), luminance(ground)))
        assert (light + 0.05) / (dark + 0.05) > 1.9, (shade, ground)


def test_a_place_changes_the_colour_of_its_version():
    assert {colour("absent"), colour("stored")} == {colour(str(ABSENT)), colour(str(STORED))}
    w4 = next(v for v in KNOWN if v.name == "w4")
    placed = [Where.DEVICE, Where.PINNED, Where.HOST]
    shades = {colour(str(Placement(w4, where))) for where in placed}
    bf16 = next(v for v in KNOWN if v.name == "bf16")
    coded = {colour(str(Placement(bf16, where))) for where in (Where.DEVICE, Where.PACKED, Where.PACKED_PINNED)}
    assert len(shades) == len(coded) == 3 and colour("w4") == VERSIONS["w4"]
    with pytest.raises(KeyError):
        colour("w9")
