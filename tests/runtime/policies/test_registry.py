"""A policy is one file and one line: the one in docs/extending/policy.md is added here, word by word, and serves."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support import ROOT

import moepack
from moepack.pack.errors import InputError
from moepack.reports.plan import plan
from moepack.runtime.policies import registry
from moepack.runtime.policies.contract import Observation, Setting
from moepack.runtime.policies.registry import parse_policy


@pytest.fixture
def busiest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The documented file, as a module beside the others, and the documented line."""
    document = (ROOT / "docs" / "extending" / "policy.md").read_text()
    file = tmp_path / "busiest.py"
    file.write_text(re.findall(r"```python\n(.*?)```", document, re.DOTALL)[0])
    spec = importlib.util.spec_from_file_location("moepack.runtime.policies.busiest", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    line = next(x for x in document.splitlines() if x.startswith("ENTRIES"))
    names = {name: sys.modules[f"moepack.runtime.policies.{name}"] for name in ("static", "uniform", "hotness", "lru")}
    entries = eval(line.partition(" = ")[2], {**names, "busiest": module})  # the documentation's own line
    assert entries[:-1] == registry.ENTRIES
    monkeypatch.setattr(registry, "ENTRIES", entries)
    return module


def test_it_wants_what_was_chosen_most(busiest: ModuleType) -> None:
    policy = busiest.Busiest(Setting([3, 2], 0, [], []))
    assert policy.observe(Observation(0.0, [[0, 0, 0], [0, 0]], [1, 1])) == {}
    assert list(policy.observe(Observation(1.0, [[1, 5, 2], [0, 9]], [2, 1]))) == [(1, 1), (0, 1), (0, 2)]
    assert policy.observe(Observation(2.0, [[0, 0, 9], [0, 0]], [1, 0])) == {(0, 2): 0}


def test_one_file_and_one_line_serve(busiest: ModuleType, bundle: Path) -> None:
    text = "busiest:hi=bf16,lo=w2"
    assert str(parse_policy(text)) == text and "busiest[:KEY=VALUE,...]" in registry.usages(in_budget=True)
    with pytest.raises(InputError, match="policy busiest:speed=1: option 'speed' is unknown: there are hi, lo, share"):
        parse_policy("busiest:speed=1")
    least = plan(bundle, 0, policy=text).least_bytes
    planned = plan(bundle, least + 1_000_000, policy=text)
    assert planned.feasible and 0 < planned.per_layer[0].hi < 16
    model = moepack.load(bundle, policy=text, device_memory=least + 1_000_000)
    live = model.moepack.live
    live.device.limit(None)
    with torch.inference_mode():
        for seed in range(20):
            model(torch.randint(1, 4000, (1, 64), generator=torch.Generator().manual_seed(seed)), use_cache=False)
            live.round(1e9 + seed)
    counters = model.moepack.counters()
    assert counters["promotions"] > 0 and counters["forward_waits"] == 0 and live.tracker.peak <= least + 1_000_000
    assert any("bf16" in row for row in model.moepack.versions)
    model.moepack.close()


def test_without_its_line_it_is_refused() -> None:
    with pytest.raises(InputError, match="policy 'busiest' is unknown: there are static"):
        parse_policy("busiest")
