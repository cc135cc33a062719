"""The upcycled model: interrupted runs, what is refused, and the arithmetic of its tables."""

import pytest

from benchmarks.real import make, source, tasks, upcycle, versions


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


def test_a_folder_of_others_is_not_replaced(tmp_path):
    released = source.generated(tmp_path / "released")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter.txt").write_text("keep")
    with pytest.raises(source.SourceError, match="was not made by this command"):
        make.make(released, mine, tmp_path, upcycle.Training(), workers=1)
    assert (mine / "letter.txt").read_text() == "keep"


def test_shares_at_equal_bits_lie_on_the_line_of_logarithms():
    """At 2.5 bits, half way from 2 to 3, the default's divergence is the geometric mean of 0.4 and 0.1."""
    rows = [
        {"recipe": recipe, "version": version, "bits/weight": bits, "KL": kl}
        for recipe, version, bits, kl in (
            ("uniform", "bf16", 10.7, ""),
            ("uniform", "w3", 3.0, 0.1),
            ("uniform", "w2", 2.0, 0.4),
            ("default", "w2d3", 2.5, 0.1),
            ("default", "w4d5", 4.6, 0.01),
        )
    ]
    assert versions.at_equal_bits(rows, "uniform", "default") == {"w2d3": pytest.approx(0.5)}


def test_questions_differ_and_any_rank_may_be_right():
    asked = tasks.questions(30)
    assert len({question.prompt for question in asked}) == len(asked) == 120
    sums = [question for question in asked if question.kind == "sums"]
    ranks = {sorted(question.options, key=int).index(question.options[question.answer]) for question in sums}
    assert ranks == {0, 1, 2, 3}
