"""Measure how fast a bundle reads prompts and decodes, at several lengths, policies and memory limits.

Tokens are random, of a fixed seed, as llama-bench's are: no text is needed, but experts are chosen more evenly than
texts choose them. Every client's sequence has the same length, and all go through one forward pass together.
"""

from __future__ import annotations

import csv
import gc
import io
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from moepack.families.arguments import cache_in, with_cache
from moepack.pack.errors import InputError
from moepack.runtime.planning.options import DEFAULTS, LoadOptions
from moepack.shared.opening import Source, check, load_shown, locate
from moepack.shared.progress import SILENT, Reporter, size

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor
    from torch.nn import Embedding
    from transformers import Cache

    from moepack.runtime.served_model import ServedModel

CHUNK = 512  # the most tokens of a prompt that one pass reads in a budget, as in `moepack generate`


@dataclass(frozen=True, slots=True)
class Lengths:
    """What is measured."""

    prompts: Sequence[int] = (512,)  # tokens of a prompt; none: no prompts
    new: Sequence[int] = (64,)  # tokens that are decoded; none: no decoding
    context: int = 128  # tokens in the cache before the first that is decoded
    clients: Sequence[int] = (1,)  # sequences at a time
    repeat: int = 3  # how often each is measured, after a first time that is not

    def __post_init__(self) -> None:
        """Raise InputError for lengths that cannot be measured."""
        given = {"prompt": self.prompts, "new": self.new, "clients": self.clients}
        given |= {"context": (self.context,), "repeat": (self.repeat,)}
        for name, values in given.items():
            if any(value < 1 for value in values):
                raise InputError(f"{name} {', '.join(map(str, values))}: at least 1")
        if not self.clients or not (*self.prompts, *self.new):
            raise InputError("there is nothing to measure: name lengths of prompts or of answers, and clients")

    @property
    def longest(self) -> int:
        """The tokens of the longest sequence."""
        return max([*self.prompts, *(self.context + new for new in self.new)])


@dataclass(frozen=True, slots=True)
class Row:
    """A measured rate, or why there is none."""

    policy: str
    limit: str | None  # as it was given
    clients: int
    test: Literal["prompt", "decode"]
    tokens: int  # of each client
    tokens_per_second: float | None = None  # of all clients: the mean of the repetitions
    deviation: float | None = None  # standard deviation of the repetitions
    experts: dict[str, int] | None = None  # experts by version, after the test
    device_bytes_peak: int | None = None  # of the budget, or of weights; since the model was loaded
    error: str | None = None


def bench(
    path: str | Path,
    policies: Sequence[str] = (),
    device_memories: Sequence[int | str] = (),
    memories: Sequence[int | str] = (),
    lengths: Lengths = Lengths(),
    options: LoadOptions = DEFAULTS,
    reporter: Reporter = SILENT,
) -> list[Row]:
    """Load a bundle under each policy and each limit, and measure its rates.

    Args:
        path: a bundle's directory or Hub id.
        policies: each is served under each limit; by default that of `options`.
        device_memories: budgets. Without these and `memories`, those of `options`.
        memories: limits of the whole process.
        lengths: what is measured.
        options: how the bundle is loaded otherwise.
        reporter: receives progress.

    Raises:
        InputError: if `path` is not a bundle, or an option does not fit it. A limit that is too small is a row.
    """
    with reporter.hub_bars():
        source = locate(path)
    if not source.is_bundle:
        raise InputError(f"{path}: not a bundle: it has no manifest.json")
    bounded: list[tuple[str | None, LoadOptions]] = []
    bounded += [(str(limit), replace(options, device_memory=limit)) for limit in device_memories]
    bounded += [(str(limit), replace(options, memory=limit)) for limit in memories]
    bounded = bounded or [(None, options)]
    cases: list[tuple[str | None, LoadOptions]] = []
    for limit, with_limit in bounded:
        for policy in policies or (options.policy,):
            asked = replace(with_limit, policy=policy)
            most = min(CHUNK, lengths.longest) if asked.in_budget else lengths.longest
            asked = asked.filled(kv_tokens=lengths.longest, prefill_tokens=most, all_logits=False)
            asked = replace(asked, batch=max(lengths.clients))
            check(source, asked)
            cases.append((limit, asked))
    return [row for limit, asked in cases for row in _case(source, limit, asked, lengths, reporter)]


def _case(
    source: Source, limit: str | None, options: LoadOptions, lengths: Lengths, reporter: Reporter
) -> Iterator[Row]:
    tests: list[tuple[int, Literal["prompt", "decode"], int]] = []
    for clients in lengths.clients:
        tests += [(clients, "prompt", tokens) for tokens in lengths.prompts]
        tests += [(clients, "decode", tokens) for tokens in lengths.new]
    from moepack.runtime.planning.exceeded import TooSmallError

    try:
        model = load_shown(source, options, reporter)
    except TooSmallError as error:
        for test in tests:
            yield Row(options.policy or "", limit, *test, error=str(error))
        return
    import torch

    with model.moepack as serving, torch.inference_mode():
        chunk = options.workload.prefill_tokens if options.in_budget else lengths.longest
        reporter.stage(f"measure {serving.policy}" + ("" if limit is None else f" in {limit}"), len(tests))
        for clients, kind, tokens in tests:
            reporter.step(f"{kind} {tokens}" + (f", {clients} clients" if clients > 1 else ""))
            reporter.inner("repetitions", lengths.repeat)
            rates = []
            for turn in range(lengths.repeat + 1):
                if kind == "prompt":
                    took = _read(model, _prompt(model, clients, tokens, turn), chunk)[0]  # without the cache's memory
                else:
                    took = _decode(model, _prompt(model, clients, lengths.context, turn), tokens, chunk)
                if turn:  # the first finds kernels to compile and caches to fill
                    rates.append(clients * tokens / took)
                    reporter.advance()
            deviation = statistics.stdev(rates) if len(rates) > 1 else None
            mean = statistics.fmean(rates)
            peak = serving.resident_bytes_peak
            yield Row(serving.policy, limit, clients, kind, tokens, mean, deviation, serving.by_version, peak)
        reporter.step("done")
    del model
    gc.collect()  # before the next is loaded


def _prompt(model: ServedModel, clients: int, tokens: int, seed: int) -> Tensor:
    import torch

    vocabulary = cast("Embedding", model.get_input_embeddings()).num_embeddings
    ids = torch.randint(0, vocabulary, (clients, tokens), generator=torch.Generator().manual_seed(seed))
    return ids.to(model.device)


def _read(model: ServedModel, ids: Tensor, chunk: int) -> tuple[float, Tensor, Cache | None]:
    """Read prompts; return the seconds, the last tokens' logits and the cache."""
    last = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    _settle(model)
    began = time.perf_counter()
    cache = None
    for part in ids.split(chunk, dim=1):
        out = model(input_ids=part, use_cache=True, **with_cache(model, cache), **last)
        cache = cache_in(out)
    _settle(model)
    return time.perf_counter() - began, out.logits[:, -1:], cache


def _decode(model: ServedModel, ids: Tensor, tokens: int, chunk: int) -> float:
    _, logits, cache = _read(model, ids, chunk)
    began = time.perf_counter()
    for _ in range(tokens):
        out = model(input_ids=logits.argmax(-1), use_cache=True, **with_cache(model, cache))
        logits = out.logits[:, -1:]
        cache = cache_in(out)
    _settle(model)
    return time.perf_counter() - began


def _settle(model: ServedModel) -> None:
    """Wait until a GPU has computed what it was given."""
    if model.device.type == "cuda":
        import torch

        torch.cuda.synchronize(model.device)


def render(rows: Sequence[Row]) -> Table:
    """Make a table with a line for each row."""
    from rich.table import Table

    table = Table("policy", "limit", "test")
    for column in ("clients", "tokens/s", "peak"):
        table.add_column(column, justify="right")
    table.add_column("experts")
    for row in rows:
        start = row.policy or "default", row.limit or "none", f"{row.test} {row.tokens}", str(row.clients)
        if row.tokens_per_second is None:
            table.add_row(*start, "", "", row.error)
            continue
        around = "" if row.deviation is None else f" ± {row.deviation:,.1f}"
        table.add_row(*start, f"{row.tokens_per_second:,.1f}{around}", size(row.device_bytes_peak or 0), _shares(row))
    return table


def _shares(row: Row) -> str:
    held = row.experts or {}
    return ", ".join(f"{count / sum(held.values()):.0%} {name}" for name, count in held.items())


def as_csv(rows: Sequence[Row]) -> str:
    """Write the rows as CSV, with names of columns; experts as `w4=192 w2=64`."""
    text = io.StringIO()
    out = csv.DictWriter(text, list(Row.__dataclass_fields__), lineterminator="\n")
    out.writeheader()
    for row in rows:
        held = " ".join(f"{name}={count}" for name, count in (row.experts or {}).items())
        out.writerow({**asdict(row), "experts": held})
    return text.getvalue()
