"""The arguments and options that commands share, with their help."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from moepack.pack.errors import InputError
from moepack.runtime.kv.forms import AUTO_KV
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.sizes import parse_size
from moepack.runtime.policies.registry import completions, usages
from moepack.server.own_sampling import SamplingFlags

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Device = Annotated[str, typer.Option("--device", help="Where to compute: cpu, cuda, cuda:1 ...")]
EngineName = Annotated[str, typer.Option("--engine", help="Where experts are quantised: local, or ray for a cluster.")]
Address = Annotated[str | None, typer.Option("--address", help="The Ray cluster; by default one is started here.")]
Bounded = Annotated[
    int | None,
    typer.Option(
        "--memory",
        parser=parse_size,
        metavar="<size>",
        help="The most memory for the process: 24GiB, 800MB; refused if too little.",
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh/--resume", help="Discard finished pieces, or resume from them.")]
RecipeName = Annotated[str, typer.Option("--recipe", "-r", help="A shipped recipe's name, or a YAML file.")]
Texts = Annotated[
    list[str] | None,
    typer.Option("--calibration", "-c", help="Calibrate on this file or Hub data set, not on the recipe's."),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", help="What to make: a new or empty directory.", show_default=False)
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="The branch, tag or commit of a checkpoint on the Hub.")
]
Bundle = Annotated[Path, typer.Argument(help="A bundle's directory.", show_default=False)]
Checkpoint = Annotated[str, typer.Argument(help="A model directory or a Hub id.", show_default=False)]
Model = Annotated[str, typer.Argument(help="The directory or Hub id of a bundle or checkpoint.", show_default=False)]
Names = Annotated[str, typer.Option("--versions", help="Only these versions, such as w4,w2; by default all.")]
Dense = Annotated[
    str, typer.Option("--dense", help="Fetch or keep only these versions of the matrices outside the experts.")
]
Fitted = Annotated[
    str | None,
    typer.Option("--fit", help="Only the versions that moepack plan serves in this device memory: 24GiB, 800MB."),
]
Work = Annotated[Path, typer.Option("--work", help="The work directory.", show_default=False)]
StopTexts = Annotated[list[str] | None, typer.Option("--stop", help="Stop at this text; may be repeated.")]
System = Annotated[str, typer.Option("--system", help="The system message that begins a chat.")]
GenerationConfig = Annotated[
    str,
    typer.Option(
        "--generation-config",
        metavar="auto|none",
        help="auto: the model's generation_config.json sets the sampling that is not given; none: it does not.",
    ),
]
SystemMessages = Annotated[
    str,
    typer.Option(
        "--system-messages",
        metavar="join|keep|refuse",
        help="Several system messages of a chat: join the first ones and give later ones as the template can, keep "
        "all as they are sent, or refuse them.",
    ),
]
Template = Annotated[
    Path | None, typer.Option("--chat-template", help="A Jinja file that replaces the model's own template.")
]


def complete_policy(incomplete: str) -> list[tuple[str, str]]:
    """Return what may follow in a policy's text, each with what it is, for the shell's completion."""
    return [(text, meaning) for text, meaning in completions(incomplete) if text.startswith(incomplete)]


IN_BUDGET = "In a budget: "  # begins the help of a flag that is refused where there is none
_LOADING: dict[str, object] = {  # field of LoadOptions -> its flag
    "policy": Annotated[
        str | None,
        typer.Option(
            "--policy",
            autocompletion=complete_policy,
            help=f"{usages(in_budget=False)}; with --device-memory also {usages(in_budget=True)}. By default the best "
            "version, with --device-memory hotness.",
        ),
    ],
    "device_memory": Annotated[
        str | None,
        typer.Option(
            "--device-memory",
            help="The most memory to use there, for weights, KV cache, activations and buffers: 24GiB, 800MB, 123456.",
        ),
    ],
    "memory": Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE|auto",
            help="On a CPU: the most memory that the whole process may take; the budget is what is left of it. auto: "
            "what the control group and the system have.",
        ),
    ],
    "dense": Annotated[
        str | None,
        typer.Option(
            "--dense",
            help="The version of attention, shared experts and lm_head, if the bundle has versions of them: bf16, w8, "
            "allocation; by default the most precise.",
        ),
    ],
    "max_tpot": Annotated[
        str | None,
        typer.Option(
            "--max-tpot",
            help="The most that decoding a token may take: 50ms, or the bytes it reads: 2GB. Versions that may take "
            "longer are not served.",
        ),
    ],
    "profile": Annotated[
        str | None,
        typer.Option("--profile", help="Routing counts of your own traffic, to use instead of calibration's."),
    ],
    "checked": Annotated[
        bool | None,
        typer.Option(
            "--checked", help="Skip digests of files that you have checked before, unless a file has changed."
        ),
    ],
    "kv": Annotated[
        str | None,
        typer.Option(
            "--kv",
            help="Bits of the KV cache: 16 (the default), 8, 4, k8v4 (keys in 8, values in 4), or auto: in a budget, "
            "those with which experts and cache together lose least.",
        ),
    ],
    "kv_tokens": Annotated[
        int | None,
        typer.Option("--kv-tokens", min=0, help=f"{IN_BUDGET}reserve KV cache for this many tokens of each sequence."),
    ],
    "batch": Annotated[
        int | None,
        typer.Option("--batch", min=1, help=f"{IN_BUDGET}reserve memory for this many sequences; by default 1."),
    ],
    "prefill_tokens": Annotated[
        int | None,
        typer.Option(
            "--prefill-tokens",
            min=0,
            help=f"{IN_BUDGET}reserve memory for passes of this many tokens of each sequence.",
        ),
    ],
    "all_logits": Annotated[
        bool,
        typer.Option(
            "--all-logits",
            help=f"{IN_BUDGET}reserve memory for the logits of all --prefill-tokens, not only the last.",
        ),
    ],
    "device": Device,
    "dtype": Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")],
}
_HEAT = "0 is greedy; by default the model's own, else 0 for generate and 0.7 for chat."
_SAMPLING: dict[str, object] = {  # field of SamplingFlags -> its flag
    "temperature": Annotated[float | None, typer.Option("--temperature", min=0.0, help=_HEAT)],
    "top_p": Annotated[
        float | None,
        typer.Option("--top-p", min=0.0, max=1.0, help="Sample from the likeliest tokens that make up this share."),
    ],
    "top_k": Annotated[
        int | None, typer.Option("--top-k", min=0, help="Sample from this many of the likeliest tokens; 0 means all.")
    ],
    "min_p": Annotated[
        float | None,
        typer.Option("--min-p", min=0.0, max=1.0, help="Leave out tokens below this share of the best probability."),
    ],
    "repetition": Annotated[float | None, typer.Option("--repetition-penalty", min=0.01, help="Above 1: repeat less.")],
    "seed": Annotated[int | None, typer.Option("--seed", help="The seed of sampling; chat draws another each time.")],
    "generation_config": GenerationConfig,
}
Decorator = Callable[[Callable[..., None]], Callable[..., None]]


def loading(*names: str, **others: object) -> Decorator:
    """Decorate a command: the flags of these fields of `LoadOptions` replace its parameter `options`.

    `others` maps further fields to a default, or to an annotation and a default.
    """
    return _taking("options", LoadOptions, _LOADING, names, others)


def sampling(temperature: float, seed: int | None = 0) -> Decorator:
    """Decorate a command: the flags of `SamplingFlags` replace its parameter `sampling`.

    `temperature` applies where neither flag nor model names one, `seed` where no flag does; None draws one.
    """
    made = functools.partial(SamplingFlags, temperature, seed=seed)
    return _taking("sampling", made, _SAMPLING, tuple(_SAMPLING), {})


def _taking(
    parameter: str,
    record: Callable[..., object],
    known: Mapping[str, object],
    names: Sequence[str],
    others: Mapping[str, object],
) -> Decorator:
    """Make a decorator that replaces a command's `parameter`, of the dataclass `record`, by flags of its fields."""
    defaults = inspect.signature(record).parameters
    flags = {name: (known[name], defaults[name].default) for name in names}
    flags |= {n: v if isinstance(v, tuple) else (known[n], v) for n, v in others.items()}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: object) -> None:
            given = {name: values.pop(name) for name in flags}
            made = record(**given)
            if isinstance(made, LoadOptions) and "device_memory" in flags:
                check_flags(made, {n: a for n, (a, default) in flags.items() if given[n] != default})
            command(**values, **{parameter: made})

        kind = inspect.Parameter.KEYWORD_ONLY
        parameters: list[inspect.Parameter] = []
        for name, old in inspect.signature(command, eval_str=True).parameters.items():
            new = flags.items() if name == parameter else [(name, (old.annotation, old.default))]
            parameters += [inspect.Parameter(n, kind, annotation=a, default=d) for n, (a, d) in new]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        return run

    return decorate


def check_flags(options: LoadOptions, given: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Raise InputError, without a budget, for what is for one: a flag of these fields that are given, or a `kv`."""
    names = [name for name, flag in given.items() if str(flag.__metadata__[0].help).startswith(IN_BUDGET)]
    flags = [f"--{name.replace('_', '-')}" for name in names]
    if options.kv == AUTO_KV:
        flags.append(f"--kv {AUTO_KV}")
    if flags and not options.with_environment().in_budget:
        raise InputError(
            f"{flags[0]} is for a memory budget, and none is given: give a budget, or leave {flags[0]} out"
        )


def counts_of(flag: str, text: str) -> list[int]:
    """Split a comma-separated list of numbers from 1, of a flag; "0" is none. Raises InputError for anything else."""
    if text.strip() == "0":
        return []
    names = names_of(text)
    if not names or not all(name.isdecimal() and int(name) for name in names):
        raise InputError(f"{flag} {text!r}: numbers from 1 with commas between, as 128,512")
    return [int(name) for name in names]


def names_of(text: str) -> list[str]:
    """Split a comma-separated list of names."""
    return [name.strip() for name in text.split(",") if name.strip()]
