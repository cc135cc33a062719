"""A small bundle, and a copy of it that a test may edit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hostile_edits import Victim
from small_bundle import released_versions, write_small_bundle


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_bundle(tmp_path_factory.mktemp("small") / "bundle")


@pytest.fixture(scope="module")
def copied(small: Path, tmp_path_factory: pytest.TempPathFactory) -> Victim:
    return Victim(small, tmp_path_factory.mktemp("victim"))


@pytest.fixture
def victim(copied: Victim) -> Iterator[Victim]:
    yield copied
    copied.restore()


@pytest.fixture(scope="module")
def released_victim(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Victim]:
    """A copy of a bundle with a released version, which whoever edits it restores."""
    made: dict[str, Victim] = {}

    def of(name: str, group_size: int) -> Victim:
        if name not in made:
            room, versions = tmp_path_factory.mktemp(name), released_versions(name, group_size)
            small = write_small_bundle(room / "small", versions, next(iter(versions[0].holds)))
            made[name] = Victim(small, room)
        return made[name]

    return of
