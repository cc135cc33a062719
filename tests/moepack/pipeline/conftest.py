"""The bundle that the quick recipe makes of two layers: what builds that were stopped or staged are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from support import RTN, tree

from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe


@pytest.fixture(scope="session")
def whole(short_model: Path, text: Path, made_once: Callable[..., Path]) -> dict[str, bytes]:
    """The files of an undisturbed build of the short model."""
    return tree(made_once("whole", lambda path: build(short_model, path, parse_recipe(RTN, "test"), [text])))
