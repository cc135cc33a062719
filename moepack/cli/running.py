"""The commands that run a model: evaluation, text, chat and the server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from moepack.runtime.planning.sizes import parse_size

from .options import (
    Cached,
    DenseName,
    Device,
    Dtype,
    Json,
    Logits,
    MaxTpot,
    Memory,
    MinP,
    Model,
    PolicyName,
    Prefill,
    Quiet,
    Repetition,
    Seed,
    StopTexts,
    System,
    Temperature,
    Template,
    TopK,
    TopP,
)
from .output import console, print_json, progress


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
    with progress(quiet) as reporter:
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
        print_json((asdict(result) if result else {}) | ({"tasks": scores} if scores else {}))
        return
    if scores:
        console().print(harness.render(scores, f"{path}: {policy or 'without a policy named'}"))
    if result is None:
        return
    console().print(scoring.render(result, str(path)))
    if result.budget_bytes is not None:
        counted = f"{result.promotions:,} promotions, {result.demotions:,} demotions, {result.forward_waits:,} waits"
        peak = f"peak {result.resident_bytes_peak:,} of {result.budget_bytes:,} bytes"
        typer.echo(f"{counted}, {peak}")


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
    from moepack.server.batching.sampling import Sampling

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
        print_json({"prompt": prompt, "text": text, "policy": policy})


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
    from moepack.server.batching.sampling import Sampling

    sampling = Sampling(temperature, top_p, top_k, min_p, seed, repetition=repetition_penalty)
    if path.startswith(("http://", "https://")):
        talk(There(path, api_key, max_new_tokens, sampling, stop or ()), system)
        return
    size, template = parse_size(device_memory), read_template(chat_template)
    with Session(path, policy, device, dtype, size, template, dense, max_tpot) as session:
        session.chat([{"role": "user", "content": "?"}])  # refused before weights are read
        session.load(kv_tokens or CHAT_TOKENS, PROMPT)
        talk(Here(session, max_new_tokens, sampling, stop or ()), system)


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
