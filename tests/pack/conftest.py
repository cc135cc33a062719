"""A small bundle, and a copy of it that a test may edit."""

import pytest
from hostile_edits import Victim

from benchmarks.hostile.small_bundle import released_versions, write_small_bundle


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return write_small_bundle(tmp_path_factory.mktemp("small") / "bundle")


@pytest.fixture(scope="module")
def copied(small, tmp_path_factory):
    return Victim(small, tmp_path_factory.mktemp("victim"))


@pytest.fixture
def victim(copied):
    yield copied
    copied.restore()


@pytest.fixture(scope="module")
def released_victim(tmp_path_factory):
    """A copy of a bundle with a released version, which whoever edits it restores."""
    made = {}

    def of(name, group_size):
        if name not in made:
            room, versions = tmp_path_factory.mktemp(name), released_versions(name, group_size)
            small = write_small_bundle(room / "small", versions, next(iter(versions[0].holds)))
            made[name] = Victim(small, room)
        return made[name]

    return of
