"""A small bundle, and a copy of it that a test may edit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_edits import Victim
from small_bundle import write_small_bundle


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
