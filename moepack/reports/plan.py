"""Plan a budget before anything is loaded: versions by layer, expected loss, expected speed.

The plan is made as `moepack.load` makes it, and measures the same skeleton. It reads the bundle's headers and tables,
but no weights. On a GPU, the plan estimates activations from shapes, and loading measures them. Loading then divides
memory between versions once, so the map may differ by a few experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.pack.manifest import CONFIG
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.processors import processors
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import Version
from moepack.pack.tables import CalibrationTables, shown_loss
from moepack.runtime.kv.forms import AUTO_KV, CONTEXT, FORMS, LOSS, PLAIN_KV
from moepack.runtime.load import check_options, meant_device
from moepack.runtime.planning.options import GENERATION, LoadOptions, Workload, on_cpu
from moepack.runtime.planning.sizes import in_unit, parse_size
from moepack.runtime.policies.placements import version_name
from moepack.runtime.profile import profiled
from moepack.shared.progress import size

if TYPE_CHECKING:
    from rich.console import Group

    from moepack.runtime.planning.fixed import Fixed
    from moepack.runtime.policies.contract import Versions
    from moepack.runtime.policies.registry import Policy
    from moepack.runtime.process_limit import Beside, ProcessLimit

    from .speed import Speed

MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """One layer: how many experts would be loaded at each placement."""

    layer: int  # the decoder layer's index
    hi: int  # experts at the best placement of the map
    lo: int  # experts at all others
    version_hi: str  # the best placement of the map
    version_lo: str  # the last placement of the map
    versions: dict[str, int]  # placement -> experts


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A form of the KV cache beside the experts that the budget then holds."""

    kv: str
    cache_bytes: int
    experts_loss: float | None  # their mean relative loss; None where the budget does not hold them
    cache_loss: float  # the relative loss of experts that adds as much divergence as this form does


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan for one budget."""

    bundle: str
    policy: str
    device: str
    feasible: bool  # whether the budget suffices
    budget_bytes: int
    fixed_bytes: int  # M_fixed
    fixed: Fixed  # M_fixed by use
    least_bytes: int  # the smallest sufficient budget
    used_bytes: int  # reserved with the experts as shown, and with the base versions that are kept
    kv_tokens: int
    batch: int
    prefill_tokens: int
    all_logits: bool
    kv_bytes_per_token: int  # growth of a sequence's cache
    # Cached tokens a sequence that fit with every expert at the lowest version. An upper bound: longer caches
    # enlarge activations too. 2^40 for a model without a cache that grows.
    kv_tokens_most: int
    host_bytes: int  # size of the served versions' files
    per_layer: tuple[LayerPlan, ...]
    estimated: bool  # whether activations are an estimate from shapes
    # Squared error of experts' outputs over their squares: the mean over calibration's routed tokens, with the
    # experts as they would be loaded.
    expected_relative_loss: float | None = None
    expected_relative_loss_error: float | None = None  # standard error of that loss; None if the bundle keeps none
    bytes_per_token: int | None = None  # bytes that a decoding step of one sequence reads
    bandwidth: float | None = None  # measured bytes a second of the device's memory; None for a device that is not here
    # Of decoding one sequence: predicted, or where `seconds_per_token` is None the most that `bandwidth` allows
    expected_tokens_per_second: float | None = None
    message: str | None = None  # why the plan is not feasible, in one line
    # On this machine's CPU, under a policy whose waits can be predicted: what takes a token's seconds, and most of them
    seconds_per_token: Speed | None = None
    bound_by: str | None = None
    fetched_bytes_per_token: int | None = None  # bytes of experts that a decoding step waits for
    moving_tokens_per_second: float | None = None  # while experts move to other versions beside passes
    # Under a memory limit: the limit, what the process takes beside the budget, and the most that it would take.
    memory_limit_bytes: int | None = None
    beside: Beside | None = None
    process_bytes_peak: int | None = None
    # What keeps every expert below the bundle's most precise version although memory is left, in one line
    capped: str | None = None
    kv: str = PLAIN_KV  # the form of the cache
    caches: tuple[CachePlan, ...] = ()  # what `--kv auto` compared
    context: int | None = None  # the most tokens of a sequence that the model takes, by its config.json
    table: Versions = ()  # [layers][experts], the placement of each; not in JSON
    # Whether passes choose placements, or some experts are off the device: versions that `table` does not name may
    # then be served too. Not in JSON.
    moving: bool = False
    pinned_bytes: int = 0  # of host memory that is pinned for experts which the device reads there


def plan(path: str | Path | Bundle, options: LoadOptions) -> Planned:
    """Predict what `moepack.load` would serve with these options. Their device need not be in this machine.

    A workload that the options leave open is that of `moepack.load`, `GENERATION`.

    Raises:
        InputError: without a budget, or if the policy does not fit the bundle. A small budget gives a `message`.
    """
    if not options.in_budget:
        raise InputError("a plan needs a memory budget: --device-memory or --memory")
    options = options.filled(**GENERATION)
    bundle = path if isinstance(path, Bundle) else open_bundle(path)
    check_options(bundle, options)
    bundle = profiled(bundle, options.profile)
    on_gpu = _check_device(options.device)
    bundle.check(CONFIG)
    limit = None if options.memory is None else _limit(bundle, options)
    if options.kv == AUTO_KV:
        return _with_best_cache(bundle, options, limit, on_gpu)
    return _planned(bundle, options, limit, on_gpu)


def _planned(bundle: Bundle, options: LoadOptions, limit: ProcessLimit | None, on_gpu: bool) -> Planned:
    from moepack.runtime.dense.choice import choose_dense
    from moepack.runtime.planning.choice import choose_policy
    from moepack.runtime.planning.decided import decide, relative_loss
    from moepack.runtime.planning.fixed import rounding
    from moepack.runtime.planning.measured import model_sizes, threads
    from moepack.runtime.planning.plan import least_budget
    from moepack.runtime.planning.token_cost import within

    from .machine_rates import memory_rate, rates
    from .speed import speed, token_bytes, while_moving

    workload = options.workload
    model = model_sizes(bundle, options, choose_dense(options.dense, bundle, options.policy))
    needs = model.needs
    budget = options.budget if limit is None else limit.budget
    assert budget is not None
    read = max(0, needs.dense - model.looked_up) + needs.kv.bytes(workload.kv_tokens)
    whole = bundle.versions
    bundle = within(bundle, options.bound, read, model.top_k, partial(memory_rate, options.device))
    parsed = choose_policy(options.policy, bundle, [options.device], True)
    estimated = not on_cpu(options.device)
    if limit is not None:
        from moepack.runtime.process_limit import check_policy

        check_policy(bundle, parsed)
    fixed = needs.fixed(limit is not None)
    if estimated:  # as loading on a GPU holds back
        fixed = replace(fixed, dense=fixed.dense + rounding(1, parsed.is_live))
    host = parse_size(options.host_memory)
    least = least_budget(bundle, parsed, fixed, on_gpu, host)
    decided = decide(bundle, parsed, fixed, budget, on_gpu, host, needs.ahead) if least <= budget else None
    message = None
    if decided is None:
        message = f"{bundle.path}: {budget} bytes are not enough: the least that would do is {least} bytes"
        message += f" for {asked(workload)} ({fixed})"
        if limit is not None:
            from moepack.runtime.planning.exceeded import TooSmallError

            message = limit.too_small(bundle, TooSmallError(message, least)).text
        message = in_unit(message, options.size)
    facts: JsonObject = {"context": model.context or None}
    if limit is not None:
        facts |= {"memory_limit_bytes": limit.bytes, "beside": limit.beside}
    layers: tuple[LayerPlan, ...] = ()
    used = host = cached = 0
    bandwidth = memory_rate(options.device)
    if decided is not None:
        table = decided.table
        facts |= {"table": table, "moving": decided.moving, "pinned_bytes": decided.pinned}
        fixed = replace(fixed, activations=fixed.activations + decided.workspace, **decided.parts)
        tables = bundle.calibration()
        served = [name for name in decided.names if any(name in row for row in table)]
        layers = tuple(_layer(bundle, p, row, served) for p, row in enumerate(table))
        used = fixed.total + decided.used
        if limit is not None:
            facts["process_bytes_peak"] = limit.beside.limit(used)
        facts["capped"] = _cap(bundle, whole, parsed, table, budget - used)
        cached = needs.kv.tokens(fixed.kv + budget - fixed.total - decided.floor, workload.batch, MOST)
        host = sum(bundle.version_bytes(name) for name in {version_name(name) for name in served} - {""})
        facts["expected_relative_loss"], facts["expected_relative_loss_error"] = relative_loss(tables, table)
        facts["bytes_per_token"] = read + int(_experts_read(bundle, tables, table, model.top_k))
        if bandwidth and not decided.pinned:  # which the bus bounds
            facts["expected_tokens_per_second"] = bandwidth / facts["bytes_per_token"]
        if bandwidth and not estimated and (token := token_bytes(bundle, parsed, table, read, model.top_k)):
            took = speed(token, found := rates(bundle, token, bandwidth))
            facts |= {"seconds_per_token": took, "expected_tokens_per_second": took.tokens_per_second}
            facts |= {"bytes_per_token": read + token.experts, "fetched_bytes_per_token": token.fetched}
            facts["bound_by"] = took.bound_by
            if token.moved != 0:
                moving = while_moving(took, token, found, threads(), processors())
                facts["moving_tokens_per_second"] = moving.tokens_per_second
    return Planned(
        str(bundle.path),
        str(parsed),
        options.device,
        decided is not None,
        budget,
        fixed.total,
        fixed,
        least,
        used,
        workload.kv_tokens,
        workload.batch,
        workload.prefill_tokens,
        workload.all_logits,
        needs.kv.token_bytes,
        cached,
        host,
        layers,
        estimated,
        bandwidth=bandwidth,
        message=message,
        kv=workload.kv,
        **facts,
    )


def _with_best_cache(bundle: Bundle, options: LoadOptions, limit: ProcessLimit | None, on_gpu: bool) -> Planned:
    """Return the plan with the form of cache that loading chooses, and what was compared."""
    from moepack.runtime.planning.decided import best_cache

    weighed: dict[str, Planned] = {}

    def experts_lose(form: str) -> float:
        asked = replace(options, kv=form, kv_tokens=options.kv_tokens or CONTEXT)
        made = _planned(bundle, asked, limit, on_gpu)
        if any(made.kv_bytes_per_token == other.kv_bytes_per_token for other in weighed.values()):
            raise InputError(f"kv={form}: the model has no such cache")  # latents have one form of fewer bits
        weighed[form] = made
        if made.expected_relative_loss is None:
            raise InputError(made.message or "")
        return made.expected_relative_loss

    best = best_cache([PLAIN_KV] if on_gpu else FORMS, experts_lose)
    caches = tuple(
        CachePlan(form, made.fixed.kv, made.expected_relative_loss, LOSS[form]) for form, made in weighed.items()
    )
    form = best if best in weighed else next(reversed(weighed), PLAIN_KV)  # of those that the model can have
    made = weighed.get(form)
    if made is None or not options.kv_tokens:
        made = _planned(bundle, replace(options, kv=form), limit, on_gpu)
    return replace(made, caches=caches)


def _check_device(device: str) -> bool:
    """Return whether a device that need not be here is a GPU. Raises InputError for a name of no device."""
    if device == "cpu":  # without importing torch
        return False
    import torch

    from moepack.runtime.devices import torch_cuda

    try:
        return torch_cuda.is_gpu(torch.device(device))
    except RuntimeError:
        raise InputError(f"device {device}: {meant_device(device)}torch knows no such name") from None


def _limit(bundle: Bundle, options: LoadOptions) -> ProcessLimit:
    """Divide a memory limit as a process does that loads the model: with the same libraries, and a skeleton made."""
    import moepack.runtime.plugin  # noqa: F401
    from moepack.runtime.planning.measured import served_config
    from moepack.runtime.planning.skeleton import skeleton
    from moepack.runtime.process_limit import limit_of, measured

    config = served_config(bundle, options)
    skeleton(config, config.dtype)
    return limit_of(options, measured())


def _cap(bundle: Bundle, whole: Sequence[Version], policy: Policy, table: Versions, free: int) -> str | None:
    """Say in one line what keeps all experts at one version, if `free` bytes hold one of them at the next better one.

    Of the versions `whole`, a bound on what a token takes has left those of `bundle`.
    """
    placements = {name for row in table for name in row}
    names = [v.name for v in whole]
    number = names.index(name) if len(placements) == 1 and (name := placements.pop()) in names else 0
    if not policy.is_live or not number:
        return None
    better = whole[number - 1]
    if any(placement.version == better for ladder in policy.options.ladders(bundle.versions) for placement in ladder):
        return None  # it raises experts once it has seen traffic
    layers = bundle.layers
    if free < max(better.resident_size(x.matrices) - whole[number].resident_size(x.matrices) for x in layers):
        return None
    left = f"serves nothing above {name}, and {size(free, 2)} stay free"
    if better not in bundle.versions:
        return f"the bound on a token {left}"
    return f"{policy} {left}" + (f": hi={better.name} lets it" if "hi" in policy.entry.keys else "")


def _layer(bundle: Bundle, position: int, row: tuple[str, ...], order: list[str]) -> LayerPlan:
    counts = {name: row.count(name) for name in order}
    return LayerPlan(
        bundle.layers[position].index, counts[order[0]], len(row) - counts[order[0]], order[0], order[-1], counts
    )


def _experts_read(bundle: Bundle, tables: CalibrationTables, table: Versions, chosen: int) -> float:
    total = 0.0
    for layer, described, row in zip(tables.layers, bundle.layers, table, strict=True):
        tokens = [float(n) + 1 for n in layer.tokens]
        here = {name: version_name(name) for name in set(row)}
        size = {n: bundle.manifest.version(v).resident_size(described.matrices) if v else 0 for n, v in here.items()}
        total += chosen * sum(n * size[name] for n, name in zip(tokens, row, strict=True)) / sum(tokens)
    return total


def as_json(planned: Planned) -> dict[str, object]:
    """Return the plan's fields for JSON."""
    return {name: value for name, value in asdict(planned).items() if name not in ("table", "moving")}


def rows(planned: Planned) -> list[tuple[str, str]]:
    """Return names and texts, with units, of what was planned, and of its memory, loss and speed."""
    sized = partial(size, places=2)
    fixed = planned.fixed
    parts = (
        ("dense tensors", fixed.dense),
        ("KV cache", fixed.kv),
        ("activations, estimated from shapes" if planned.estimated else "activations", fixed.activations),
        ("staging", fixed.staging),
        ("slots in which experts are decoded", fixed.window),
        ("page entries of pinned memory", fixed.entries),
        ("experts", planned.used_bytes - fixed.total),
    )
    pinned = f", and {sized(planned.pinned_bytes)} of pinned memory" if planned.pinned_bytes else ""
    longest = f"{planned.kv_tokens_most:,} tokens of {planned.kv_bytes_per_token:,} bytes, with experts at their least"
    if planned.context is not None and planned.context <= planned.kv_tokens_most:
        longest = f"{planned.context:,} tokens, the model's longest context"
    elif planned.kv_tokens_most == MOST:
        longest = "of any length"
    error = planned.expected_relative_loss_error
    found = [("bundle", planned.bundle), ("policy", planned.policy), ("workload", asked(planned))]
    if planned.beside is not None and planned.memory_limit_bytes is not None:
        most = f"at most {sized(planned.process_bytes_peak or 0)} of {sized(planned.memory_limit_bytes)}"
        beside = planned.beside.described(planned.budget_bytes, sized)
        found.append(("process", f"{most}: {sized(planned.budget_bytes)} budget, {beside}"))
    found += [(name, sized(taken)) for name, taken in parts if taken]
    found += [
        ("used", f"{sized(planned.used_bytes)} of {sized(planned.budget_bytes)}"),
        ("least that would do", f"{sized(planned.least_bytes)}: {planned.least_bytes:,} bytes"),
        ("longest KV cache", longest),
        ("files of these versions", f"{sized(planned.host_bytes)}{pinned}"),
        ("expected relative loss", shown_loss(planned.expected_relative_loss or 0.0, error)),
        ("a token reads", sized(planned.bytes_per_token or 0)),
        ("speed", _speed(planned)),
    ]
    return found if planned.capped is None else [*found, ("not bound by memory", planned.capped)]


def _speed(planned: Planned) -> str:
    rate = planned.expected_tokens_per_second
    took = planned.seconds_per_token
    if rate is None or planned.bandwidth is None:
        return f"known on a machine with {planned.device}"
    if took is None:
        return f"at most {rate:,.0f} tokens/s, at the {size(planned.bandwidth)}/s measured here"
    shares = ((took.memory, "reading memory"), (took.processor, "the processor"), (took.disk, "the disk"))
    spent = ", ".join(f"{1000 * seconds:.1f} ms {name}" for seconds, name in shares if seconds)
    moving = planned.moving_tokens_per_second
    moves = "" if moving is None else f"; {moving:,.1f} while experts move to other versions"
    return f"{rate:,.1f} tokens/s, bound by {planned.bound_by}: {spent}{moves}"


def render(planned: Planned) -> Group:
    """Make two tables: experts by layer, in which layers with equal numbers share a row, and `rows`."""
    from rich.console import Group
    from rich.table import Table

    names = planned.per_layer[0].versions if planned.per_layer else {}
    table = Table("layers")
    for name in names:
        table.add_column(f"at {name}" if version_name(name) else name, justify="right")
    for _, group in groupby(planned.per_layer, key=lambda x: (x.hi, x.lo, *x.versions.items())):
        alike = list(group)
        first = alike[0].layer
        last = alike[-1].layer
        counts = [f"{count:,}" if count else "" for count in alike[0].versions.values()]
        table.add_row(str(first) if first == last else f"{first}-{last}", *counts)
    facts = Table(box=None, show_header=False)
    for name, text in rows(planned):
        facts.add_row(name, text)
    if not planned.caches:
        return Group(table, facts)
    caches = Table("--kv", title="KV cache")
    for name in ("bytes", "experts lose", "the cache loses", "together"):
        caches.add_column(name, justify="right")
    for form in planned.caches:
        lost = form.experts_loss
        together = "does not fit" if lost is None else shown_loss(lost + form.cache_loss, None)
        experts = "" if lost is None else shown_loss(lost, None)
        cells = (size(form.cache_bytes, 2), experts, shown_loss(form.cache_loss, None), together)
        caches.add_row(form.kv + ("  chosen" if form.kv == planned.kv else ""), *cells)
    return Group(table, facts, caches)


def asked(work: Workload | Planned) -> str:
    """Describe a workload in words."""
    sequences = f"{work.batch:,} sequence{'s' * (work.batch > 1)}"
    logits = "all logits" if work.all_logits else "the last token's logits"
    return f"{sequences} of {work.kv_tokens:,} cached tokens, passes of {work.prefill_tokens:,} tokens and {logits}"
