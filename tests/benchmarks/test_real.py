"""The upcycled model: an interrupted run goes on, and ends in the bytes of one that was not interrupted."""

from __future__ import annotations

import pytest

from benchmarks.real import make, source, upcycle

pytestmark = pytest.mark.full


def test_an_interrupted_run_ends_in_the_same_bytes(tmp_path):
    released = source.generated(tmp_path / "released")
    training = upcycle.Training(steps=2, length=128, rank=2)
    ends = []
    for name in ("whole", "resumed"):
        output = tmp_path / name
        make.make(released, output, tmp_path, training, workers=1)
        ends.append((output / "model.safetensors").read_bytes())
        stages = sorted(tmp_path.glob("stages-*/*.safetensors"))
        assert len(stages) == len(upcycle.BRANCHES) + 1
        for stage in stages[::2]:  # as if the run had been stopped before these
            stage.unlink()
    assert ends[0] == ends[1]


def test_a_file_of_other_bytes_is_refused(tmp_path):
    other = tmp_path / source.FILE
    other.write_bytes(b"GGUF")
    with pytest.raises(source.SourceError, match=r"is not SmolLM2.*its SHA-256 is"):
        source.source(other)
