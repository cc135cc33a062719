"""What a build will take, without making anything: bytes exactly, memory and time from a probe.

Every expert goes through the lossless codec, because only that tells how long it gets; everything else is arithmetic,
one batch through the first layers, and one expert through the quantiser.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.memory import bound_kernel_caches, give_back, resident_memory
from moepack.pack.layer_file import header_size
from moepack.pack.spec import LOSSLESS, affine_extent_size
from moepack.progress import Reporter
from moepack.reports.doctor import disk_rates

from .allocate import check_allocation
from .expert_batch import GroupTask, bare, lossless_extent, make_group
from .recipe import Recipe, load_recipe

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a build will take.

    Attributes:
        versions: bytes of each version's files, exact.
        dense_bytes: bytes of all other tensors, exact.
        work_bytes: the most the work directory will hold beside the bundle, about.
        memory: what will be in memory at once by part, about, in bytes; the peak is their sum.
        seconds: what will take how long, about.
        experts: how many, and in how many layers.
        layers: layers that have experts.
    """

    versions: dict[str, int]
    dense_bytes: int
    work_bytes: int
    memory: dict[str, int]
    seconds: dict[str, float]
    experts: int
    layers: int


def estimate(
    checkpoint: str | Path,
    output: str | Path,
    recipe: str | Recipe = "default",
    calibration: Sequence[str | Path] = (),
    device: str = "cpu",
    reporter: Reporter | None = None,
) -> Estimate:
    """What `moepack.build` with these arguments will take. Writes a probe beside `output`, and removes it.

    Raises:
        MoepackError: what the build itself would raise before it begins.
    """
    bound_kernel_caches()
    import torch

    from moepack.calibrate import data
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.forward import CalibrationPass
    from moepack.calibrate.quantise_layer import Settings, expert_groups, group_memory
    from moepack.calibrate.stream import StreamedModel

    reporter = reporter or Reporter()
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    with reporter.hub_bars():
        opened = open_checkpoint(checkpoint)
    stream = StreamedModel(opened, device)
    how, q = recipe.calibration, recipe.quantize
    versions = recipe.version_specs()
    descriptors = list(stream.expert_layers.values())
    check_allocation(recipe.allocation, descriptors, versions)
    sources = [str(s) for s in calibration] or list(how.data)
    limit = getattr(opened.config.get_text_config(), "max_position_embeddings", None) or how.length
    length = min(how.length, limit)
    ids = data.calibration_windows(sources, data.load_tokenizer(opened.path), how.samples, length, how.seed).ids
    base = resident_memory()
    dtype = getattr(torch, how.dtype)

    reporter.stage("dry run", len(stream.layers) + 2)
    reporter.step("outside the layers")
    seconds = {"read": 0.0, "calibrate": 0.0, "quantise": 0.0, "encode": 0.0, "write": 0.0}
    walk = CalibrationPass(stream, ids[: how.batch_size], how.batch_size, dtype)
    began = time.perf_counter()
    dense_bytes = _bytes(stream.load(None))
    seconds["read"] += time.perf_counter() - began
    rest_bytes = dense_bytes
    stream.to_compute(None, dtype)
    walk.start()
    stream.free(None)

    sizes = {v.name: sum(header_size(v.name, layer) for layer in descriptors) for v in versions}
    for v in versions:
        if not v.is_lossless:
            sizes[v.name] += sum(layer.experts * affine_extent_size(layer.matrices, v) for layer in descriptors)
    probed, walking, forward, largest = 0.0, True, 0.0, 0
    for i in range(len(stream.layers)):
        reporter.step(f"layer {i}")
        began = time.perf_counter()
        tensors = stream.load(i)
        seconds["read"] += time.perf_counter() - began
        largest = max(largest, _bytes(tensors))
        dense, experts = stream.split(i, tensors)
        dense_bytes += _bytes(dense)
        if walking:
            stream.to_compute(i, dtype)
            began = time.perf_counter()
            observation = walk.run_layer(i)
            forward = time.perf_counter() - began
            if observation is not None and experts is not None:
                walking = False
                affine = tuple(v for v in versions if not v.is_lossless)
                settings = Settings(q.method, affine, q.min_tokens, q.loss_tokens, q.moments)
                task = GroupTask(
                    bare(stream.experts_module(i)), experts.select(range(1)), i, range(1), affine, settings,
                    str(stream.device), torch.get_num_threads(),
                )  # fmt: skip
                probed = _probe(task, observation, ids.numel(), experts.layer.experts)
        stream.free(i)
        if experts is not None and LOSSLESS in sizes:
            began = time.perf_counter()
            sizes[LOSSLESS] += _lossless_bytes(experts, reporter)
            seconds["encode"] += time.perf_counter() - began
        del tensors, dense, experts
        give_back()
    reporter.step("disk")
    count = sum(layer.experts for layer in descriptors)
    batches = -(-len(ids) // how.batch_size)
    seconds["calibrate"] = forward * batches * len(stream.layers)
    seconds["quantise"] = probed * count
    parent = Path(output).absolute().parent
    while not parent.exists():
        parent = parent.parent
    rate = disk_rates(parent).get("write_bytes_per_second", 0.0)
    layer_bytes = sum(sizes.values()) // len(descriptors)
    hidden = ids.numel() * stream.model.config.get_text_config().hidden_size * dtype.itemsize
    seconds["write"] = (2 * sum(sizes.values()) + 2 * dense_bytes + hidden * len(stream.layers)) / rate if rate else 0.0
    settings = Settings(q.method, tuple(v for v in versions if not v.is_lossless))
    memory = {
        "process": base,
        "layer": max(largest, rest_bytes),
        "activations": 2 * hidden,  # what goes into the next layer, and what this layer's experts saw
        "group": max(
            group_memory(layer, settings) * max(len(g) for g in expert_groups(layer, settings)) for layer in descriptors
        ),
    }
    work_bytes = sum(sizes.values()) + dense_bytes + hidden + layer_bytes
    return Estimate(sizes, dense_bytes, work_bytes, memory, seconds, count, len(descriptors))


def _bytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _lossless_bytes(experts: ExpertWeights, reporter: Reporter) -> int:
    """Bytes of a layer's lossless extents."""
    total = 0
    reporter.inner("experts", experts.layer.experts)
    for e in range(experts.layer.experts):
        total += len(lossless_extent(experts, e)[0])
        reporter.advance()
    return total


def _probe(task: GroupTask, observation: Observation, tokens: int, experts: int) -> float:
    """Seconds for one expert that sees its share of `tokens` tokens, the observed ones over and over."""
    import torch

    share = max(1, tokens * observation.experts.shape[1] // experts)
    at = torch.arange(share) % len(observation.inputs)
    seen = replace(
        observation,
        inputs=observation.inputs[at],
        experts=torch.zeros(share, 1, dtype=torch.int32),
        gates=observation.gates[at, :1],
    )
    times = []
    for _ in range(2):  # the first loads and compiles what the quantisers need
        began = time.perf_counter()
        make_group(task, seen)
        times.append(time.perf_counter() - began)
    return times[-1]


def render(e: Estimate) -> Any:
    """The estimate as a table."""
    from rich.table import Table

    table = Table("what", "how much", title=f"a build of {e.experts} experts in {e.layers} layers")
    for name, size in e.versions.items():
        table.add_row(f"{name}, bytes", f"{size:,}")
    table.add_row("dense tensors, bytes", f"{e.dense_bytes:,}")
    table.add_row("bundle, bytes", f"{sum(e.versions.values()) + e.dense_bytes:,} and its tables")
    table.add_row("work directory, at most about", f"{e.work_bytes / 2**30:,.1f} GiB more")
    for part, size in e.memory.items():
        table.add_row(f"memory, {part}", f"{size / 2**20:,.0f} MiB")
    table.add_row("memory, peak about", f"{sum(e.memory.values()) / 2**20:,.0f} MiB")
    for part, took in e.seconds.items():
        table.add_row(f"time, {part}", f"{took:,.1f} s")
    table.add_row("time, all about", _duration(sum(e.seconds.values())))
    return table


def _duration(seconds: float) -> str:
    return (
        f"{seconds:,.0f} s"
        if seconds < 120
        else f"{seconds / 60:,.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:,.1f} h"
    )
