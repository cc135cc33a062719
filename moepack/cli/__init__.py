"""The command line: each command parses its arguments and calls one library function.

What a command is asked for goes to stdout: its report, generated text, or with --json only JSON. Progress and notes go
to stderr. An error is one line there and exit code 2.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moepack.pack.errors import InputError, MoepackError, printable
from moepack.runtime.planning.sizes import parse_size
from moepack.runtime.policies.registry import usages

from .options import (
    Address,
    Bounded,
    Bundle,
    Cached,
    Checkpoint,
    Dense,
    DenseName,
    Device,
    Dtype,
    EngineName,
    Fitted,
    Fresh,
    Json,
    Logits,
    MaxTpot,
    Memory,
    MinP,
    Model,
    Names,
    Output,
    PolicyName,
    Prefill,
    Quiet,
    RecipeName,
    Repetition,
    Revision,
    Seed,
    StopTexts,
    System,
    Temperature,
    Template,
    Texts,
    TopK,
    TopP,
    Work,
    names_of,
)

if TYPE_CHECKING:
    from rich.console import Console

    from moepack.progress import Reporter

app = typer.Typer(
    name="moepack",
    help="Pack a Mixture-of-Experts model with every expert at several precisions, and serve it in a memory budget.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _console() -> Console:
    """For tables and text that is to be folded, which a terminal's width decides; elsewhere 120 columns."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120, highlight=False, markup=False)


def _reporter(quiet: bool) -> Reporter:
    from moepack.progress import Reporter, RichReporter

    return Reporter() if quiet else RichReporter()


def _print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(value, indent=1, default=str) + "\n")


def _report(report: Any, as_json: bool) -> None:
    if as_json:
        from dataclasses import asdict

        _print_json(asdict(report))
        return
    typer.echo(f"bundle {report.bundle}, calibrated on {report.calibration_tokens:,} tokens")
    for version, methods in report.methods.items():
        typer.echo(f"  {version}: {', '.join(f'{n} experts by {m}' for m, n in methods.items())}")


@app.command()
def build(
    checkpoint: Checkpoint,
    output: Output,
    recipe: RecipeName = "default",
    calibration: Texts = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Keep finished pieces here, and resume from them.")
    ] = None,
    fresh: Fresh = False,
    device: Device = "cpu",
    engine: EngineName = "local",
    address: Address = None,
    revision: Revision = None,
    memory: Bounded = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make nothing: say what bytes, memory and time it would take.")
    ] = False,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep in --work what experts saw, for --add: see docs for what it takes.")
    ] = False,
    added: Annotated[
        str, typer.Option("--add", help="Add these versions, as w3,w2, to the bundle at --output, from --work.")
    ] = "",
    group_sizes: Annotated[
        list[str] | None,
        typer.Option("--group-size", help="With --add: a version's, as w4=32; one that is there is replaced."),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Make a bundle of a checkpoint, in one pass; or add versions to one."""
    from moepack.pipeline.build import build as run

    bound = parse_size(memory)
    if added or group_sizes:
        from moepack.pipeline.add import add, parse_group_sizes

        if work is None:
            raise InputError("--add goes on from what a build with --keep left: name its --work")
        if dry_run:
            raise InputError("--dry-run says what a whole build takes, and nothing of --add: leave one of them out")
        if calibration or recipe != "default":
            raise InputError("--add goes by the recipe and the text of --work: leave --recipe and --calibration out")
        names, sizes = names_of(added), parse_group_sizes(group_sizes or ())
        with _reporter(quiet) as reporter:
            report = add(
                output, work, names, sizes, checkpoint, fresh, device, engine, address, reporter, revision, bound
            )
        _report(report, as_json)
        return

    if dry_run:
        from dataclasses import asdict

        from moepack.pipeline.estimate import estimate, render

        with _reporter(quiet) as reporter:
            expected = estimate(checkpoint, output, recipe, calibration or (), device, reporter, revision, bound, work)
        _print_json(asdict(expected)) if as_json else _console().print(render(expected))
        return
    with _reporter(quiet) as reporter:
        report = run(
            checkpoint, output, recipe, calibration or (), work, fresh, device, engine, address, reporter, revision,
            keep, bound,
        )  # fmt: skip
    _report(report, as_json)


@app.command()
def calibrate(
    checkpoint: Checkpoint,
    work: Work,
    recipe: RecipeName = "default",
    calibration: Texts = None,
    fresh: Fresh = False,
    device: Device = "cpu",
    revision: Revision = None,
    memory: Bounded = None,
    quiet: Quiet = False,
) -> None:
    """Stage 1: what reaches every expert."""
    from moepack.pipeline.build import calibrate as run

    bound = parse_size(memory)
    with _reporter(quiet) as reporter:
        run(checkpoint, work, recipe, calibration or (), fresh, device, reporter, revision, bound)


@app.command()
def quantize(
    work: Work,
    recipe: Annotated[str | None, typer.Option("--recipe", "-r", help="In place of the calibrated one's.")] = None,
    fresh: Fresh = False,
    device: Device = "cpu",
    engine: EngineName = "local",
    address: Address = None,
    memory: Bounded = None,
    quiet: Quiet = False,
) -> None:
    """Stage 2: every expert at every width."""
    from moepack.pipeline.build import quantize as run

    bound = parse_size(memory)
    with _reporter(quiet) as reporter:
        run(work, recipe, fresh, device, engine, address, reporter, bound)


@app.command()
def pack(
    work: Work,
    output: Output,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Stage 3: the bundle."""
    from moepack.pipeline.build import pack as run

    with _reporter(quiet) as reporter:
        report = run(work, output, reporter)
    _report(report, as_json)


@app.command()
def inspect(
    bundle: Bundle,
    plot: Annotated[
        Path | None, typer.Option("--plot", help="Draw the loss tables into this .png, .svg or .pdf.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", help="Write a report into this .html, all in one file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show versions, bytes, bits per weight and losses."""
    from moepack.reports import inspect as report

    facts = report.inspect(bundle)
    if plot is not None:
        report.plot(bundle, plot)
    if page is not None:
        from moepack.reports.page import write_page

        write_page(bundle, facts, page)
    if as_json:
        _print_json(facts)
    else:
        _console().print(report.render(facts))


@app.command()
def shrink(
    bundle: Bundle,
    output: Output,
    versions: Names = "",
    fit: Fitted = None,
    allocation: Annotated[
        bool,
        typer.Option(
            "--allocation",
            help="Only what one map names, and the map, for static:allocation: the manifest's, with --fit the plan's.",
        ),
    ] = False,
    policy: PolicyName = None,
    device: Device = "cpu",
    kv_tokens: Cached = None,
    dense: Dense = "",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a bundle with fewer versions."""
    from moepack.pipeline.shrink import shrink as run
    from moepack.reports.fitting import fit_of

    size = fit_of(fit, policy, device, kv_tokens)
    with _reporter(quiet) as reporter:
        result = run(bundle, output, names_of(versions), size, allocation, reporter, names_of(dense))
    if as_json:
        from dataclasses import asdict

        _print_json(asdict(result))
    else:
        kept = ", ".join((*result.versions, *(f"dense {name}" for name in result.dense)))
        kept = f"{kept}{f' and the map {result.allocation!r}' if result.allocation else ''}"
        typer.echo(f"{result.bundle}: keeps {kept}: {result.bytes_after:,} of {result.bytes_before:,} bytes")


@app.command()
def verify(
    bundle: Bundle,
    checkpoint: Annotated[str | None, typer.Option("--checkpoint", help="Compare with it, bit for bit.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check digests, and bits against a checkpoint."""
    from moepack.reports.verify import verify as run

    with _reporter(quiet) as reporter:
        problems = run(bundle, checkpoint, reporter)
    if as_json:
        listed = [{"location": p.location, "kind": p.kind, "message": p.message} for p in problems]
        _print_json({"ok": not problems, "problems": listed})
    else:
        for problem in problems:
            typer.echo(problem)
        if not problems:
            typer.echo(f"{bundle}: good{f', bit-identical with {checkpoint}' if checkpoint else ''}")
    if problems:
        _fail(f"{bundle}: {len(problems)} problem{'s' * (len(problems) > 1)}")


@app.command("eval")
def evaluate(
    path: Model,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="Text or chats: files or Hub data sets.", show_default=False),
    ] = None,
    policy: PolicyName = None,
    device_memory: Memory = None,
    dense: DenseName = None,
    max_tpot: MaxTpot = None,
    length: Annotated[int, typer.Option("--length", min=2, help="Tokens of a window, or of a task's question.")] = 512,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Windows a file, at the most.")] = 256,
    kv_tokens: Cached = None,
    prefill_tokens: Prefill = None,
    all_logits: Logits = False,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch", min=1, help="Windows of a forward pass; 16, or in a budget those of 1024 tokens, without it."
        ),
    ] = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write what was routed and served, a line of JSON a forward pass.")
    ] = None,
    kl: Annotated[
        bool, typer.Option("--kl", help="Compare with the bundle's own bf16: divergence and agreement a token.")
    ] = False,
    tasks: Annotated[str, typer.Option("--tasks", help="Of lm-evaluation-harness, as gsm8k,arc_easy.")] = "",
    shots: Annotated[int | None, typer.Option("--shots", min=0, help="Examples before a task's question.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Questions a task, at the most.")] = None,
    task_folder: Annotated[Path | None, typer.Option("--task-folder", help="With tasks of your own.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask tasks through the model's chat template.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Perplexity on text, with its 95 % interval; or scores of tasks."""
    from dataclasses import asdict

    from moepack.reports import evaluate as scoring
    from moepack.reports import tasks as harness

    size, result, scores = parse_size(device_memory), None, None
    named = [t.strip() for t in tasks.split(",") if t.strip()]
    with _reporter(quiet) as reporter:
        if data or not named:
            result = scoring.evaluate(
                path, data or [], policy, device, dtype, size, length, samples, reporter, trace, batch, kv_tokens or 0,
                prefill_tokens, all_logits, kl, dense, max_tpot,
            )  # fmt: skip
        if named:
            scores = harness.run_tasks(
                path,
                named,
                policy,
                device,
                dtype,
                size,
                length,
                batch or 1,
                shots,
                limit,
                task_folder,
                chat,
                reporter,
                dense,
                max_tpot,
            )
    if as_json:
        _print_json((asdict(result) if result else {}) | ({"tasks": scores} if scores else {}))
        return
    if scores:
        _console().print(harness.render(scores, f"{path}: {policy or 'without a policy named'}"))
    if result is None:
        return
    _console().print(scoring.render(result, str(path)))
    if result.budget_bytes is not None:
        counted = f"{result.promotions:,} promotions, {result.demotions:,} demotions, {result.forward_waits:,} waits"
        peak = f"peak {result.resident_bytes_peak:,} of {result.budget_bytes:,} bytes"
        typer.echo(f"{counted}, {peak}")


@app.command()
def generate(
    path: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to continue.", show_default=False)],
    policy: PolicyName = None,
    device_memory: Memory = None,
    dense: DenseName = None,
    max_tpot: MaxTpot = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="The most tokens to add.")] = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    stop: StopTexts = None,
    seed: Seed = 0,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is a message: use the chat template.")] = False,
    system: System = "",
    chat_template: Template = None,
    kv_tokens: Cached = None,
    prefill_tokens: Prefill = None,
    all_logits: Logits = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="In a budget: sequences that it leaves room for.")] = 1,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Continue a prompt, or answer a message; the text is printed as it comes."""
    from moepack.generation import generate as run
    from moepack.opening import read_template
    from moepack.server.sampling import Sampling

    size, messages = parse_size(device_memory), None
    if chat or system:
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": prompt})
    began = False

    def tell(text: str) -> None:
        nonlocal began
        if not as_json:
            typer.echo(text if began or messages else prompt + text, nl=False)  # an answer stands by itself
            sys.stdout.flush()
            began = True

    sampling = Sampling(temperature, top_p, top_k, min_p, seed, repetition=repetition_penalty)
    try:
        text = run(
            path, prompt, policy, device, dtype, size, max_new_tokens, sampling, stop or (), batch, kv_tokens,
            prefill_tokens, all_logits, messages, read_template(chat_template), tell, dense, max_tpot,
        )  # fmt: skip
    finally:
        if began:
            typer.echo()
    if as_json:
        _print_json({"prompt": prompt, "text": text, "policy": policy})


@app.command()
def chat(
    path: Annotated[str, typer.Argument(help="A bundle or checkpoint, or a server's http:// address.")],
    policy: PolicyName = None,
    device_memory: Memory = None,
    dense: DenseName = None,
    max_tpot: MaxTpot = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Of an answer.")] = 256,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    min_p: MinP = 0.0,
    repetition_penalty: Repetition = 1.0,
    stop: StopTexts = None,
    seed: Seed = 0,
    system: System = "",
    chat_template: Template = None,
    kv_tokens: Cached = None,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    api_key: Annotated[str | None, typer.Option("--api-key", envvar="MOEPACK_API_KEY", help="A server's.")] = None,
) -> None:
    """Chat, a line at a time."""
    from moepack.chat import Here, There, talk
    from moepack.generation import CHAT_TOKENS, PROMPT, Session
    from moepack.opening import read_template
    from moepack.server.sampling import Sampling

    sampling = Sampling(temperature, top_p, top_k, min_p, seed, repetition=repetition_penalty)
    if path.startswith(("http://", "https://")):
        talk(There(path, api_key, max_new_tokens, sampling, stop or ()), system)
        return
    size, template = parse_size(device_memory), read_template(chat_template)
    with Session(path, policy, device, dtype, size, template, dense, max_tpot) as session:
        session.chat([{"role": "user", "content": "?"}])  # refused before weights are read
        session.load(kv_tokens or CHAT_TOKENS, PROMPT)
        talk(Here(session, max_new_tokens, sampling, stop or ()), system)


@app.command()
def plan(
    bundle: Bundle,
    device_memory: Annotated[
        str, typer.Option("--device-memory", help="The budget: 24GiB, 800MB, 123456.", show_default=False)
    ],
    device: Annotated[str, typer.Option("--device", help="cpu, cuda ...; it need not be here.")] = "cpu",
    policy: Annotated[str | None, typer.Option("--policy", help=f"{usages()}; hotness without it.")] = None,
    dense: DenseName = None,
    max_tpot: MaxTpot = None,
    kv_tokens: Annotated[int, typer.Option("--kv-tokens", min=0, help="Tokens of KV cache a sequence.")] = 576,
    prefill_tokens: Annotated[int, typer.Option("--prefill-tokens", min=0, help="Tokens a sequence of a pass.")] = 512,
    all_logits: Annotated[
        bool, typer.Option("--all-logits", help="A pass returns the logits of all its tokens, as moepack.load assumes.")
    ] = False,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Sequences at a time.")] = 1,
    as_json: Json = False,
) -> None:
    """Say what a memory budget holds, at which loss and speed: for generate, with a prompt of 512 tokens."""
    from moepack.reports import plan as planning

    size = parse_size(device_memory)
    assert size is not None
    planned = planning.plan(bundle, size, device, policy, kv_tokens, batch, prefill_tokens, all_logits, dense, max_tpot)
    if as_json:
        _print_json(planning.as_json(planned))
    if planned.message is not None:
        _fail(planned.message)
    if not as_json:
        table, text = planning.render(planned)
        console = _console()
        console.print(table)
        console.print(text)


@app.command()
def serve(
    bundle: Annotated[str, typer.Argument(help="A bundle: its directory, or its Hub id.", show_default=False)],
    policy: PolicyName = None,
    device_memory: Memory = None,
    dense: DenseName = None,
    max_tpot: MaxTpot = None,
    host: Annotated[str, typer.Option("--host", help="The address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 for any that is free.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Clients must send it; better given as MOEPACK_API_KEY.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", help="The model's, as clients ask for it.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option("--chat-template", help="A Jinja file in place of the model's own template.")
    ] = None,
    max_sequences: Annotated[int, typer.Option("--max-sequences", min=1, help="Answered at a time.")] = 32,
    max_waiting: Annotated[int, typer.Option("--max-waiting", min=1, help="Waiting for it; more are refused.")] = 256,
    step_tokens: Annotated[int, typer.Option("--step-tokens", min=1, help="Tokens of a forward pass.")] = 256,
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            "--kv-tokens",
            min=0,
            help="In a budget: tokens of KV cache held back from the start; 4096 where experts make no room, else 0.",
        ),
    ] = None,
    max_kv_tokens: Annotated[
        int | None, typer.Option("--max-kv-tokens", min=2, help="Of all caches together: experts keep the rest.")
    ] = None,
    max_prompt_tokens: Annotated[int | None, typer.Option("--max-prompt-tokens", min=1, help="Of a prompt.")] = None,
    max_body: Annotated[str, typer.Option("--max-body", help="Bytes of a request, as 4MiB.")] = "4MiB",
    grace: Annotated[float, typer.Option("--grace", min=0, help="Seconds that a stop lets answers finish.")] = 30.0,
    device: Device = "cpu",
    dtype: Dtype = "auto",
    access_log: Annotated[bool, typer.Option("--access-log", help="Print a line a request.")] = False,
    replicas: Annotated[
        int, typer.Option("--replicas", min=1, help="Copies on Ray Serve, each with the budget to itself.")
    ] = 1,
    address: Annotated[
        str | None, typer.Option("--address", help="Of the Ray cluster for them: ray://HOST:10001; else this machine.")
    ] = None,
) -> None:
    """Answer the OpenAI interface over HTTP, with a page that shows what is served."""
    from moepack.server.command import Serve

    if replicas > 1 or address is not None:
        from moepack.server.replicas import serve as run
    else:
        from moepack.server.command import serve as run
    asked = Serve(
        bundle, policy, device_memory, dense, max_tpot, device, dtype, host, port, api_key, name, chat_template,
        max_sequences, max_waiting, step_tokens, kv_tokens, max_kv_tokens, max_prompt_tokens, max_body, grace,
        access_log, replicas, address,
    )  # fmt: skip
    run(asked, lambda where: typer.echo(f"moepack: serving {where}", err=True))


@app.command()
def push(
    bundle: Bundle,
    repo: Annotated[str, typer.Argument(help="The Hub repository, as owner/name.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Create it private.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="The branch to push to.")] = None,
    base_model: Annotated[
        str | None, typer.Option("--base-model", help="The checkpoint's Hub id, for the model card.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Verify a bundle and upload it to the Hub; run again, it goes on."""
    from moepack.hub import push as run

    with _reporter(quiet) as reporter:
        address = run(bundle, repo, private, revision, reporter, base_model)
    if as_json:
        _print_json({"repo": repo, "commit": address})
    else:
        typer.echo(f"pushed to {repo}: {address}")


@app.command()
def pull(
    repo: Annotated[str, typer.Argument(help="The Hub repository, as owner/name.", show_default=False)],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the bundle goes.", show_default=False)],
    versions: Names = "",
    fit: Fitted = None,
    add: Annotated[str, typer.Option("--add", help="Add these to a bundle that was pulled before.")] = "",
    policy: PolicyName = None,
    device: Device = "cpu",
    kv_tokens: Cached = None,
    dense: Dense = "",
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Download a bundle, or some versions of it; run again, it goes on."""
    from moepack.hub import pull as run
    from moepack.reports.fitting import fit_of

    size = fit_of(fit, policy, device, kv_tokens)
    with _reporter(quiet) as reporter:
        path = run(repo, output, names_of(versions), revision, reporter, names_of(add), size, names_of(dense))
    if as_json:
        from moepack.pack.reader import open_bundle

        _print_json({"bundle": str(path), "versions": [v.name for v in open_bundle(path).versions]})
    else:
        typer.echo(f"{path}: complete and verified")


@app.command()
def doctor(
    directory: Annotated[Path | None, typer.Option("--directory", help="Where to measure disk rates.")] = None,
    kernels: Annotated[bool, typer.Option("--kernels", help="Measure and show which kernel runs what.")] = False,
    token: Annotated[
        str | None, typer.Option("--token", help="A bundle: serve it on the CPU and show where a token's time goes.")
    ] = None,
    policy: PolicyName = None,
    dense: DenseName = None,
    device_memory: Memory = None,
    as_json: Json = False,
) -> None:
    """Show what this machine can do: which methods can build here, devices, memory, codec and disk rates."""
    from moepack.reports.doctor import doctor as run
    from moepack.reports.doctor import kernels as measure

    if token is not None:
        from moepack.reports import token as taken

        found = taken.token_time(token, policy, dense, parse_size(device_memory))
        _print_json(taken.as_json(found)) if as_json else _console().print(taken.render(found))
        return
    if kernels:
        rows = measure()
        if as_json:
            _print_json({"kernels": rows})
        else:
            for row in rows:
                shown = f"{row['device']:<16} {row['version']:<16} {row['tokens']:>6} tokens an expert: {row['kernel']}"
                typer.echo(shown)
        return
    facts = run(directory)
    if as_json:
        _print_json(facts)
    else:
        for key, value in facts.items():
            if isinstance(value, dict):
                value = ", ".join(f"{k} {_human(k, v)}" for k, v in value.items())
            typer.echo(f"{key:<18} {_human(key, value)}")
    if facts["problems"]:
        raise typer.Exit(1)


def _human(key: str, value: Any) -> str:
    if isinstance(value, int | float) and "bytes" in key:
        return f"{value / 2**30:.2f} GiB" + ("/s" if key.endswith("second") else "")
    if value in (None, [], ""):
        return "none"
    return str(value)


def _version(show: bool) -> None:
    if show:
        from moepack import __version__

        typer.echo(f"moepack {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The console script: runs a command and turns the errors that a user can act on into one line."""
    from moepack.progress import quiet_libraries
    from moepack.startup import leave_out

    quiet_libraries()
    leave_out(next(iter(sys.argv[1:]), ""))
    try:
        app()
    except MoepackError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        typer.echo("moepack: interrupted", err=True)
        sys.exit(130)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _fail(f"{where}{error.strerror or error}")


def _fail(message: str) -> None:
    typer.echo(f"moepack: {printable(message, keep=chr(10))}", err=True)
    sys.exit(2)
