"""lm-evaluation-harness gets the same results from the server as from the bundle in this process (HFLM)."""

import json

import pytest
import torch

import moepack

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

from support import CHOICES

SAYING = """
task: saying
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
generation_kwargs: {{until: ["\\n", "."], max_gen_toks: 12, do_sample: false, temperature: 0.0}}
metric_list: [{{metric: exact_match}}]
"""
QUESTIONS = (
    "The history of the town", "Tom has 3 apples and buys", "def add(a, b):", "In the year 1900", "She sold clips to",
    "import numpy as", "The river flows", "If x is 4 then x + 1 is", "return the", "A king of", "One day he", "class A",
)  # fmt: skip


@pytest.fixture
def manager(tmp_path):
    from lm_eval.tasks import TaskManager

    choices = [" a long time", " 5", " self", " was"]
    rows = [{"question": q, "choices": choices, "answer": n % 4} for n, q in enumerate(QUESTIONS)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "choices.yaml").write_text(CHOICES.format(file=tmp_path / "rows.jsonl"))
    (tmp_path / "saying.yaml").write_text(SAYING.format(file=tmp_path / "rows.jsonl"))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def asked(model, task, manager, **options):
    from lm_eval import simple_evaluate

    found = simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=10, verbosity="ERROR", **options)
    samples = sorted(found["samples"][task], key=lambda s: s["doc_id"])
    return found["results"][task], [s["resps"] for s in samples]


@pytest.fixture(scope="module")
def here(bundle):
    """The bundle that `exact` serves, in this process."""
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoTokenizer

    model = moepack.load(bundle, policy="static:bf16", dtype=torch.float32)
    with model.moepack:
        yield HFLM(pretrained=model, tokenizer=AutoTokenizer.from_pretrained(bundle), batch_size=1)


def test_completions_score_choices_as_the_model_here(exact, bundle, here, manager):
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    there = LocalCompletionsAPI(
        model="mini", base_url=f"{exact.url}/v1/completions", tokenizer=str(bundle), num_concurrent=4, max_length=256
    )
    scores, right = asked(there, "choices", manager)
    mine, local = asked(here, "choices", manager)
    got = torch.tensor([[float(c[0][0]) for c in row] for row in right])
    want = torch.tensor([[float(c[0][0]) for c in row] for row in local])
    torch.testing.assert_close(got, want, atol=2e-3, rtol=0)
    assert [[c[0][1] for c in row] for row in right] == [[c[0][1] for c in row] for row in local]
    for metric in ("acc,none", "acc_norm,none"):
        assert scores[metric] == mine[metric] and 0 < scores[metric] < 1
    said, told = asked(there, "saying", manager), asked(here, "saying", manager)
    assert said[1] == told[1] and any(row[0][0] for row in said[1])
