"""`importance` over pinned memory: each pass chooses its critical experts, which run at `hi` wherever that is.

The present policy that waits makes the same choice, so where nothing is cached the bits are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_stand_in import StandIn
from live_models import at, ids, load, logits, same, same_at_once, stop_after, wait_for

import moepack
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.reports.plan import plan
from moepack.runtime.experts import critical as critical_module
from moepack.runtime.experts.handles import Snapshot
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.plan import make_plan
from moepack.runtime.policies.contract import Interval, Setting
from moepack.runtime.policies.importance import Importance, ImportanceOptions, critical, most_important
from moepack.runtime.policies.lru import NEWCOMERS
from moepack.runtime.policies.placements import Placement, Where
from moepack.runtime.policies.registry import parse_policy
from moepack.runtime.store.cudart import Cudart

WAITS = "importance:hi=w4,lo=w2,prefetch=no,reuse=no"
PINNED = "importance:hi=w4,lo=w2@pinned"
ALL: dict[str, Any] = {"prefill_tokens": 32, "kv_tokens": 32, "batch": 2}
SIZES = (1, 2, 9, 24)  # 2 and more are prompts; 24 tokens take another launch than few do
SHARES = (0.5, 0.75, 0.9)


def cached(model: Any, tokens: torch.Tensor, steps: int = 3) -> list[torch.Tensor]:
    """Logits of a prompt and of decode steps behind it."""
    out, cache = [], None
    with torch.inference_mode():
        for step in range(steps):
            given = tokens if not step else torch.tensor([[7 * step + 1]] * len(tokens))
            made = model(given, use_cache=True, cache=cache)
            cache = made.cache
            out.append(made.logits)
    return out


def padded(model: Any) -> torch.Tensor:
    """The logits of a batch's text."""
    tokens, mask = ids(3, 9, batch=2), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    return logits(model, tokens, attention_mask=mask)[mask.bool()]


@pytest.fixture(scope="module")
def waits(small: Path) -> dict[tuple[float, str], Any]:
    """What the policy that waits makes, by share and ranking."""
    out: dict[tuple[float, str], Any] = {}
    for r in SHARES:
        for by in ("importance", "counts"):
            model = moepack.load(small, policy=f"{WAITS},r={r},by={by}", device_memory=1 << 40, **ALL)
            out[r, by] = {n: logits(model, ids(n, n)) for n in SIZES}, cached(model, ids(5, 6, 2)), padded(model)
            model.moepack.close()
    return out


def holds_nothing(small: Path, r: float = 0.75, by: str = "importance", **given: Any) -> Any:
    model = load(small, f"{PINNED},r={r},by={by}", room=0, **ALL, **given)
    assert at(model, "w2@pinned") == 24
    return model


@pytest.mark.parametrize("by", ["importance", "counts"])
@pytest.mark.parametrize("r", SHARES)
def test_the_choice_is_that_of_the_policy_that_waits(small: Path, waits: Any, r: float, by: str) -> None:
    model = holds_nothing(small, r, by)
    by_size, steps, text = waits[r, by]
    same(model, by_size, *SIZES)
    assert all(torch.equal(a, b) for a, b in zip(cached(model, ids(5, 6, 2)), steps, strict=True))
    assert torch.equal(padded(model), text)
    assert model.moepack.counters()["forward_waits"] == 0
