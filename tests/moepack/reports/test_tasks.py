"""Tasks of lm-evaluation-harness, asked of a bundle: one of our own, as the data of others are not to be had here."""

import json

import pytest
from live_models import hurt_when_loaded
from support import CHOICES

from moepack.pack.errors import InputError, NotFiniteError
from moepack.reports import tasks
from moepack.reports.tasks import render, run_tasks
from moepack.runtime.planning.options import LoadOptions
from moepack.shared import opening
from moepack.shared.progress import Reporter

harness = pytest.importorskip("lm_eval.tasks")


@pytest.fixture
def folder(tmp_path):
    rows = [
        {"question": f"One and {n} is", "choices": [f" {n + 1}", " a very long answer of no use"], "answer": n % 2}
        for n in range(8)
    ]
    (tmp_path / "choices.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "choices.yaml").write_text(CHOICES.format(file=tmp_path / "choices.jsonl"))
    return tmp_path


class Counted(Reporter):
    """Keeps how many units it was told of."""

    def __init__(self):
        self.units, self.done = [], 0

    def inner(self, name, total):
        self.units.append((name, total))

    def advance(self, amount=1):
        self.done += amount


def test_a_task_is_asked_in_a_budget_and_without(bundle, folder):
    counted = Counted()
    free = run_tasks(bundle, ["choices"], LoadOptions(policy="static:bf16"), folder=folder, length=64, reporter=counted)
    assert (counted.units, counted.done) == ([("answers", 16)], 16), "two choices of eight questions"
    # Short answers are more likely than long ones, so that half of the questions come out right.
    assert free["choices"]["acc,none"] == 0.5
    held = run_tasks(
        bundle, ["choices"], LoadOptions(policy="hotness", device_memory=20_000_000), folder=folder, length=64, limit=4
    )
    assert held["choices"]["acc,none"] == 0.5 and held["choices"]["sample_len"] == 4
    assert render(free, "bundle").row_count == 2


@pytest.mark.parametrize(("asked", "kv_tokens"), [({}, 64), ({"kv_tokens": 96}, 96)])
def test_a_budget_has_room_for_the_length_or_for_what_was_asked(bundle, folder, monkeypatch, asked, kv_tokens):
    given = []

    def load(source, options, reporter):
        given.append(options.workload)
        raise InputError("enough")

    monkeypatch.setattr(tasks, "load_shown", load)
    with pytest.raises(InputError, match="enough"):
        run_tasks(bundle, ["choices"], LoadOptions(device_memory="1GB", **asked), folder=folder, length=64)
    (work,) = given
    assert (work.kv_tokens, work.prefill_tokens, work.all_logits) == (kv_tokens, 64, True)


def test_a_task_that_does_not_exist(bundle, folder, monkeypatch):
    """The harness's own tasks stay out: reading them takes ten seconds."""
    made = harness.TaskManager
    monkeypatch.setattr(harness, "TaskManager", lambda include_path, **_: made(None, include_path, False))
    with pytest.raises(InputError, match="no task nothing_such: `lm_eval ls tasks`"):
        run_tasks(bundle, ["choices", "nothing_such"], folder=folder)


def test_an_answer_of_nan_is_not_a_wrong_one(bundle, folder, monkeypatch):
    """The harness compares likelihoods of NaN, and reported an accuracy."""
    hurt_when_loaded(monkeypatch, opening)
    with pytest.raises(NotFiniteError, match=r"mini gives logits that are NaN"):
        run_tasks(bundle, ["choices"], LoadOptions(policy="static:bf16"), folder=folder, length=64)
