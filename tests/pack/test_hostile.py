"""Hostile bundles and checkpoints, some of those that `python -m benchmarks.hostile` makes, and what was found."""

import os
import signal
from dataclasses import replace

import pytest
from hostile_edits import in_time

from benchmarks.hostile import bundles, checkpoints, session
from moepack.pack.manifest import strict_json


def test_some_checkpoints():
    found = session.hostile(checkpoints.SUBJECTS, 120, first=1_000_000)
    assert not found.wrong, "\n".join(found.wrong)
    assert all(counts["refused"] and counts["opened"] for counts in found.by_subject.values())


def test_a_case_that_does_something_else_is_seen(monkeypatch):
    """An exception, a process that ends, one that takes too long or lets no signal in, and bytes written elsewhere."""

    def attempt(root, out, writes):
        number = next(turns)
        if number == 1:
            raise KeyError("x")
        if number == 2:
            os._exit(7)
        if number == 3:
            (root.parent / "outside" / "file").write_text("changed")
        if number == 5:  # as compiled code is
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        if number in (4, 5):
            while True:
                pass
        return bundles.attempt(root, out, writes)

    monkeypatch.setattr(session, "BATCH", 4)
    monkeypatch.setattr(session, "PATIENCE", 1)
    subjects = [replace(bundles.SUBJECTS[0], attempt=attempt)]
    turns = iter(range(100))
    wrong = session.hostile(subjects, 2).wrong
    assert len(wrong) == 2 and "KeyError at" in wrong[0] and "ended with 7" in wrong[1]
    turns = iter([0, 0, 3, 4, 0])
    wrong = session.hostile(subjects, 4).wrong
    assert len(wrong) == 2 and "more than 1 s" in wrong[0] and "outside was changed" in wrong[1]
    turns = iter([0, 5])
    (silent,) = session.hostile(subjects, 1).wrong
    assert "ended with -9" in silent


def test_a_name_that_stands_twice_among_many_is_found_at_once():
    names = ",".join(f'"{i}":0' for i in range(300_000))
    with in_time(20), pytest.raises(ValueError, match="the name '299999' stands twice"):
        strict_json.loads(f'{{{names},"299999":0}}'.encode())
