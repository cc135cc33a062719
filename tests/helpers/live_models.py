"""Models served in a budget whose versions change: how tests load them, run them and wait for them."""

import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support import PATIENCE, at_once, load_for_logits
from transformers import AutoModelForCausalLM

from benchmarks.common import least_budget
from moepack.pack.reader import open_bundle
from moepack.runtime.planning.plan import Plan

FAST = "hotness:hi=bf16,lo=w2,between=no,prior=none,interval=0.02,rate=0,margin=0,slack=0"
_loaded: list[weakref.ref[Any]] = []
ROOM = 1_900_000  # for three quarters of the experts at bf16, beside all at w2


def least(bundle: Path, policy: str = FAST, **options) -> int:
    """The smallest budget that would do."""
    return least_budget(lambda budget: load(bundle, policy, budget, **options))


def load(bundle: Path, policy: str = FAST, budget: int | None = None, room: int = ROOM, **options):
    """A model; without a budget given, in the smallest and so much room."""
    if budget is None:
        budget = least(bundle, policy, **options) + room
    made = load_for_logits(bundle, policy=policy, device_memory=budget, **options)
    _loaded.append(weakref.ref(made.moepack))
    return made


def close_all():
    """Close every model that `load` made."""
    while _loaded:
        if (serving := _loaded.pop()()) is not None:
            serving.close()


def logits(model, tokens: torch.Tensor, **given) -> torch.Tensor:
    """Of a pass, without a cache unless one is given."""
    with torch.inference_mode():
        return model(tokens, **{"use_cache": False, **given}).logits


def run(model, seed: int) -> torch.Tensor:
    """Logits of a pass of as many tokens as a budget has room for, without a cache."""
    return logits(model, ids(seed, 512))


def same(model, of, *sizes: int):
    """Check that passes of so many tokens give the bits of another model, or these logits by size."""
    for n in sizes:
        want = of[n] if isinstance(of, dict) else logits(of, ids(n, n))
        assert torch.equal(logits(model, ids(n, n)), want), n


def same_at_once(model, of, sizes: tuple[int, ...], threads: int, rounds: int):
    """Check the same on threads, each of which begins at another size."""
    at_once(lambda seed: same(model, of, *(sizes[(seed + i) % len(sizes)] for i in range(rounds))), threads)


def at(model, name: str) -> int:
    """How many experts are in a placement."""
    return sum(row.count(name) for row in model.moepack.versions)


def stop_after(patch: pytest.MonkeyPatch, owner, name: str, calls: int, error: type[BaseException] = KeyboardInterrupt):
    """Raise at the end of a function's call of this number."""
    real, number = getattr(owner, name), itertools.count(1)

    def stops(*args):
        out = real(*args)
        if next(number) == calls:
            raise error("stopped")
        return out

    patch.setattr(owner, name, stops)


def ids(seed: int, size: int = 64, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, 4000, (batch, size), generator=torch.Generator().manual_seed(seed))


def wait_for(what: Callable[[], bool], model=None):
    """Serve, by a model or a function, until something has come about."""
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end, "it did not come about"
        if isinstance(model, torch.nn.Module):
            run(model, int(1000 * time.monotonic()))
        elif model is not None:
            model()
        time.sleep(0.005)


def check_exact(model, bundle: Path) -> int:
    """Every active version is what the bundle holds, bit by bit; returns how many are lossless."""
    opened, lossless = open_bundle(bundle), 0
    for position, layer in enumerate(model.moepack.layers):
        for e, handle in enumerate(layer.current.handles):
            if handle.version is None:  # absent
                continue
            extent = opened.extent(handle.version.name, position, e)
            if handle.version.plain:
                lossless += 1
                for m, want in enumerate(handle.version.decode(layer.of.layer.matrices, extent)):
                    got = layer.current.weight(e, m, torch.bfloat16).view(torch.uint16)
                    assert torch.equal(got, torch.from_numpy(want.weight))
            else:
                assert torch.equal(handle.extent, torch.from_numpy(extent.copy()))
    return lossless


def plain_twin(model, checkpoint: Path):
    """transformers' own model, in float32, with the very weights that a model serves."""
    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for layer, experts in zip(model.moepack.bundle.layers, model.moepack.layers, strict=True):
        module = plain.get_submodule(layer.module)
        for e in range(layer.experts):
            module.gate_up_proj.data[e] = experts.current.weight(e, 0, torch.float32)
            module.down_proj.data[e] = experts.current.weight(e, 1, torch.float32)
    return plain


def ours() -> set[threading.Thread]:
    """The runtime's threads."""
    return {t for t in threading.enumerate() if t.name.startswith("moepack-")}


def rooms(plan: Plan, kv: int = 0) -> list[int]:
    """How many experts of each layer fit at the best version."""
    return [n // (row[0] - row[-1]) for n, row in zip(plan.capacity(kv), plan.growing(), strict=True)]


def _extent(model, expert: int, layer: int) -> torch.Tensor:
    found: torch.Tensor = model.moepack.layers[layer].current.handles[expert].extent
    return found


@contextlib.contextmanager
def hurt_expert(model, expert: int, layer: int) -> Iterator[None]:
    """Every weight of an expert that is served at bf16 is NaN inside the context."""
    extent = _extent(model, expert, layer)
    before = extent.clone()
    extent.fill_(0xFF)
    try:
        yield
    finally:
        extent.copy_(before)


def hurt_when_loaded(monkeypatch: pytest.MonkeyPatch, module: ModuleType):
    """From now on, an expert of each model that a module loads is NaN; its bundle stays as it is."""
    load = module.load_model

    def hurting(*given):
        model = load(*given)
        _extent(model, 5, 1).fill_(0xFF)
        return model

    monkeypatch.setattr(module, "load_model", hurting)
