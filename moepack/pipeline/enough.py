"""Find how many calibration windows give every expert enough tokens, and which experts have too few.

A layer's routing depends on all layers before it, and a build quantises a layer before it knows the next one's routing.
So a pass of its own first counts the tokens of every window and expert. It reads the checkpoint once more, and computes
as much as a calibration with `most` windows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from moepack.pack.tables import FEW_TOKENS
from moepack.pack.writer import replace_file
from moepack.runtime.devices.glibc import reusing, trim
from moepack.shared.progress import Reporter

from .work import WorkDirectory

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moepack.calibrate.forward import CalibrationPass
    from moepack.calibrate.stream import StreamedModel
    from moepack.calibrate.text.windows import Windows

    from .bound import MemoryPlan
    from .recipe import Calibration

_FILE = "windows.json"


def enough_windows(
    directory: WorkDirectory,
    stream: StreamedModel,
    windows: Windows,
    how: Calibration,
    identity: Mapping[str, str],
    plan: MemoryPlan,
    reporter: Reporter,
) -> Windows:
    """Return the fewest windows, at least `how.samples`, that give every expert `how.until` tokens, or else all.

    Windows are added in the order in which they were taken, so that the mixture of sources stays. The work directory
    keeps the count, so that a resumed build takes the same windows. `identity`: the digests of the checkpoint's files.
    """
    if not how.until or len(windows.ids) <= how.samples:
        return windows
    facts = [windows.digest, how.samples, how.until, how.batch_size, how.dtype, str(stream.device), dict(identity)]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    file = directory.path / _FILE
    known = directory.read(file) or {}
    if known.get("key") != key:
        count, short = _count(directory, stream, windows, how, plan, reporter)
        known = {"key": key, "windows": count, "short": short}
        replace_file(file, json.dumps(known).encode())
    what = f"calibration takes {known['windows']} windows"
    if known["short"]:
        reporter.note(f"{what}, the most: {known['short']} experts still have fewer than {how.until} tokens")
    else:
        reporter.note(f"{what}: every expert has {how.until} tokens")
    return windows.first(known["windows"])


def _count(
    directory: WorkDirectory,
    stream: StreamedModel,
    windows: Windows,
    how: Calibration,
    plan: MemoryPlan,
    reporter: Reporter,
) -> tuple[int, int]:
    """Run all windows; return how many of them to take, and how many experts get too few tokens even from all."""
    dtype = how.torch_dtype
    last = max(stream.expert_layers)
    stream.experts_in = directory.path if plan.experts_on_disk else None
    walk = open_pass(directory, stream, windows.ids, plan, dtype)
    reporter.stage("count tokens", last + 2)
    reporter.step("outside the layers")
    stream.load(None)
    stream.to_compute(None, dtype)
    walk.start()
    stream.free(None)
    wanted = how.samples
    short = 0
    for i in range(last + 1):
        reporter.step(f"layer {i}")
        stream.load(i)
        stream.to_compute(i, dtype)
        reporter.inner("tokens", windows.ids.numel())
        observation = walk.run_layer(i, reporter.advance)
        stream.free(i)
        if observation is not None:
            experts = stream.expert_layers[i].experts
            count, few = windows_until(observation.experts, len(windows.ids), experts, windows.turns, how.until)
            wanted = max(wanted, count)
            short = short + few
        del observation
        trim()
    return wanted, short


def open_pass(
    directory: WorkDirectory, stream: StreamedModel, ids: Tensor, plan: MemoryPlan, dtype: torch.dtype
) -> CalibrationPass:
    """Open a calibration pass as the memory plan says. What does not stay in memory goes to the work directory."""
    from moepack.calibrate.forward import CalibrationPass

    hidden_in, seen_in = (directory.path if it else None for it in (plan.hidden_on_disk, plan.seen_on_disk))
    between = reusing if plan.reuse else contextlib.nullcontext
    return CalibrationPass(stream, ids, plan.batch_size, dtype, hidden_in, seen_in, between)


def windows_until(chosen: Tensor, windows: int, experts: int, turns: Tensor, until: int) -> tuple[int, int]:
    """Return the fewest windows that give each expert of a layer `until` tokens, and how many get fewer from all.

    `chosen`: int32 [tokens, top_k], the chosen experts; tokens are in the order of the windows, which have one length.
    `turns`: int64 [windows], each window's position in the order in which windows are added.
    """
    import torch

    window = torch.arange(windows).repeat_interleave(chosen.numel() // windows)
    wide = experts + 1  # the last counts choices that stand for no expert
    counts = torch.bincount(window * wide + chosen.flatten().long(), minlength=windows * wide)
    running = counts.view(windows, wide)[:, :experts][turns.argsort()].cumsum(0)
    missing = (running < until).sum(0)  # windows after which an expert still has too few
    short = int((missing == windows).sum())
    return (windows if short else int(missing.max()) + 1), short


def few_tokens(directory: WorkDirectory, stream: StreamedModel) -> dict[int, int]:
    """Layer -> the number of experts with fewer than FEW_TOKENS calibration tokens, where it is not 0."""
    from safetensors import safe_open

    out = {}
    for i in stream.expert_layers:
        with safe_open(directory.piece("calibrate", i, "statistics.safetensors"), framework="pt") as f:
            if n := int((f.get_tensor("tokens") < FEW_TOKENS).sum()):
                out[i] = n
    return out


def advice(few: Mapping[int, int], experts: int) -> str:
    """Make the message about experts with few tokens; empty if there are none."""
    if not few:
        return ""
    worst = max(few, key=lambda i: few[i])
    return (
        f"{sum(few.values()):,} of {experts:,} experts were reached by fewer than {FEW_TOKENS} tokens (most of them in "
        f"layer {worst}: {few[worst]}): their losses are estimated from their layers. Add text like the model's future "
        "input, or samples, or calibration: {until: 256}"
    )
