"""Commands that run a model: evaluation, text, chat and the server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepack.pack.errors import InputError
from moepack.runtime.planning.options import LoadOptions
from moepack.server.own_sampling import SamplingFlags
from moepack.shared.memory import peaks
from moepack.shared.progress import loading_line, progress

from .options import (
    IN_BUDGET,
    GenerationConfig,
    Json,
    Model,
    Quiet,
    StopTexts,
    System,
    SystemMessages,
    Template,
    check_flags,
    complete_policy,
    counts_of,
    loading,
    names_of,
    sampling,
)
from .output import console, print_json, show

if TYPE_CHECKING:
    from moepack.generation import Session

_PASS = typer.Option("--batch", min=1, help="Windows in each forward pass; by default 16, or 1024 tokens in a budget.")
_HELD = typer.Option(
    "--kv-tokens",
    min=0,
    help=f"{IN_BUDGET}tokens of KV cache reserved at the start; 4096 if experts cannot make room.",
)
_PREFIX = typer.Option(
    "--prefix-cache",
    metavar="SIZE|off",
    help="The most bytes of prompts kept for later ones that begin alike, with states of linear attention and Mamba: "
    "an eighth of the budget, up to 1GiB.",
)
_LOADED = ("policy", "device_memory", "memory", "dense", "max_tpot", "kv", "kv_tokens", "device", "dtype", "checked")
_KEPT = typer.Option("--profile", help="Read traffic counts from this file, if it exists, and save new ones to it.")


@loading(*_LOADED, "prefill_tokens", "profile", all_logits=False, batch=(Annotated[int | None, _PASS], None))
def evaluate(
    path: Model,
    options: LoadOptions,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="Text or chats: files or Hub data sets.", show_default=False),
    ] = None,
    length: Annotated[
        int, typer.Option("--length", min=2, help="The tokens in a window, or the most in a task's question.")
    ] = 512,
    samples: Annotated[int, typer.Option("--samples", min=1, help="The most windows of each file.")] = 256,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", help="Write routing and versions to this file, one line of JSON for each forward pass."
        ),
    ] = None,
    kl: Annotated[
        bool, typer.Option("--kl", help="Compare with the bundle's lossless version: divergence, agreement.")
    ] = False,
    tasks: Annotated[str, typer.Option("--tasks", help="Tasks of lm-evaluation-harness, such as gsm8k,arc_easy.")] = "",
    shots: Annotated[int | None, typer.Option("--shots", min=0, help="Examples before each question.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="The most questions of each task.")] = None,
    task_folder: Annotated[Path | None, typer.Option("--task-folder", help="A folder with your own tasks.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask tasks through the model's chat template.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure perplexity with its 95 % interval, or score tasks."""
    from moepack.reports import evaluate as scoring
    from moepack.reports import tasks as harness

    result = None
    scores = None
    named = names_of(tasks)
    of_tasks = {"--shots": shots, "--limit": limit, "--task-folder": task_folder, "--chat": chat or None}
    of_text = {"--trace": trace, "--kl": kl or None}
    if not named:
        _check_unused(of_tasks, "is for tasks: name them with --tasks")
    elif not data:
        _check_unused(of_text, "is for text: name some with --data")
    with progress(quiet) as reporter:
        if data or not named:
            result = scoring.evaluate(path, data or [], options, length, samples, reporter, trace, kl)
        if named:
            scores = harness.run_tasks(path, named, options, length, shots, limit, task_folder, chat, reporter)
    if as_json:
        print_json((asdict(result) if result else {}) | ({"tasks": scores} if scores else {}))
        return
    if scores:
        console().print(harness.render(scores, f"{path}: {options.policy or 'without a policy named'}"))
    if result is None:
        return
    console().print(scoring.render(result, str(path)))
    if result.budget_bytes is not None:
        counted = f"{result.promotions:,} promotions, {result.demotions:,} demotions, {result.forward_waits:,} waits"
        peak = f"peak {result.resident_bytes_peak:,} of {result.budget_bytes:,} bytes"
        typer.echo(f"{counted}, {peak}")


def _check_unused(flags: Mapping[str, object], needs: str) -> None:
    """Raise InputError for a flag that is given, with what it needs."""
    for flag, value in flags.items():
        if value is not None:
            raise InputError(f"{flag} {needs}, or leave it out")


@loading(*_LOADED, "prefill_tokens", "profile", "batch", all_logits=False)
@sampling(temperature=0.0)
def generate(
    path: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue.", show_default=False)],
    options: LoadOptions,
    sampling: SamplingFlags,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The most tokens to add.")] = 64,
    stop: StopTexts = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a message, through the chat template.")
    ] = False,
    system: System = "",
    chat_template: Template = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, or answer a message."""
    from moepack.generation import generate as run
    from moepack.shared.opening import read_template
    from moepack.spent import line

    messages = None
    began = False
    if chat or system:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})

    def tell(text: str) -> None:
        nonlocal began
        if not as_json:
            typer.echo(text if began or messages else prompt + text, nl=False)  # an answer comes without its prompt
            sys.stdout.flush()
            began = True

    facts: dict[str, Any] = {}

    def finished(session: Session) -> None:
        facts.update(session.spent.facts(session.model))

    template = read_template(chat_template)
    try:
        text = run(path, prompt, options, max_new_tokens, sampling, stop or (), messages, template, tell, finished)
    finally:
        if began:
            typer.echo()
    if as_json:
        print_json({"prompt": prompt, "text": text, "policy": options.policy, **facts, **peaks()})
    else:
        typer.echo(line(facts), err=True)


@loading("dense", "device", "dtype", "kv", "profile", "checked")
def bench(
    bundle: Model,
    options: LoadOptions,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="Tokens of prompts, as 128,512; 0: none.")] = "512",
    new: Annotated[str, typer.Option("--new", "-n", help="Tokens to decode, as 32,128; 0: none.")] = "64",
    context: Annotated[int, typer.Option("--context", min=1, help="Tokens in the cache before decoding.")] = 128,
    clients: Annotated[str, typer.Option("--clients", help="Sequences at a time, as 1,4.")] = "1",
    repeat: Annotated[int, typer.Option("--repeat", "-r", min=1, help="How often each is measured.")] = 3,
    policy: Annotated[
        list[str] | None, typer.Option("--policy", help="As for generate; repeatable.", autocompletion=complete_policy)
    ] = None,
    device_memory: Annotated[
        list[str] | None, typer.Option("--device-memory", help="A budget, 24GiB or 800MB; repeatable.")
    ] = None,
    memory: Annotated[
        list[str] | None, typer.Option("--memory", help="A limit of the whole process; repeatable.")
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print rows as CSV on stdout.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure rates of prompts and decoding, for each policy and limit named."""
    from moepack.reports import bench as measuring

    lengths = measuring.Lengths(
        counts_of("--prompt", prompt), counts_of("--new", new), context, counts_of("--clients", clients), repeat
    )
    if not (device_memory or memory):
        check_flags(options)
    with progress(quiet) as reporter:
        rows = measuring.bench(bundle, policy or (), device_memory or (), memory or (), lengths, options, reporter)
    if as_csv:
        typer.echo(measuring.as_csv(rows), nl=False)
    else:
        show(rows, as_json, measuring.render)


@loading(*_LOADED)
def profile(
    bundle: Model,
    texts: Annotated[list[str], typer.Argument(help="Files or Hub data sets.", show_default=False)],
    options: LoadOptions,
    output: Annotated[Path, typer.Option("--output", "-o", help="The profile's file.", show_default=False)],
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a window.")] = 512,
    samples: Annotated[int, typer.Option("--samples", min=1, help="The most windows of each file.")] = 256,
    quiet: Quiet = False,
) -> None:
    """Count which experts your own texts use, for --profile."""
    from moepack.reports.profile import make_profile

    with progress(quiet) as reporter:
        made = make_profile(bundle, texts, output, options, length, samples, reporter)
    typer.echo(f"{output}: {made.tokens:,} tokens; a tenth of the experts had {made.busiest:.0%} of them")


@loading(*_LOADED)
@sampling(temperature=0.7, seed=None)
def chat(
    path: Annotated[str, typer.Argument(help="A bundle or checkpoint, or a server's http:// address.")],
    options: LoadOptions,
    sampling: SamplingFlags,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The most tokens of an answer.")] = 256,
    stop: StopTexts = None,
    system: System = "",
    chat_template: Template = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="MOEPACK_API_KEY", help="The server's key.")
    ] = None,
) -> None:
    """Chat, a line at a time."""
    from moepack.chat import local_model, server, talk
    from moepack.generation import CHAT_TOKENS, PROMPT, Session
    from moepack.shared.opening import read_template
    from moepack.spent import line

    if path.startswith(("http://", "https://")):
        if options != LoadOptions() or chat_template is not None:
            raise InputError(f"{path}: a server loads its model itself: leave out the options of loading")
        talk(server(path, api_key, max_new_tokens, sampling, stop or ()), system)
        return
    with Session(path, options, read_template(chat_template)) as session:
        session.chat([{"role": "user", "content": "?"}])  # raises an error of the template before weights are read
        session.load(CHAT_TOKENS, PROMPT)
        talk(local_model(session, max_new_tokens, session.sampling(sampling), stop or ()), system)
        if session.spent.answers:
            typer.echo(line(session.spent.facts(session.model)), err=True)


@loading(*_LOADED, kv_tokens=(Annotated[int | None, _HELD], None), profile=(Annotated[str | None, _KEPT], None))
def serve(
    bundle: Annotated[str, typer.Argument(help="A bundle's directory or Hub id.", show_default=False)],
    options: LoadOptions,
    host: Annotated[str, typer.Option("--host", help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port to listen on; 0 chooses a free one.")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="A key that clients must send; may be repeated. Safer in MOEPACK_API_KEY."),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option("--cors-origin", help="A web origin whose pages may read answers, or *; by default none."),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The model's name for clients.")] = None,
    chat_template: Template = None,
    system_messages: SystemMessages = "join",
    generation_config: GenerationConfig = "auto",
    max_sequences: Annotated[
        int, typer.Option("--max-sequences", min=1, help="The most requests that are answered at once.")
    ] = 32,
    max_waiting: Annotated[
        int,
        typer.Option("--max-waiting", min=1, help="The most sequences that wait (`n` a request); more are refused."),
    ] = 256,
    max_connections: Annotated[
        int,
        typer.Option("--max-connections", min=1, help="The most open requests; beyond it the longest idle leave."),
    ] = 1024,
    step_tokens: Annotated[int, typer.Option("--step-tokens", min=1, help="The most tokens in a forward pass.")] = 256,
    max_kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-kv-tokens",
            min=2,
            help="The most tokens in all KV caches together; experts use the remaining memory.",
        ),
    ] = None,
    prefix_cache: Annotated[str | None, _PREFIX] = None,
    prefix_cache_dir: Annotated[
        Path | None,
        typer.Option("--prefix-cache-dir", help="Keep them in files of this folder too, over restarts."),
    ] = None,
    prefix_cache_dir_size: Annotated[
        str, typer.Option("--prefix-cache-dir-size", metavar="SIZE", help="The most bytes of these files.")
    ] = "10GiB",
    max_prompt_tokens: Annotated[
        int | None, typer.Option("--max-prompt-tokens", min=1, help="The most tokens of a prompt.")
    ] = None,
    max_body: Annotated[str, typer.Option("--max-body", help="The most bytes of a request, such as 4MiB.")] = "4MiB",
    grace: Annotated[
        float, typer.Option("--grace", min=0, help="Seconds that running answers get to finish when the server stops.")
    ] = 30.0,
    access_log: Annotated[bool, typer.Option("--access-log", help="Print a line for each request.")] = False,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, help="Copies on Ray Serve, each with its own budget.")
    ] = 1,
    address: Annotated[
        str | None,
        typer.Option(
            "--address", help="The Ray cluster that runs --replicas: ray://HOST:10001; by default this machine."
        ),
    ] = None,
) -> None:
    """Serve the interfaces of OpenAI and Anthropic over HTTP, with a live page."""
    given = dict(locals())  # the parameters are the fields of Serve
    from moepack.server.command import Serve

    given["load"] = given.pop("options")

    def say(where: str) -> None:
        typer.echo(f"moepack: serving {where}", err=True)

    if replicas > 1 or address is not None:
        from moepack.server.replicas import serve as serve_replicas

        serve_replicas(Serve(**given), say)
    else:
        from moepack.server.command import serve as serve_one

        serve_one(Serve(**given), say, loading_line)
