"""lm-evaluation-harness over completions: a task of choices and one of texts, from a file that is written here."""

import json
from pathlib import Path

from cases import BUNDLE, MODEL, URL, case
from lm_eval import simple_evaluate
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager

HEAD = "task: {task}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {file}}}}}\ntest_split: test\n"
TASKS = {
    "choices": (
        'output_type: multiple_choice\ndoc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\n'
        "doc_to_target: answer\nmetric_list: [{metric: acc}]\n"
    ),
    "texts": (
        'output_type: generate_until\ndoc_to_text: "{{question}}"\ndoc_to_target: "{{choices[0]}}"\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 12, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]\n"
    ),
}
QUESTIONS = ("The history of the town", "Tom has 3 apples and buys", "def add(a, b):", "In the year 1900") * 3
CHOICES = [" a long time", " 5", " self", " was"]

rows = [{"question": f"{n} {q}", "choices": CHOICES, "answer": n % 4} for n, q in enumerate(QUESTIONS)]
data = Path("tasks").absolute()
data.mkdir(exist_ok=True)
(data / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
for name, text in TASKS.items():
    (data / f"{name}.yaml").write_text(HEAD.format(task=name, file=data / "rows.jsonl") + text)
model = LocalCompletionsAPI(
    model=MODEL, base_url=f"{URL}/v1/completions", tokenizer=BUNDLE, num_concurrent=4, max_length=256
)


def evaluated(task):
    """The answers to a task's questions."""
    manager = TaskManager(include_path=str(data), include_defaults=False)
    found = simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=10)
    assert found is not None and len(found["samples"][task]) == len(rows)
    return [sample["resps"] for sample in found["samples"][task]]


@case
def choices_are_scored() -> None:
    scores = [float(choice[0][0]) for answers in evaluated("choices") for choice in answers]
    assert len(scores) == len(rows) * len(CHOICES) and all(score < 0 for score in scores)


@case
def texts_are_written() -> None:
    answers = evaluated("texts")
    assert all(isinstance(answer[0][0], str) for answer in answers) and any(answer[0][0] for answer in answers)
