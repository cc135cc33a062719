"""The arguments and options that commands share, with their help."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.policies.registry import usages

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1 ...")]
EngineName = Annotated[str, typer.Option("--engine", help="Where experts are quantised: local, or ray for a cluster.")]
Address = Annotated[str | None, typer.Option("--address", help="The Ray cluster; without it one is started here.")]
Bounded = Annotated[
    str | None,
    typer.Option("--memory", help="The most memory that the process may take: 24GiB, 800MB; refused if it cannot be."),
]
Fresh = Annotated[bool, typer.Option("--fresh/--resume", help="Throw finished pieces away, or go on from them.")]
RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="A shipped recipe's name, or a YAML file.")]
Texts = Annotated[
    list[str] | None,
    typer.Option("--calibration", "-c", help="Text to calibrate on, in place of the recipe's: file or Hub data set."),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="The bundle to make; a new or empty directory.", show_default=False)
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Of a checkpoint on the Hub: a branch, tag or commit.")
]
Bundle = Annotated[Path, typer.Argument(help="A bundle's directory.", show_default=False)]
Checkpoint = Annotated[str, typer.Argument(help="A model directory or a Hub id.", show_default=False)]
Model = Annotated[
    str, typer.Argument(help="A bundle or a checkpoint: its directory, or its Hub id.", show_default=False)
]
PolicyName = Annotated[
    str | None,
    typer.Option(
        "--policy",
        help=f"{usages(in_budget=False)}; with --device-memory also {usages(in_budget=True)}. Without it the best "
        "version, with --device-memory hotness.",
    ),
]
DenseName = Annotated[
    str | None,
    typer.Option(
        "--dense",
        help="The version of attention, shared experts and lm_head, where the bundle has versions of them: bf16, w8, "
        "allocation; the most precise without it.",
    ),
]
MaxTpot = Annotated[
    str | None,
    typer.Option(
        "--max-tpot",
        help="The most that decoding a token may take: 50ms, or bytes that it reads: 2GB. Versions that may take "
        "longer are not served.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--device-memory",
        help="The most that all may take there, weights, KV cache, activations and buffers: 24GiB, 800MB, 123456.",
    ),
]
Cached = Annotated[
    int | None,
    typer.Option("--kv-tokens", min=0, help="In a budget: tokens of KV cache a sequence that it leaves room for."),
]
Prefill = Annotated[
    int | None,
    typer.Option("--prefill-tokens", min=0, help="In a budget: tokens a sequence of a pass that it leaves room for."),
]
Logits = Annotated[
    bool,
    typer.Option("--all-logits", help="In a budget: leave room for the logits of all those tokens, not the last's."),
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, help="In a budget: sequences that it leaves room for; 1 without it.")
]
Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Names = Annotated[str, typer.Option("--versions", help="Only these, as w4,w2; all without it.")]
Dense = Annotated[
    str, typer.Option("--dense", help="Of the matrices outside the experts, where they have versions: only these.")
]
Fitted = Annotated[
    str | None,
    typer.Option(
        "--fit", help="Only the versions that moepack plan serves in this budget of device memory: 24GiB, 800MB."
    ),
]
Work = Annotated[Path, typer.Option("--work", help="The work directory.", show_default=False)]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
TopP = Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Sample from tokens that make up this share.")]
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Sample from so many tokens; 0: from all.")]
MinP = Annotated[
    float, typer.Option("--min-p", min=0.0, max=1.0, help="Leave out what is below this share of the best.")
]
Repetition = Annotated[float, typer.Option("--repetition-penalty", min=0.01, help="Above 1: repeat less.")]
StopTexts = Annotated[list[str] | None, typer.Option("--stop", help="A text at which to stop; several times.")]
Seed = Annotated[int, typer.Option("--seed", help="For sampling.")]
System = Annotated[str, typer.Option("--system", help="What a chat begins with.")]
Template = Annotated[Path | None, typer.Option("--chat-template", help="A file, in place of the model's own.")]


LOADING: dict[str, Any] = {  # the flags of fields of LoadOptions
    "policy": PolicyName,
    "device_memory": Memory,
    "dense": DenseName,
    "max_tpot": MaxTpot,
    "kv_tokens": Cached,
    "batch": Batch,
    "prefill_tokens": Prefill,
    "all_logits": Logits,
    "device": Device,
    "dtype": Dtype,
}
SAMPLING: dict[str, Any] = {  # of Sampling
    "temperature": Temperature,
    "top_p": TopP,
    "top_k": TopK,
    "min_p": MinP,
    "repetition": Repetition,
    "seed": Seed,
}
Flags = Mapping[str, tuple[Any, Any]]  # parameters of a command: their annotation, their default


def flags(known: Mapping[str, Any], record: type, *names: str, **others: Any) -> dict[str, tuple[Any, Any]]:
    """The flags of these fields of a record, with its defaults.

    Args:
        known: the annotation of each field.
        record: a dataclass.
        names: of its fields.
        others: fields with another default, or another annotation and default.
    """
    defaults = inspect.signature(record).parameters
    found = {name: (known[name], defaults[name].default) for name in names}
    return found | {n: v if isinstance(v, tuple) else (known[n], v) for n, v in others.items()}


def loading(*names: str, **others: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the flags of these fields of `LoadOptions`, which it takes as `options`.

    Arguments as of `flags`. The one place that turns flags into `LoadOptions`.
    """
    return taking("options", LoadOptions, flags(LOADING, LoadOptions, *names, **others))


def taking(
    parameter: str, make: Callable[..., Any], given: Flags
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace one parameter of a command by several flags, of which `make` makes its value."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            made = make(**{name: values.pop(name) for name in given})
            command(**values, **{parameter: made})

        kind = inspect.Parameter.KEYWORD_ONLY
        parameters: list[inspect.Parameter] = []
        for name, old in inspect.signature(command, eval_str=True).parameters.items():
            new = given.items() if name == parameter else [(name, (old.annotation, old.default))]
            parameters += [inspect.Parameter(n, kind, annotation=a, default=d) for n, (a, d) in new]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        return run

    return decorate


def names_of(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]
