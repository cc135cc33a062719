"""A generated model served in a budget: promotions, and whether bytes and replayed graphs are right after them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

import moepack
from benchmarks.common import Row, least_budget
from benchmarks.decoding import Reading
from benchmarks.limited.shapes import SHAPES, Shape
from moepack.families.arguments import with_cache
from moepack.pack.reader import open_bundle
from moepack.runtime.devices import cuda
from moepack.runtime.policies.contract import Key
from moepack.runtime.store.files import BackingStore

from .bundles import made_bundle, sized
from .rows import Entry, Measured, Rows, Setting, Skipped

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, StaticCache

    from moepack.runtime.residency.manager import ResidencyManager
    from moepack.runtime.served_model import ServedModel

DEEP = SHAPES["deep"]  # 48 layers, small experts
WIDE = Shape("wide", 1, 128, 8, 2048, 768, 32, 4, 128, 2400, 1)  # one layer of Qwen3-30B-A3B's experts
POLICY = "hotness:hi=w4,lo=w2,between=no,prior=none,interval=1e9,rate=0,margin=0,slack=0"
SLOTS = (1, 2, 8)  # copies under way
T = TypeVar("T")
SPARE = 8  # experts that are left at the low version, with room for a KV reserve
# seconds for transitions to end, and without any that are taken for the end
PATIENCE = 120.0
QUIET = 0.3


def rows(setting: Setting) -> Rows:
    """The stage's rows."""
    out = {"generated bundles": Entry(lambda: bundles(setting), on_cpu=True)}
    for n in SLOTS:
        out[f"promotions, {n} slot{'s' * (n > 1)}"] = Entry(partial(promotions, setting, n))
    out["1,000 promotions: wrong extents"] = Entry(lambda: checked(setting), on_cpu=True)
    out["graph, replayed after promotions"] = Entry(lambda: replayed(setting))
    return out


def bundles(setting: Setting) -> Measured:
    """Seconds to generate the bundles."""
    began = time.perf_counter()
    for shape in (DEEP, WIDE):
        made_bundle(setting, shape)
    return Measured(time.perf_counter() - began, "s")


# --- copies


def promotions(setting: Setting, slots: int) -> Measured:
    """Extents a second that come from pinned memory into blocks, with so many fetches under way."""
    bundle = open_bundle(made_bundle(setting, WIDE))
    store = BackingStore(bundle)
    version = bundle.manifest.version("w4")
    layer = bundle.layers[0]
    stored = [store.stored("w4", 0, e) for e in range(layer.experts)]
    size = max(s.size for s in stored)
    count = 16 if setting.small else 1024
    device = cuda.open_cuda(store, ["w4"], setting.torch, size, 0, slots, lambda: None, None)
    try:
        device.serve()
        if device.pinned is not None:
            device.pinned.filled.wait(60)
        room = device.memory(len(stored) * size)
        room.take(0, len(stored) * size)
        targets = [room.tensor[i * size : (i + 1) * size] for i in range(len(stored))]
        began = time.perf_counter()
        for first in range(0, count, len(stored)):
            some = range(min(len(stored), count - first))
            events = [device.fetch(partial(_same, stored[i]), targets[i], layer, version) for i in some]
            for event in events:
                event.wait()
                if event.error is not None:
                    raise event.error
        took = time.perf_counter() - began
        mode = device.host()["mode"]
    finally:
        device.close()
        store.close()
    more = {"GB/s": count * size / took / 1e9, "MB each": size / 1e6, "host memory": mode}
    return Measured(count / took, "a second", more=more)


def _same(stored: T) -> T:
    return stored


# --- a served model


def _options(setting: Setting) -> Row:
    return {"policy": POLICY, "device": setting.device, "kv_tokens": 256, "prefill_tokens": 32, "all_logits": True}


def _room(setting: Setting) -> float:
    """Bytes that all experts take more at the high version."""
    return sized(setting, DEEP).expert_weights * (4.375 - 2.375) / 8


@lru_cache(1)
def _least(setting: Setting) -> int:
    """The least budget, and what promotions leave free in it."""
    path = made_bundle(setting, DEEP)
    least = least_budget(lambda memory: moepack.load(path, device_memory=memory, **_options(setting)))
    whole = moepack.load(path, device_memory=round(least + _room(setting)), **_options(setting))
    manager = whole.moepack.manager
    assert manager is not None
    reserve = manager.plan.reserve  # which promotions do not use
    whole.moepack.close()
    return least + reserve


@contextlib.contextmanager
def served(setting: Setting) -> Iterator[ServedModel]:
    """The deep model in a budget with room for half of its experts at the high version."""
    budget = round(_least(setting) + _room(setting) / 2)
    model = moepack.load(made_bundle(setting, DEEP), device_memory=budget, **_options(setting))
    try:
        yield model
    finally:
        model.moepack.close()


def _halves(live: ResidencyManager) -> list[dict[Key, int]]:
    keys = list(live.residency.entries)
    spare = min(SPARE, len(keys) // 8)
    return [dict.fromkeys(keys[i::2][:-spare], 0) for i in range(2)]


def _settle(live: ResidencyManager) -> None:
    """Wait until nothing is under way, and nothing has changed for a while: what has no room waits for ever."""
    ends = time.monotonic() + PATIENCE
    counts = live.residency.counts
    seen = None
    since = time.monotonic()
    while time.monotonic() - since < QUIET:
        if time.monotonic() > ends:
            raise TimeoutError(f"transitions did not end in {PATIENCE:g} s")
        live.worker.wake()
        time.sleep(0.005)
        now = (counts.promotions, counts.demotions, len(live.residency.flying), len(live.residency.ready))
        if now != seen or now[2] or now[3]:
            seen = now
            since = time.monotonic()


def _steps(model: PreTrainedModel, setting: Setting, steps: int) -> None:
    """Read a prompt, and decode so many tokens."""
    with torch.inference_mode():
        run = Reading(model)
        run(torch.ones(1, 16, dtype=torch.long, device=setting.torch))
        for step in range(steps):
            run(torch.full((1, 1), 5 + step, device=setting.torch))[0, -1, 0].item()


def checked(setting: Setting) -> Measured:
    """Extents that are not the bundle's bytes after so many promotions, with passes between them."""
    wanted = 4 if setting.small else 1000
    with served(setting) as model:
        live = model.moepack.manager
        assert live is not None
        bundle = model.moepack.bundle
        halves = _halves(live)
        wrong = 0
        looked = 0
        began = time.monotonic()
        while live.residency.counts.promotions < wanted and time.monotonic() - began < PATIENCE:
            halves.reverse()
            live.transitions.want(halves[0])
            _steps(model, setting, 1)
            _settle(live)
            if setting.on_gpu:
                torch.cuda.synchronize()
            for p, layer in enumerate(live.layers):
                for e, handle in enumerate(layer.current.handles):
                    assert handle.version is not None
                    extent = bundle.extent(handle.version.name, p, e)
                    got = handle.extent.cpu().numpy()
                    looked += 1
                    wrong += not np.array_equal(got[: len(extent)], extent[: len(got)])
        done = live.residency.counts.promotions
        if done < wanted:
            raise TimeoutError(f"{done} of {wanted} promotions in {PATIENCE:g} s")
    return Measured(wrong, "extents", limit=0, more={"promotions": done, "extents looked at": looked})


# --- the runtime's own graphs


@contextlib.contextmanager
def captures() -> Iterator[list[str]]:
    """What the runtime's log says of graphs inside."""
    said = list[str]()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "CUDA graph" in record.getMessage():
                said.append(record.getMessage())

    log = logging.getLogger("moepack.runtime")
    keep = Keep(logging.INFO)
    level = log.level
    log.addHandler(keep)
    log.setLevel(logging.INFO)
    try:
        yield said
    finally:
        log.removeHandler(keep)
        log.setLevel(level)


def _decode(model: PreTrainedModel, cache: StaticCache, setting: Setting, steps: int, graphs: bool = True) -> Tensor:
    """The last logits of steps after a prompt, in a cache that is emptied first."""
    cache.reset()
    out: Tensor | None = None
    with torch.set_grad_enabled(not graphs):  # a pass that may have gradients is not captured
        model(torch.ones(1, 4, dtype=torch.long, device=setting.torch), use_cache=True, **with_cache(model, cache))
        for step in range(steps):
            ids = torch.full((1, 1), 5 + step, device=setting.torch)
            out = model(ids, use_cache=True, **with_cache(model, cache)).logits.detach()
    assert out is not None
    return out


def replayed(setting: Setting) -> Measured:
    """The greatest difference of logits between a replay after promotions and the same step launched one by one."""
    from transformers import StaticCache

    with captures() as said, served(setting) as model:
        cache = StaticCache(config=model.config, max_cache_len=128)
        _decode(model, cache, setting, 6)
        if not any("is now" in text for text in said):
            raise Skipped(said[-1] if said else "the runtime captured no graph")
        live = model.moepack.manager
        assert live is not None
        before = live.residency.counts.promotions
        live.transitions.want(_halves(live)[0])
        _settle(live)
        got = _decode(model, cache, setting, 3)
        want = _decode(model, cache, setting, 3, graphs=False)
        more = {"promotions": live.residency.counts.promotions - before, "log": said}
        return Measured(float((got - want).abs().max()), "logits", limit=0.0, more=more)
