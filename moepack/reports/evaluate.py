"""Perplexity and text, of a bundle under a policy or of a plain checkpoint.

Perplexity is over the windows of `moepack.calibrate.data`: documents joined with the end-of-text token, cut into
windows of one length, each window scored from its second token on.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moepack.pack.errors import InputError
from moepack.pack.hub_name import on_hub
from moepack.pack.manifest import MANIFEST
from moepack.progress import Reporter
from moepack.runtime.planning.sizes import DEVICE_MEMORY

if TYPE_CHECKING:
    from moepack.runtime.planning.fixed import Fixed

_LOGITS = 1 << 26  # bytes of logits that are scored at a time where there is no budget
_TOKENS = 1024  # of a forward pass in a budget: what they take of it grows with them
PROMPT = 512  # tokens of a prompt that go in at once, in a budget
NEW_TOKENS = 64  # that a prompt is continued by
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class FileScore:
    """Perplexity over one file; `tokens` counts the scored ones."""

    file: str
    perplexity: float
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of all files in one session, and what the session took of the device.

    Attributes:
        forward_waits: how often a forward pass waited for a copy; 0 but for policies that load on demand.
        transition_failures: copies that failed; their experts stayed on the versions they had.
        refusals: promotions put off for want of room.
        bytes_moved: stored bytes copied, those of loading included.
        kv_waits: how often a forward pass waited until experts had made room for its KV cache.
        worker_failures: rounds of transitions that failed.
        host_bytes: bytes of weights that the host read for the experts that it executed.
        demand_bytes: stored bytes that passes waited for, of policies that load on demand.
        prefetch_bytes: those fetched ahead; of them `prefetch_in_time` were there when they were needed,
            `prefetch_late` were on their way, and `prefetch_wasted` were not needed.
        fixed: what is taken outside the experts, by parts; of a bundle.
    """

    files: tuple[FileScore, ...]
    perplexity: float
    tokens: int
    tokens_per_second: float
    policy: str | None
    resident_bytes_peak: int
    budget_bytes: int | None
    promotions: int = 0
    demotions: int = 0
    forward_waits: int = 0
    cancelled: int = 0
    transition_failures: int = 0
    refusals: int = 0
    bytes_moved: int = 0
    kv_waits: int = 0
    worker_failures: int = 0
    host_bytes: int = 0
    demand_bytes: int = 0
    prefetch_bytes: int = 0
    prefetch_in_time: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    fixed: Fixed | None = None


def locate(path: str | Path) -> tuple[str | Path, bool]:
    """A bundle or checkpoint by its directory or Hub id: where transformers finds it, and whether it is a bundle.

    Of a checkpoint on the Hub the directory it was downloaded to; a bundle there keeps its id, and is fetched when it
    is loaded.

    Raises:
        InputError: when it is neither a directory nor on the Hub, or a checkpoint that is not whole.
    """
    if Path(path).exists():
        return path, (Path(path) / MANIFEST).is_file()
    name = str(path)
    if on_hub(name, MANIFEST, "config.json") == MANIFEST:
        return name, True
    from moepack.calibrate.checkpoint import open_checkpoint

    return open_checkpoint(name).path, False


def load_model(
    path: str | Path,
    is_bundle: bool,
    policy: str | None,
    device: str,
    dtype: str,
    device_memory: int | None = None,
    **workload: Any,
) -> Any:
    """A bundle, or a plain checkpoint, as a transformers model; `path` and `is_bundle` as `locate` gives them.

    `workload` goes on to `moepack.load`: what it holds back in a budget, and who is told of progress.
    """
    import torch

    from moepack.calibrate.stream import quiet_transformers
    from moepack.runtime.load import load

    wanted: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    if is_bundle:
        with quiet_transformers():
            return load(path, device, device_memory, policy, wanted, **workload)
    from transformers import AutoModelForCausalLM

    from moepack.calibrate.checkpoint import open_checkpoint

    opened = open_checkpoint(path)
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(opened.path, dtype=wanted, device_map=device)


def _check(
    path: str | Path, is_bundle: bool, policy: str | None, device: str, dtype: str, device_memory: int | None
) -> None:
    """See that what was asked for can be done, before anything is loaded.

    Raises:
        InputError: when it cannot.
    """
    from moepack.pack.reader import open_bundle
    from moepack.runtime.load import check_device
    from moepack.runtime.planning.choice import check_policy

    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown: {', '.join(DTYPES)}")
    check_device(device)
    if not is_bundle and (policy is not None or device_memory is not None):
        raise InputError(f"{path}: not a bundle: a policy and a memory budget need one")
    if policy is not None and Path(path).is_dir():
        check_policy(policy, open_bundle(path), device_memory is not None or bool(os.environ.get(DEVICE_MEMORY)))


def _check_trace(path: str | Path, is_bundle: bool, trace: Path) -> None:
    if not is_bundle:
        raise InputError(f"{path}: not a bundle: a trace needs one")
    if trace.is_dir() or not os.access(trace if trace.exists() else trace.parent, os.W_OK):
        raise InputError(f"{trace}: a trace cannot be written there: name a file in a folder that is there")


def _shown(reporter: Reporter) -> Callable[[int, int], None]:
    """Shows the bytes of experts that are loaded."""
    shown = -1

    def loaded(done: int, total: int) -> None:
        nonlocal shown
        if shown < 0:
            reporter.inner("MB of experts", total // 10**6)
            shown = 0
        reporter.advance(done // 10**6 - shown)
        shown = done // 10**6

    return loaded


def resident_bytes(model: Any) -> int:
    """Bytes of device memory that a model's weights take."""
    serving = getattr(model, "moepack", None)
    if serving is not None:
        return int(serving.resident_bytes(model))
    return sum(p.numel() * p.element_size() for p in model.parameters())


def evaluate(
    path: str | Path,
    data: Sequence[str],
    policy: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    device_memory: int | None = None,
    length: int = 512,
    samples: int = 256,
    reporter: Reporter | None = None,
    trace: Path | None = None,
    batch: int | None = None,
    kv_tokens: int = 0,
    prefill_tokens: int | None = None,
    all_logits: bool = False,
) -> Evaluation:
    """Perplexity of a bundle or checkpoint on text files, one after another in one session.

    Args:
        path: a bundle or a checkpoint: its directory, or its Hub id.
        data: files or Hub data sets.
        policy: how a bundle is served; see `moepack.load`.
        device: where to run.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device_memory: bytes that all of it may take; for bundles.
        length: tokens of a window; at most what the model was made for.
        samples: windows a file, from its beginning.
        reporter: who is told of progress.
        trace: write every forward pass into this file (moepack.runtime.trace); for bundles.
        batch: windows of a forward pass; without it 16, and in a budget as many as make up 1,024 tokens.
        kv_tokens: tokens of KV cache that the budget leaves room for; evaluation itself uses none.
        prefill_tokens: tokens a sequence of a pass that it leaves room for; without it those of a window.
        all_logits: whether it leaves room for the logits of all of them; evaluation makes them in pieces.
    """
    reporter = reporter or Reporter()
    if not data:
        raise InputError("no text to evaluate on: name files with --data")
    with reporter.hub_bars():
        source, is_bundle = locate(path)
        from moepack.calibrate.data import check_source, load_tokenizer

        _check(source, is_bundle, policy, device, dtype, device_memory)
        if trace is not None:
            _check_trace(path, is_bundle, trace)
        for name in data:
            check_source(name)
        length = _window(source, length)
        batch = batch or max(1, min(16, _TOKENS // length if device_memory is not None else 16))
        pools = _windows(load_tokenizer(Path(source)), data, length, samples)
        passes = length if prefill_tokens is None else prefill_tokens
        workload = {"kv_tokens": kv_tokens, "batch": batch, "prefill_tokens": passes, "all_logits": all_logits}
        reporter.stage("load", 1)
        reporter.step(Path(path).name)
        shown = _shown(reporter)
        model = load_model(source, is_bundle, policy, device, dtype, device_memory, progress=shown, **workload)
    serving = getattr(model, "moepack", None)
    if trace is not None and serving is not None:
        serving.trace(trace)
    room = _LOGITS if serving is None or device_memory is None else serving.fixed.activations
    reporter.stage("evaluate", len(data))
    scored = [_score(model, name, pool, batch, room, reporter) for name, pool in pools]
    reporter.step("done")
    if serving is not None:
        serving.close()
    return _evaluation(model, scored, device_memory)


class _Scored(NamedTuple):
    """One file's summed loss, scored tokens and seconds."""

    file: str
    nll: float
    tokens: int
    seconds: float


def _window(source: str | Path, length: int) -> int:
    """Tokens of a window: at most what the model was made for."""
    from transformers import AutoConfig

    with suppress(OSError, ValueError):  # loading says what is wrong
        text = AutoConfig.from_pretrained(source).get_text_config()
        return min(length, getattr(text, "max_position_embeddings", None) or length)
    return length


def _windows(tokenizer: Any, data: Sequence[str], length: int, samples: int) -> list[tuple[str, Any]]:
    """Each file with its windows; InputError for one that does not fill any."""
    from moepack.calibrate.data import windows

    pools = [(name, windows(name, tokenizer, length, samples)) for name in data]
    for name, pool in pools:
        if not len(pool):
            raise InputError(
                f"{name}: shorter than one window of {length} tokens: give more text or a shorter --length"
            )
    return pools


def _score(model: Any, file: str, pool: Any, batch: int, room: int, reporter: Reporter) -> _Scored:
    """Score the windows of one file, int64 [windows, length], `batch` at a time."""
    import torch

    reporter.step(Path(file).name)
    reporter.inner("tokens", pool.numel())
    nll, tokens, began = 0.0, 0, time.perf_counter()
    with torch.inference_mode():
        for ids in pool.split(batch):
            nll += negative_log_likelihood(model, ids.to(model.device), room)
            tokens += ids[:, 1:].numel()
            reporter.advance(ids.numel())
    return _Scored(str(file), nll, tokens, time.perf_counter() - began)


def _evaluation(model: Any, scored: Sequence[_Scored], device_memory: int | None) -> Evaluation:
    """The scores of all files, and what the session took."""
    serving = getattr(model, "moepack", None)
    total = sum(s.tokens for s in scored)
    return Evaluation(
        tuple(FileScore(s.file, math.exp(s.nll / s.tokens), s.tokens, s.tokens / s.seconds) for s in scored),
        math.exp(sum(s.nll for s in scored) / total),
        total,
        total / sum(s.seconds for s in scored),
        None if serving is None else serving.policy,
        resident_bytes(model) if serving is None else serving.resident_bytes_peak,
        device_memory,
        **({} if serving is None else serving.counters()),
        fixed=None if serving is None else serving.fixed,
    )


def negative_log_likelihood(model: Any, ids: Any, room: int) -> float:
    """The summed loss of every token of `ids` [batch, length] but the first of each row.

    The logits of all tokens are the largest thing in a forward pass by far. They are made in pieces: the model's own
    forward runs again and again on what its decoder has returned once, for some tokens of it at a time.

    Args:
        model: a causal language model.
        ids: int64, on the model's device.
        room: bytes that a piece may take.
    """
    import torch

    from moepack.runtime.passes import unwatched_forward

    last = ids.shape[1] - 1
    decoder = getattr(model, model.base_model_prefix)
    if decoder is model or not model._supports_logits_to_keep():
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    kept: list[Any] = []
    hook = decoder.register_forward_hook(lambda _, args, out: kept.append(out))
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        hook.remove()
    # A logit takes 2 or 4 bytes as the model makes it, 4 in float32, 4 more as a logarithm.
    piece = max(1, room // (12 * len(ids) * model.config.get_text_config().vocab_size))
    forward = unwatched_forward(model)
    loss, decoder.forward = 0.0, lambda *_, **__: kept[0]
    try:
        for start in range(0, last, piece):
            these = torch.arange(start, min(start + piece, last), device=ids.device)
            logits = forward(input_ids=ids, use_cache=False, logits_to_keep=these).logits.float().flatten(0, 1)
            loss += float(torch.nn.functional.cross_entropy(logits, ids[:, these + 1].flatten(), reduction="sum"))
    finally:
        del decoder.forward
    return loss


def generate(
    path: str | Path,
    prompt: str,
    policy: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    device_memory: int | None = None,
    max_new_tokens: int = NEW_TOKENS,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 1,
    kv_tokens: int | None = None,
    prefill_tokens: int | None = None,
    all_logits: bool = False,
) -> str:
    """The continuation of a prompt: greedy at temperature 0, sampled above it.

    A budget leaves room for `batch` sequences with the KV cache of `kv_tokens` tokens, or of the prompt and all new
    ones; and for passes of `prefill_tokens` tokens, or of the prompt's, at most 512: so many of it go in at once.
    """
    if not prompt:
        raise InputError("the prompt is empty")
    with Reporter().hub_bars():
        source, is_bundle = locate(path)
        import torch

        from moepack.calibrate.data import load_tokenizer

        _check(source, is_bundle, policy, device, dtype, device_memory)
        tokenizer = load_tokenizer(Path(source))
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        if not ids.numel():
            raise InputError("the prompt is empty")
        whole = ids.shape[1] + max_new_tokens
        passes = min(ids.shape[1], PROMPT) if prefill_tokens is None else prefill_tokens
        chunk = passes or PROMPT
        workload = {"kv_tokens": whole if kv_tokens is None else kv_tokens, "batch": batch, "prefill_tokens": passes}
        model = load_model(source, is_bundle, policy, device, dtype, device_memory, **workload, all_logits=all_logits)
    ids = ids.to(model.device)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    if device_memory is not None and ids.shape[1] > chunk:
        options["past_key_values"] = _prefill(model, ids, chunk)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, pad_token_id=0, **options)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _prefill(model: Any, ids: Any, chunk: int) -> Any:
    """The cache of a prompt's first tokens, put in a chunk at a time; the last chunk is left to generation."""
    import torch

    last: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    cache = None
    with torch.inference_mode():
        for part in ids[:, : (ids.shape[1] - 1) // chunk * chunk].split(chunk, dim=1):
            cache = model(input_ids=part, past_key_values=cache, use_cache=True, **last).past_key_values
    return cache
