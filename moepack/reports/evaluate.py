"""Measure the perplexity of a bundle under a policy, or of a plain checkpoint.

The text is that of `moepack.calibrate.text.windows`: documents joined with the end-of-text token and cut into windows
of one length. Each window is scored from its second token on.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from moepack.pack.errors import InputError, NotFiniteError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import lossless
from moepack.runtime.kv.forms import AUTO_KV, PLAIN_KV
from moepack.runtime.planning.options import DEFAULTS, LoadOptions
from moepack.shared.memory import peaks
from moepack.shared.opening import Source, check, load_shown, locate
from moepack.shared.progress import SILENT, Reporter

from .intervals import FEW, clustered
from .scoring import TokenScores, products, token_scores

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

    from moepack.runtime.planning.fixed import Fixed
    from moepack.runtime.served_model import CausalModel, ServedModel

Interval = tuple[float, float]
Windows = tuple[
    "Tensor", "Tensor"
]  # of a file, int64 [windows, length]: token ids, and the number of each one's document

_LOGITS = 1 << 26  # bytes of logits that are scored at a time without a budget
_TOKENS = 1024  # tokens of a forward pass in a budget; the memory of a pass grows with its tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Scores over text. Intervals are 95 %, over documents, or over windows if documents are few (intervals.py)."""

    perplexity: float
    tokens: int  # scored tokens
    tokens_per_second: float
    perplexity_interval: Interval
    kl: float | None = None  # divergence KL(lossless, served), nats a token; None unless asked for
    kl_interval: Interval | None = None
    top1_agreement: float | None = None  # share of tokens at which both distributions have the same likeliest token
    top1_interval: Interval | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileScore(Scores):
    """Scores over one file."""

    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Scores):
    """Scores over all files in one session, and the session's use of the device."""

    files: tuple[FileScore, ...]
    length: int  # tokens of a window
    policy: str | None
    resident_bytes_peak: int
    budget_bytes: int | None
    process_bytes_peak: int  # the most that the process has taken, libraries included
    group_bytes_peak: int | None  # the same of its control group, with page cache; None where it cannot be read
    memory_limit_bytes: int | None = None  # the limit on the process, where there is one
    promotions: int = 0
    demotions: int = 0
    forward_waits: int = 0  # forward passes that waited for copies; 0 except for policies that load on demand
    cancelled: int = 0
    transition_failures: int = 0  # failed copies, whose experts stayed on their versions
    refusals: int = 0  # promotions put off for want of room
    bytes_moved: int = 0  # stored bytes copied, also at loading
    kv_waits: int = 0  # forward passes that waited until experts made room for the KV cache
    graph_failures: int = 0  # decode steps that could not be captured in a CUDA graph, and were tried again later
    worker_failures: int = 0  # failed rounds of transitions
    host_bytes: int = 0  # bytes of weights that the host read for the experts it ran
    demand_bytes: int = 0  # stored bytes that passes waited for, under policies that load on demand
    prefetch_bytes: int = 0  # stored bytes fetched ahead of need, split below
    prefetch_in_time: int = 0  # bytes that had arrived when needed
    prefetch_late: int = 0  # bytes that were on their way when needed
    prefetch_wasted: int = 0  # bytes that were not needed
    fixed: Fixed | None = None  # bytes outside the experts, by use; None for a checkpoint


def evaluate(
    path: str | Path,
    data: Sequence[str],
    options: LoadOptions = DEFAULTS,
    length: int = 512,
    samples: int = 256,
    reporter: Reporter = SILENT,
    trace: Path | None = None,
    kl: bool = False,
) -> Evaluation:
    """Measure the perplexity of a bundle or checkpoint on text files, one after another in one session.

    Args:
        path: the directory or Hub id of a bundle or checkpoint.
        data: files or Hub data sets.
        options: how the model is loaded. `batch` is the windows of a forward pass: 16 by default, in a budget fewer
            if 16 have over 1,024 tokens together. `prefill_tokens` is a window's tokens by default. `all_logits` is
            False by default: logits are made in pieces. `kv_tokens` are used only with a `kv` of fewer bits, but the
            budget leaves room for them.
        length: tokens of a window; the model's longest context if that is less.
        samples: windows a file, from its beginning.
        reporter: receives progress.
        trace: a file that receives a line for each forward pass (moepack.runtime.trace); for bundles alone.
        kl: first run the bundle's lossless version without a budget, and report divergence and agreement.
    """
    if not data:
        raise InputError("no text to evaluate on: name files with --data")
    with contextlib.ExitStack() as stack:
        with reporter.hub_bars():
            source = _checked(path, data, options, trace)
        length = fitting(source.path, length, reporter)
        batch = 16 if not options.in_budget else max(1, min(16, _TOKENS // length))
        options = options.filled(prefill_tokens=length, all_logits=False, batch=batch)
        if options.workload.kv != PLAIN_KV or options.kv == AUTO_KV:
            options = options.filled(kv_tokens=length)
        batch = options.workload.batch
        with reporter.hub_bars():
            pools = text_windows(source, data, length, samples)
        reference = None
        if kl:
            reference = _Reference(stack.enter_context(tempfile.TemporaryDirectory(prefix="moepack-")))
            _compare_with(reference, source, options, pools, batch, reporter)
        model = load_shown(source, options, reporter)
        serving = getattr(model, "moepack", None)
        if trace is not None and serving is not None:
            serving.trace(trace)
        room = _LOGITS if serving is None or serving.budget_bytes is None else serving.fixed.activations
        reporter.stage("evaluate", len(data))
        stack.enter_context(products(model))
        scored = [_score(model, name, pool, batch, room, reference, reporter) for name, pool in pools]
    reporter.step("done")
    if serving is None:
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        session: dict[str, Any] = {"policy": None, "resident_bytes_peak": size, "budget_bytes": None}
    else:
        serving.close()
        peak = serving.resident_bytes_peak
        session = {"policy": serving.policy, "resident_bytes_peak": peak, "fixed": serving.fixed, **serving.counters()}
        session |= {"budget_bytes": serving.budget_bytes, "memory_limit_bytes": getattr(serving.limit, "bytes", None)}
    session |= peaks()
    files = tuple(FileScore(file=s.file, **_scores([s], kl)) for s in scored)
    return Evaluation(files=files, length=length, **_scores(scored, kl), **session)


def _checked(path: str | Path, data: Sequence[str], options: LoadOptions, trace: Path | None) -> Source:
    from moepack.calibrate.text.documents import check_source

    source = locate(path)
    for name in data:
        check_source(name)  # before torch is imported
    check(source, options)
    if trace is not None:
        if not source.is_bundle:
            raise InputError(f"{path}: not a bundle: a trace needs one")
        if trace.is_dir() or not os.access(trace if trace.exists() else trace.parent, os.W_OK):
            raise InputError(f"{trace}: a trace cannot be written there: name a file in an existing folder")
    return source


def _compare_with(
    reference: _Reference,
    source: Source,
    options: LoadOptions,
    pools: list[tuple[str, Windows]],
    batch: int,
    reporter: Reporter,
) -> None:
    """Fill `reference`: run the bundle's lossless version, without a budget, over all files."""
    if not source.is_bundle:
        raise InputError(f"{source.path}: not a bundle: a divergence needs one, to compare with its lossless version")
    dense = open_bundle(source.path).dense_versions if Path(source.path).is_dir() else ()
    best = LoadOptions(  # the most precise versions; naming one keeps the environment's from being taken
        policy="static", device=options.device, dtype=options.dtype, dense=dense[0].name if dense else None
    )
    model = load_shown(source, best, reporter)
    reporter.stage("reference", len(pools))
    with model.moepack as serving:
        bundle = serving.bundle
        for versions in (bundle.versions, bundle.dense_versions):
            if versions and lossless(versions[:1]) is None:
                here = ", ".join(v.name for v in versions)
                raise InputError(f"{bundle.path}: has no lossless version to compare with: here are {here}")
        for name, (pool, _) in pools:
            reference.keep(model, name, pool, batch, reporter)


def fitting(source: str | Path, length: int, reporter: Reporter) -> int:
    """Return a number of tokens, or if that is less the model's longest context, with a note; `check` comes before."""
    from transformers import AutoConfig

    from moepack.runtime.planning.config import longest_context

    most = None
    with suppress(Exception):  # loading reports the error
        most = longest_context(AutoConfig.from_pretrained(source))
    if most is None or not 1 < most < length:
        return length
    reporter.note(f"{most:,} tokens at a time, the model's longest context, not {length:,}")
    return most


def text_windows(source: Source, data: Sequence[str], length: int, samples: int) -> list[tuple[str, Windows]]:
    """Read each file as windows, with the document of each token; raise InputError if a file has no full window."""
    from moepack.calibrate.text.windows import document_windows
    from moepack.families.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(source.path))
    pools = [(name, document_windows(name, tokenizer, length, samples)) for name in data]
    for name, (pool, _) in pools:
        if not len(pool):
            raise InputError(f"{name}: shorter than one window of {length} tokens: give more text, or lower --length")
    return pools


class _Scored(NamedTuple):
    """Sums over each cluster of one file's tokens (see `_clusters`), and the seconds of scoring the file."""

    file: str
    counts: list[float]
    nll: list[float]
    kl: list[float]
    agrees: list[float]
    seconds: float


class _Reference:
    """Hidden states of a lossless version, a row for each token, and the output projection if it has versions.

    Both are in mapped files, whose pages the system may write out.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._kept: dict[str, Tensor] = {}
        self._head: nn.Linear | None = None

    def keep(self, model: ServedModel, file: str, pool: Tensor, batch: int, reporter: Reporter) -> None:
        import torch

        reporter.step(Path(file).name)
        reporter.inner("tokens", pool.numel())
        if self._head is None:
            self._keep_head(model)
        with torch.inference_mode():
            for start, ids in zip(range(0, len(pool), batch), pool.split(batch), strict=True):
                hidden = token_scores(model, ids.to(model.device), 0).hidden
                if hidden is None:
                    raise InputError(f"{type(model).__name__} makes the logits of all tokens at once: no comparison")
                if file not in self._kept:
                    size = pool.numel() * hidden.shape[-1]
                    name = f"{self._folder}/{len(self._kept)}"
                    with torch.inference_mode(False):
                        self._kept[file] = torch.from_file(name, shared=True, size=size, dtype=hidden.dtype)
                self._kept[file].view(*pool.shape, -1)[start : start + len(ids)] = hidden
                reporter.advance(ids.numel())

    def _keep_head(self, model: ServedModel) -> None:
        import torch

        from moepack.runtime.dense.packed import PackedLinear

        head = model.get_output_embeddings()
        if not any(model.get_submodule(d.module) is head for d in model.moepack.bundle.manifest.dense):
            return
        path = f"{self._folder}/head"
        like = head.weights(model.dtype) if isinstance(head, PackedLinear) else head.weight
        weight = torch.from_file(path, shared=True, size=like.numel(), dtype=like.dtype).view_as(like)
        weight.copy_(like.detach())
        kept: Any = torch.nn.Linear(head.in_features, head.out_features, device="meta")
        kept.weight = torch.nn.Parameter(weight, requires_grad=False)
        bias = head.bias
        kept.bias = None if bias is None else torch.nn.Parameter(bias.cpu().clone(), requires_grad=False)
        self._head = kept

    def of(self, file: str, pool: Tensor) -> Tensor:
        return self._kept[file].view(*pool.shape, -1)

    def head_for(self, model: CausalModel) -> nn.Linear | None:
        """Return the reference's output projection if the model serves its own in some version, else None."""
        from moepack.runtime.dense.packed import PackedLinear

        return self._head if isinstance(model.get_output_embeddings(), PackedLinear) else None


def _clusters(pool: Tensor, documents: Tensor) -> Tensor:
    """Return the cluster of each scored token, int64 [windows, length - 1]: its document, or its window if there are
    fewer than `FEW` documents."""
    import torch

    if len(documents[:, 1:].unique()) >= FEW:
        return documents[:, 1:] - documents.min()
    return torch.arange(len(pool)).unsqueeze(1).expand(-1, pool.shape[1] - 1)


def _score(
    model: CausalModel,
    file: str,
    windows: Windows,
    batch: int,
    room: int,
    reference: _Reference | None,
    reporter: Reporter,
) -> _Scored:
    """Score the windows of one file, `batch` at a time; a piece of logits takes at most `room` bytes."""
    import torch

    pool, documents = windows
    reporter.step(Path(file).name)
    reporter.inner("tokens", pool.numel())
    clusters = _clusters(pool, documents)
    sums = torch.zeros(4, int(clusters.max()) + 1, dtype=torch.float64)
    theirs, head = (None, None) if reference is None else (reference.of(file, pool), reference.head_for(model))
    began = time.perf_counter()
    with torch.inference_mode():
        for start, ids in zip(range(0, len(pool), batch), pool.split(batch), strict=True):
            part = slice(start, start + len(ids))
            got = token_scores(model, ids.to(model.device), room, None if theirs is None else theirs[part], head)
            _check(got, file, start, model)
            values = (torch.ones_like(got.nll), got.nll, got.kl, got.agrees)
            for row, value in zip(sums, values, strict=True):
                if value is not None:
                    row.index_add_(0, clusters[part].flatten(), value.flatten().cpu())
            reporter.advance(ids.numel())
    seconds = time.perf_counter() - began
    counts, nll, divergence, agrees = (row[sums[0] > 0].tolist() for row in sums)
    return _Scored(file, counts, nll, divergence, agrees, seconds)


def _check(scores: TokenScores, file: str, first: int, model: CausalModel) -> None:
    """Raise NotFiniteError for a token whose scores are not finite; `first` is the number of the first window."""
    from moepack.calibrate.finite import not_finite
    from moepack.runtime.checked_logits import NO_LOGITS

    policy = getattr(getattr(model, "moepack", None), "policy", None)
    under = f" under policy {policy}" if policy else ""
    for name, values in (("likelihood", scores.nll), ("divergence from the lossless version", scores.kl)):
        if values is not None and (found := not_finite(values)):
            (row, token), value = found
            where = f"{file}: window {first + row}, token {token + 1}"
            raise NotFiniteError(where, f"has a {name} of {value:g}{under}: the model {NO_LOGITS}")


def _scores(scored: Sequence[_Scored], compared: bool) -> dict[str, Any]:
    """Compute the fields of `Scores` over all clusters of these files; `compared` adds those of the reference."""
    counts = [n for s in scored for n in s.counts]
    perplexity = clustered([x for s in scored for x in s.nll], counts).exp()
    tokens = int(sum(counts))
    out = {
        "perplexity": perplexity.mean,
        "tokens": tokens,
        "tokens_per_second": tokens / sum(s.seconds for s in scored),
        "perplexity_interval": perplexity.interval,
    }
    if compared:
        divergence = clustered([x for s in scored for x in s.kl], counts)
        agreement = clustered([x for s in scored for x in s.agrees], counts)
        out |= {"kl": divergence.mean, "kl_interval": divergence.interval}
        out |= {"top1_agreement": agreement.mean, "top1_interval": agreement.interval}
    return out


def render(result: Evaluation, title: str) -> Table:
    """Make a table with a row for each file, and 95 % intervals."""
    from rich.table import Table

    columns = ["file", "perplexity", "95 %", "tokens", "tokens/s"]
    if result.kl is not None:
        columns += ["KL to lossless, nats", "95 %", "same first token"]
    table = Table(*columns, title=f"{title}: {result.policy or 'as it is'}, windows of {result.length:,} tokens")
    for score in result.files:
        low, high = score.perplexity_interval
        row = [f"{score.perplexity:.4f}", f"{low:.4g}-{high:.4g}"]
        row += [f"{score.tokens:,}", f"{score.tokens_per_second:,.0f}"]
        if score.kl is not None and score.kl_interval is not None:
            low, high = score.kl_interval
            row += [f"{score.kl:.3g}", f"{low:.3g}-{high:.3g}", f"{score.top1_agreement:.2%}"]
        table.add_row(Path(score.file).name, *row)
    return table
