"""The arguments and options that commands share, with their help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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


def names_of(text: str) -> list[str]:
    """Names with commas between."""
    return [name.strip() for name in text.split(",") if name.strip()]
