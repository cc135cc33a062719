"""Hostile bundles and checkpoints, some of those that `python -m benchmarks.hostile` makes, and what was found."""

import pytest
from hostile_edits import in_time

from benchmarks.hostile import checkpoints, session
from moepack.pack.manifest import strict_json


def test_some_checkpoints():
    found = session.hostile(checkpoints.SUBJECTS, 120, first=1_000_000)
    assert not found.wrong, "\n".join(found.wrong)
    assert all(counts["refused"] and counts["opened"] for counts in found.by_subject.values())


def test_a_name_that_stands_twice_among_many_is_found_at_once():
    names = ",".join(f'"{i}":0' for i in range(300_000))
    with in_time(20), pytest.raises(ValueError, match="the name '299999' stands twice"):
        strict_json.loads(f'{{{names},"299999":0}}'.encode())
