"""Up to how many tokens experts run from packed bytes: measured for a machine and a number of threads, and kept."""

import json
import time

import pytest
import torch
from support import at_once

import moepack
from moepack.pack.errors import InputError
from moepack.pack.spec import Version
from moepack.runtime.experts import autotune, backends

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
VERSIONS = tuple(Version.of(name, 64) for name in ("w8", "w4", "w1"))
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(backends.VARIABLE, raising=False)
    backends.forget()
    yield tmp_path / "moepack" / "kernels.json"
    monkeypatch.undo()
    backends.forget()


@pytest.fixture
def asked(monkeypatch):
    """What is measured, instead of measuring: w8 6, others 16 tokens, and with three threads 4."""
    seen = []

    def measure(dtype, name, candidates, threads):
        seen.append((name, threads))
        return 4 if threads == 3 else 6 if name == "w8" else 16

    monkeypatch.setattr(autotune, "measure_limit", measure)
    return seen


def test_measured_once_for_each_number_of_threads(file, asked):
    assert backends.direct_limits(BF16, VERSIONS, 1).tolist() == [6, 16, 16]
    assert backends.direct_limits(BF16, VERSIONS, 3).tolist() == [4, 4, 4]
    for _ in range(2):
        backends.forget()
        assert backends.direct_limits(BF16, VERSIONS, 1).tolist() == [6, 16, 16], "the other table left it alone"
    assert asked == [(v.name, n) for n in (1, 3) for v in VERSIONS]
    assert backends.direct_limits(BF16, (Version.of("w3"),), 1).tolist() == [16]
    with pytest.raises(ValueError, match="read-only"):
        backends.direct_limits(BF16, VERSIONS, 1)[0] = 7
    assert asked[-1] == ("w3", 1) and len(asked) == 7
    assert len(json.loads(file.read_text())["tables"]) == 2


def test_another_machines_table_is_not_used(file, asked, monkeypatch):
    backends.direct_limits(BF16, VERSIONS, 1)
    for what in ("_processor", "build"):
        backends.forget()
        where = backends if what == "_processor" else backends.library()
        monkeypatch.setattr(where, what, lambda: "another")
        before = len(asked)
        backends.direct_limits(BF16, VERSIONS, 1)
        assert len(asked) == before + 3
    assert len(json.loads(file.read_text())["tables"]) == 3


NO_LIMIT = '{"tables": {"%s": {"bfloat16 w8": 1099511627776}}}'  # which no measurement gives


@pytest.mark.parametrize(
    "spoilt",
    ["", "[]", "{}", '{"tables": 7}', '{"machine": "a", "limits": {}}', "\x00", '{"tables": {"a": 1}}', NO_LIMIT],
)
def test_a_spoilt_file_is_measured_over(file, asked, spoilt):
    file.parent.mkdir()
    file.write_text(spoilt.replace("%s", backends._machine(1)))
    assert backends.direct_limits(BF16, VERSIONS, 1).tolist() == [6, 16, 16]
    assert list(json.loads(file.read_text())["tables"]) == [backends._machine(1)]


def test_what_cannot_be_kept_is_not_measured(tmp_path, asked, monkeypatch):
    """Else two processes of one machine would compute different bits."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    want = [backends.defaults()[f"bfloat16 {v.name}"] for v in VERSIONS]
    assert backends.direct_limits(BF16, VERSIONS, 1).tolist() == want and not asked


def test_a_variable_fixes_them(asked, monkeypatch):
    monkeypatch.setenv(backends.VARIABLE, "fixed")
    want = [backends.defaults()[f"bfloat16 {v.name}"] for v in VERSIONS]
    assert backends.direct_limits(BF16, VERSIONS, 1).tolist() == want and not asked
    assert backends.source() == "defaults: MOEPACK_LIMITS=fixed"
    monkeypatch.setenv(backends.VARIABLE, "8")
    with pytest.raises(InputError, match=r"^MOEPACK_LIMITS=8: it may be `fixed`, or not set$"):
        backends.direct_limits(BF16, VERSIONS, 3)


def test_threads_that_ask_at_once_get_one_answer(asked, monkeypatch):
    real, got = autotune.measure_limit, []

    def slow(*args):
        time.sleep(0.05)
        return real(*args)

    monkeypatch.setattr(autotune, "measure_limit", slow)
    at_once(lambda _: got.append(int(backends.direct_limits(BF16, VERSIONS[:1], 1)[0])), 4)
    assert got == [6] * 4 and asked == [("w8", 1)]


def test_reports_say_where_they_come_from(file, asked):
    threads = torch.get_num_threads()
    assert backends.source().startswith(f"none yet for {threads} threads")
    limits = backends.autotune()
    assert set(limits) == set(backends.DEFAULTS) and limits["bfloat16 w8"] == 6
    assert backends.source() == f"measured on this machine with {threads} threads, kept in {file}"
    assert ("w8", "1-6") in {(row["version"], row["tokens"]) for row in backends.table()}
    count = len(asked)
    assert backends.autotune() == limits and len(asked) == 2 * count, "asked for, it is measured anew"


@pytest.mark.parametrize(("fused", "limit"), [(0.5, backends.UNLIMITED), (1.5, 2)])
def test_any_number_of_tokens(fused, limit, monkeypatch):
    """What is faster with 512 tokens has no limit; more are never timed."""
    timed = []

    def seconds(tokens, each):
        timed.append(tokens)
        return tokens * each

    ways = (lambda tokens: seconds(tokens, fused), lambda tokens: seconds(tokens, 1.0))
    monkeypatch.setattr(autotune, "_ways", lambda *_: ways)
    assert autotune.measure_limit(BF16, "w4", backends.CANDIDATES, 1) == limit
    assert max(timed) <= autotune.MOST and (autotune.MOST in timed) == (limit == backends.UNLIMITED)


@pytest.mark.parametrize("name", [name.split()[1] for name in backends.DEFAULTS if name.startswith("bfloat16")])
def test_what_is_multiplied_has_no_denormal_numbers(name, monkeypatch):
    """torch takes ten times as long with them: every encoding would seem to gain by its packed bytes."""
    seen = []
    monkeypatch.setattr(autotune, "has_tiles", lambda dtype: False)
    monkeypatch.setattr(autotune, "multiply", lambda x, weights, out: seen.append(weights(0, 256, torch.float32)))
    autotune._ways(torch.float32, name, 1, time.perf_counter)[1](2)
    assert len(seen) == autotune.EXPERTS
    for weights in seen:
        assert weights.abs().max() < 600 and not ((weights != 0) & (weights.abs() < 1e-6)).any()


def test_a_model_is_loaded_with_them_at_hand(bundle, file):
    moepack.load(bundle, policy="static:w2")
    (limits,) = json.loads(file.read_text())["tables"].values()
    dense = ["float32 bf16"]  # of BF16 matrices beside the experts, which take either dtype
    assert sorted(limits) == sorted([*(f"bfloat16 {name}" for name in ("bf16", "w4", "w3", "w2", "w1")), *dense])
