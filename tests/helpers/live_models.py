"""Models served in a budget whose versions change: how tests load them, run them and wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import moepack
from moepack.pack.errors import InputError
from moepack.runtime.planning.plan import Plan

FAST = "hotness:hi=bf16,lo=w2,between=no,prior=none,interval=0.02,rate=0,margin=0,slack=0"
ROOM = 1_900_000  # for three quarters of the experts at bf16, beside all at w2


def least(bundle: Path, policy: str = FAST, **options: Any) -> int:
    """The smallest budget that would do."""
    with pytest.raises(InputError, match=r"the least that would do is \d+ bytes") as refused:
        load(bundle, policy, 1000, **options)
    return int(str(refused.value).split("do is ")[1].split()[0])


def load(bundle: Path, policy: str = FAST, budget: int | None = None, **options: Any) -> Any:
    """A model; without a budget given, one with `ROOM`."""
    if budget is None:
        budget = least(bundle, policy, **options) + ROOM
    return moepack.load(bundle, policy=policy, device_memory=budget, **options)


def run(model: Any, seed: int) -> torch.Tensor:
    """Logits of a pass of as many tokens as a budget has room for, without a cache."""
    with torch.inference_mode():
        return model(ids(seed, 512), use_cache=False).logits


def ids(seed: int, size: int = 64, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, 4000, (batch, size), generator=torch.Generator().manual_seed(seed))


def wait_for(what: Callable[[], bool], model: Any = None, seconds: float = 20.0) -> None:
    """Serve until something has come about."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come about"
        if model is not None:
            run(model, int(1000 * time.monotonic()))
        time.sleep(0.005)


def ours() -> set[threading.Thread]:
    """The runtime's threads."""
    return {t for t in threading.enumerate() if t.name.startswith("moepack-")}


def rooms(plan: Plan, kv: int = 0) -> list[int]:
    """How many experts of each layer fit at the best version."""
    return [n // (row[0] - row[-1]) for n, row in zip(plan.capacity(kv), plan.growing(), strict=True)]
