"""Run the tasks of lm-evaluation-harness on a bundle or checkpoint. The harness loads, asks and scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError, MissingExtraError, NotFiniteError
from moepack.runtime.planning.options import DEFAULTS, LoadOptions
from moepack.shared.opening import check, load_shown, locate
from moepack.shared.progress import SILENT, Reporter

from .evaluate import fitting
from .scoring import products

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from rich.table import Table
    from torch import Tensor


def run_tasks(
    path: str | Path,
    tasks: Sequence[str],
    options: LoadOptions = DEFAULTS,
    length: int = 2048,
    shots: int | None = None,
    limit: int | None = None,
    folder: Path | None = None,
    chat: bool = False,
    reporter: Reporter = SILENT,
) -> dict[str, dict[str, object]]:
    """Score a bundle or a checkpoint on tasks.

    Args:
        path: the directory or Hub id of the bundle or checkpoint.
        tasks: names, as `lm_eval --tasks` takes them.
        options: how the model is loaded; `batch` is how many questions are asked at a time, by default 1.
        length: the most tokens of a question with its answer, the model's longest context if that is less; a budget
            leaves room for them unless the options say for how many.
        shots: examples before each question; None for the task's own number.
        limit: the most questions of each task; None asks all.
        folder: a folder of additional tasks.
        chat: ask through the model's chat template.
        reporter: receives progress.

    Returns:
        Metrics and their standard errors by task, as the harness names them.

    Raises:
        InputError: for an unknown task, or data that cannot be downloaded.
        NotFiniteError: where the model's logits are NaN or infinite: the harness would count such answers as wrong.
        MissingExtraError: without lm-eval.
    """
    try:
        from lm_eval import simple_evaluate
        from lm_eval.api.model import CacheHook
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError:
        raise MissingExtraError("lm-eval", "eval") from None
    from moepack.families.tokenizer import load_tokenizer
    from moepack.runtime.checked_logits import NO_LOGITS, finite_rows

    class Asked(HFLM):  # type: ignore[misc]
        def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = True) -> Any:
            reporter.inner("answers", len(requests))
            return super().loglikelihood(requests, disable_tqdm)

        def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = True) -> Any:
            reporter.inner("texts", len(requests))
            return super().loglikelihood_rolling(requests, disable_tqdm)

        def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> Any:
            reporter.inner("answers", len(requests))
            return super().generate_until(requests, disable_tqdm)

        def _model_call(self, *args: object, **given: object) -> Tensor:
            logits: Tensor = super()._model_call(*args, **given)
            if not bool(finite_rows(logits).all()):
                raise NotFiniteError(str(path), NO_LOGITS)
            return logits

    class Counted(CacheHook):  # type: ignore[misc]
        def add_partial(self, *answer: object) -> None:  # of every answer, as soon as it is known
            reporter.advance()

    with reporter.hub_bars():
        source = locate(path)
        check(source, options)
        length = fitting(source.path, length, reporter)
        options = replace(options.filled(kv_tokens=length, prefill_tokens=length), all_logits=True)
        manager = TaskManager(include_path=None if folder is None else str(folder), include_defaults=folder is None)
        if folder is not None and not all(manager.match_tasks([name]) for name in tasks):
            manager = TaskManager(include_path=str(folder))  # the harness's own tasks too, which takes ten seconds
        if unknown := [name for name in tasks if not manager.match_tasks([name])]:
            raise InputError(f"lm-eval has no task {', '.join(unknown)}: `lm_eval ls tasks` lists them")
        model = load_shown(source, options, reporter)
        batch = options.workload.batch
        reporter.stage("tasks", 1)
        reporter.step(", ".join(tasks))
        try:
            asked = Asked(
                pretrained=model, tokenizer=load_tokenizer(Path(source.path)), batch_size=batch, max_length=length
            )
            asked.set_cache_hook(Counted(None))
            with products(model):
                found = simple_evaluate(
                    asked,
                    tasks=list(tasks),
                    num_fewshot=shots,
                    limit=limit,
                    task_manager=manager,
                    apply_chat_template=chat,
                    log_samples=False,
                    bootstrap_iters=1000,
                    verbosity="ERROR",
                )
        except (ConnectionError, FileNotFoundError) as error:
            raise InputError(f"{', '.join(tasks)}: their data cannot be read: {str(error).splitlines()[0]}") from None
        finally:
            if source.is_bundle:
                model.moepack.close()
    assert found is not None
    return {name: {k: v for k, v in row.items() if k != "alias"} for name, row in found["results"].items()}


def render(results: dict[str, dict[str, object]], title: str) -> Table:
    """Make a table with a row for each metric."""
    from rich.table import Table

    table = Table("task", "metric", "value", "standard error", title=title)
    for task, row in results.items():
        for metric, value in row.items():
            name, _, kind = metric.partition(",")
            if not kind or name.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = row.get(f"{name}_stderr,{kind}")
            table.add_row(task, name, f"{value:.4f}", f"{error:.4f}" if isinstance(error, float) else "")
    return table
