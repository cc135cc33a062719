"""Random edits end in a refusal of one line or a bundle that can be read; what does not is found.

`python -m benchmarks.hostile` makes others.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hostile_edits import KINDS as RANDOM
from hostile_edits import Victim, attack, refusal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(RANDOM)), st.randoms(use_true_random=False))
def test_random_edits_end_in_a_line(copied: Victim, kind: str, rng: Any) -> None:
    try:
        RANDOM[kind](copied, rng)
        refusal(copied.path)
    finally:
        copied.restore()


def test_the_command_counts(small: Path) -> None:
    found = attack(small, 60, seed=7)
    assert sum(sum(c.values()) for c in found.values()) == 60
    assert sum(c["refused"] for c in found.values()) > 30


def test_a_traceback_is_found(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: a reader that lets an edit through as an error of another class; one that takes for ever."""
    import time

    import hostile_edits as hostile

    monkeypatch.setattr(hostile, "open_bundle", lambda path: json.loads(b"{"))
    with pytest.raises(AssertionError, match=r"number 0: JSONDecodeError"):
        attack(small, 5)
    monkeypatch.setattr(hostile, "SECONDS", 1)
    monkeypatch.setattr(hostile, "open_bundle", lambda path: time.sleep(30))
    with pytest.raises(AssertionError, match="TimeoutError"):
        attack(small, 5)
