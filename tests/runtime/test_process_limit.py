"""A limit on the whole process: arithmetic, refusals, weights that are never held twice, and a cage that holds it."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
from support import ROOT, for_logits, load_for_logits
from transformers import AutoModelForCausalLM

import moepack.runtime.plugin
from benchmarks.limited.cage import Cage
from moepack.pack.errors import InputError
from moepack.reports.plan import plan
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.process_limit import HOLED, HOLES, MIB, TABLES, Beside, limit_of
from moepack.runtime.store import host_limit

GIB = 1 << 30


def test_budget_and_limit_are_inverse():
    beside = Beside(100, 20, 3, 4, 5)
    assert beside.total == 132 and beside.limit(0) == 132 and beside.limit(1000) == 132 + 1000 + 32
    for limit in (133, 5_000, 12_345_678_901, beside.limit(HOLED), beside.limit(HOLED) + 1):
        most = beside.budget(limit)
        assert beside.limit(most) <= limit < beside.limit(most + 1)
    assert beside.budget(132) == beside.budget(5) == 0
    words = beside.described(1000)
    assert words.startswith("100 bytes Python and libraries, 20 bytes ")
    assert words.endswith(", 37 bytes heap holes and page tables")
    assert sum(map(int, re.findall(r"(\d+) bytes", words))) == beside.limit(1000) - 1000


def group(folder, **files):
    """A control group, by its files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(f"{text}\n")


def test_what_may_be_pinned_follows_groups_of_both_versions(tmp_path):
    limits = host_limit.host_limits(tmp_path, tmp_path / "none")
    assert limits["cgroup_bytes"] is None
    assert limits["pinnable_bytes"] == max(0, limits["available_bytes"] - limits["margin_bytes"])
    (tmp_path / "self").write_text("0::/a/b\n")
    group(tmp_path / "a" / "b", max="max", current=5)
    cache = f"anon 7\ninactive_file {GIB}\nactive_file {GIB}"
    group(tmp_path / "a", max=6 * GIB, current=3 * GIB, stat=cache)
    assert host_limit.cgroup_room(tmp_path, tmp_path / "self") == 5 * GIB, "a group above it, less cache that can go"
    (tmp_path / "self").write_text("4:memory:/x\n3:cpu:/\n")
    group(tmp_path / "memory", limit_in_bytes=9223372036854771712, usage_in_bytes=1)
    group(tmp_path / "memory" / "x", limit_in_bytes=3 * GIB, usage_in_bytes=GIB)
    assert host_limit.cgroup_room(tmp_path, tmp_path / "self") == 2 * GIB


def test_auto_is_what_the_group_has_left(tmp_path, monkeypatch):
    """A group of 6 GiB, of which 3 are taken and 2 of those are cache; a system of 32 GiB with 20 left."""
    monkeypatch.setattr(host_limit, "resident", lambda: (GIB // 4, 7))
    system = SimpleNamespace(available=20 * GIB, total=32 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: system)
    (tmp_path / "self").write_text("0::/a\n")
    group(tmp_path / "a", max=6 * GIB, current=3 * GIB, peak=4 * GIB, stat=f"active_file {2 * GIB}")
    assert host_limit.most_memory(tmp_path / "none", tmp_path / "none") == GIB // 4 + 20 * GIB - 2 * GIB
    assert host_limit.most_memory(tmp_path, tmp_path / "self") == GIB // 4 + 5 * GIB - 6 * GIB // 64
    assert host_limit.group_peak(tmp_path, tmp_path / "self") == 4 * GIB
    assert host_limit.group_peak(tmp_path / "none", tmp_path / "none") is None


def test_what_is_refused(bundle, monkeypatch):
    with pytest.raises(InputError, match="on the CPU: on cuda"):
        LoadOptions(memory="1GB", device="cuda")
    with pytest.raises(InputError, match="size 'much'"):
        LoadOptions(memory="much")
    with pytest.raises(InputError, match="on the CPU: on cuda give a device memory"):
        AutoModelForCausalLM.from_pretrained(bundle, memory="4GB", device_map="cuda")
    given, beside = LoadOptions(memory=1000, device_memory=900), Beside(90, 5, 0, 0, 5)
    with pytest.raises(InputError, match=r"device memory of 900 bytes .* limit of 1000 bytes: at most 872 bytes do"):
        limit_of(given, beside)
    assert limit_of(LoadOptions(memory=1000, device_memory=800), beside).budget == 800
    assert int(900 / (1 + HOLES + TABLES)) == limit_of(LoadOptions(memory=1000), beside).budget == 872
    monkeypatch.setenv("MOEPACK_MEMORY", "lots")
    with pytest.raises(InputError, match="MOEPACK_MEMORY: size 'lots'"):
        moepack.load(bundle)


def read(*_):
    raise AssertionError("weights were read")


@pytest.mark.parametrize("policy", ["static:w2", "hotness"])
def test_a_budget_is_refused_before_a_weight_is_read(bundle, policy, monkeypatch):
    """In float32 too, which the bundle's files are not: dense tensors and the cache take twice the bytes. The budget
    that the refusal names loads, and is the one that a load would have named after reading."""
    with monkeypatch.context() as patch, pytest.raises(TooSmallError) as refused:
        patch.setattr(moepack.runtime.plugin, "attach", read)
        load_for_logits(bundle, policy=policy, device_memory=5, prefill_tokens=16, dtype="float32")
    with monkeypatch.context() as patch, pytest.raises(TooSmallError) as later:
        patch.setattr(moepack.runtime.plugin, "check_budget", lambda model, bundle, options, dense: options)
        load_for_logits(bundle, policy=policy, device_memory=5, prefill_tokens=16, dtype="float32")
    assert str(refused.value) == str(later.value)
    load_for_logits(bundle, policy=policy, device_memory=refused.value.least, prefill_tokens=16, dtype="float32")


@pytest.mark.parametrize("policy", ["static:w2", "hotness", "lru:lo=absent"])
def test_the_least_that_is_named_would_do(bundle, policy, monkeypatch):
    """It is refused before a weight is read, and the limit that the refusal names loads."""
    with monkeypatch.context() as patch, pytest.raises(TooSmallError, match="a memory limit of 5 bytes") as refused:
        patch.setattr(moepack.runtime.plugin, "attach", read)
        load_for_logits(bundle, policy=policy, memory=5, prefill_tokens=16)
    least = refused.value.least
    with load_for_logits(bundle, policy=policy, memory=least, prefill_tokens=16).moepack as serving:
        assert serving.limit is not None and serving.limit.bytes == least
        assert serving.resident_bytes_peak <= serving.budget_bytes == serving.limit.budget < 64 * MIB


def in_cage(limit, *words):
    """Run moepack in a control group: exit code, both outputs, the group's peak."""
    command = [sys.executable, "-m", "moepack", *map(str, words)]
    with Cage(limit) as cage:
        if cage.group is None:
            pytest.skip("no control group can be made here")
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(command, capture_output=True, text=True, env=environment, preexec_fn=cage.enter)
        assert not cage.killed(), run.stderr
        return run.returncode, run.stdout, run.stderr, cage.peak() or 0


def test_a_process_keeps_its_limit_in_a_cage(bundle, evaluation):
    """At the least limit that the refusal names, in a control group of just that size."""
    words = ["eval", bundle, "-d", evaluation, "--policy", "hotness", "--json", "-q"]
    words += ["--samples", "8", "--length", "256"]
    code, _, said, _ = in_cage(2 * GIB, *words, "--memory", "500MB")
    found = re.search(r"a memory limit of 500MB is too small: the least that would do is ([\d.]+)MB", said)
    assert code == 2 and found and said.count("\n") == 1, said
    limit = int(1e6 * float(found[1])) + 10_000  # as it is rounded
    code, out, said, peak = in_cage(limit, *words, "--memory", str(limit))
    assert code == 0, said
    facts = json.loads(out)
    assert facts["memory_limit_bytes"] == limit and facts["resident_bytes_peak"] <= facts["budget_bytes"]
    assert 0.5 * limit < facts["process_bytes_peak"] <= limit and 0 < peak <= limit
    assert facts["group_bytes_peak"] <= limit


def test_tied_weights_count_once(bundle):
    """transformers unties weights while it loads; the budget that a limit needs is the one that a plan names."""
    from moepack.runtime.planning import measure

    assert json.loads((bundle / "config.json").read_text())["tie_word_embeddings"]
    measure._known.clear()
    work = {"policy": "static:w2", "prefill_tokens": 24}
    with pytest.raises(TooSmallError) as refused:
        load_for_logits(bundle, memory=5, **work)
    assert f" {plan(bundle, for_logits(device_memory=0, **work)).least_bytes} bytes budget" in str(refused.value)
