"""The kernels' trial: it finds a planted fault in any form, and what fails it is not used."""

import ctypes
import logging

import numpy as np
import pytest
import torch
from expert_layers import native
from live_models import ids, logits

import moepack
from moepack.pack import trials
from moepack.pack.codec import exponent_fast, exponent_native
from moepack.pack.encodings.base import SCALE_BITS
from moepack.pack.spec import Version, encoding_of
from moepack.reports import doctor as reports
from moepack.runtime.experts import backends
from moepack.runtime.kernels import trial
from moepack.runtime.kernels.forms import compiled_names, make_forms

BEST = native.BEST
CACHES = backends.library, backends._direct_limits, exponent_fast.engine


def starts_again():
    """Forget what this process has tried, as a new one of the same user."""
    trials._best.clear()
    trials.faults.clear()
    native.BEST = BEST
    for cache in CACHES:
        cache.cache_clear()


@pytest.fixture(autouse=True)
def untried(tmp_path, monkeypatch):
    """A process that has tried nothing, of a user who has no findings."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(backends.VARIABLE, "fixed")
    monkeypatch.setattr(trials, "_best", {})
    monkeypatch.setattr(trials, "faults", {})
    starts_again()
    yield
    monkeypatch.undo()
    starts_again()
    native.use_level()
    exponent_native.use_level()


@pytest.fixture
def plant(monkeypatch):
    """Let products of BF16 differ in one number for one form at some levels; return a list of all products' levels."""
    real, called = native.library.moepack_affine_product, []

    def put(bits, group, levels=range(BEST + 1), last=False):
        def product(argument):
            called.append(native.level)
            gemm = argument._obj
            failed = int(real(argument))
            form = (ctypes.c_int64 * 2).from_address(gemm.forms)
            if tuple(form) == (bits, group) and native.level in levels and gemm.x_bf16:
                row = gemm.slots * gemm.rows - 1 if last else gemm.rows - 1
                ctypes.c_uint16.from_address(gemm.out + 2 * row).value = 0x4F00  # 2^31, far above all others
            return failed

        monkeypatch.setattr(native.library, "moepack_affine_product", product)
        return called

    return put


def test_every_form_has_a_trial():
    """The fault: a new encoding, group size or size of scales, whose form no trial looks at."""
    tried = {make_forms((trial.MATRIX,), v)[0].row()[:2] for v in trial._versions()}
    for name in compiled_names():
        entry = encoding_of(name)
        for group in entry.group_sizes or (0,):
            for scale_bits in SCALE_BITS[: 1 if entry.holds else 2]:
                version = Version.of(name, group, scale_bits=scale_bits)
                forms = make_forms((trial.MATRIX, trial.MATRIX), version)
                assert {f.row()[:2] for f in forms} <= tried, version
    assert {(5, 128), (37, 128), (16, 0), (18, 16), (20, 32)} <= tried


@pytest.mark.parametrize("level", sorted({0, BEST}))
def test_the_kernels_stand_it(level):
    native.use_level(level)
    assert trial.trial() == ""


@pytest.mark.parametrize(
    ("bits", "group", "last", "forms"), [(4, 64, False, 2), (16, 0, True, 1), (36, 32, False, 2), (21, 0, True, 1)]
)
def test_a_wrong_form_is_named(bits, group, last, forms, plant):
    """The fault: one number of one form, for one token or for the last of several. Integers may be symmetric too."""
    plant(bits, group, last=last)
    wrong = trial.trial()
    assert f"(form {bits}, groups of {group}): products of bfloat16" in wrong
    assert wrong.count("(form ") == forms * (1 + native.has_tiles(torch.bfloat16))


def test_a_wrong_level_is_not_used(small, plant, monkeypatch, caplog):
    """The fault: wrong logits where a compiler, or a processor, is wrong. The next start knows without a trial."""
    with monkeypatch.context() as without:
        without.setattr(backends, "library", lambda: None)
        want = logits(moepack.load(small, policy="static:w4"), ids(0, 1))
    called = plant(4, 32)
    for start in range(2):
        starts_again()
        called.clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "moepack"):
            model = moepack.load(small, policy="static:w4")
            assert torch.equal(logits(model, ids(0, 1)), want), "torch computes it"
            backends.library()
        assert model.moepack.layers[0].of.backend == "reference"
        assert set(called) == (set() if start else set(range(BEST + 1)))
        lines = [r.getMessage() for r in caplog.records]
        assert len(lines) == BEST + 1, "each level once"
        assert all("w4 (form 4, groups of 32): products of bfloat16" in line for line in lines)
        assert lines[-1].startswith("_affine.so (plain) is not used: it computes wrong numbers on this processor")


@pytest.mark.skipif(BEST == 0, reason="this processor has one level")
def test_a_lower_level_is_used_and_doctor_says_so(plant, monkeypatch):
    """The fault: a processor whose best instructions are wrong runs on torch, or on them."""
    plant(2, 128, levels={BEST})
    monkeypatch.setattr(reports, "disk_rates", lambda directory: {})
    monkeypatch.setattr(reports, "_codec", lambda: {})
    found = reports.doctor()
    assert backends.library() is native and native.level == BEST - 1
    assert found["cpu"]["isa"] == native.LEVELS[BEST - 1]
    (said,) = [line for line in found["problems"] if "wrong numbers" in line]
    level = native.LEVELS[BEST]
    assert said.startswith(
        f"_affine.so ({level}) is not used: it computes wrong numbers on this processor (w2 (form 2,"
    )
    assert said.endswith("install moepack again with another C compiler, for example CC=clang")


def test_wrong_loops_of_the_codec_are_not_used(monkeypatch):
    """The fault: bytes of a bundle, or weights, that compiled loops get wrong. NumPy makes them."""
    decode = exponent_native._library.moepack_exponent_decode

    def wrong(*args):
        failed = int(decode(*args))
        ctypes.c_uint8.from_address(args[7]).value ^= 1
        return failed

    monkeypatch.setattr(exponent_native._library, "moepack_exponent_decode", wrong)
    assert exponent_fast.trial() == "; ".join(
        [*(f"{kind}: decoding" for kind in ("weights", "weights with patches", "raw tiles")), "FP8 codes: decoding"]
    )
    assert exponent_fast.engine() is None and len(trials.faults) == exponent_native.BEST + 1
    bits = np.arange(3000, dtype=np.uint16)
    assert np.array_equal(exponent_fast.decode(exponent_fast.encode(bits), len(bits)), bits)


def test_the_codecs_loops_stand_it():
    """The fault: a trial that refuses good loops, so that NumPy codes at a hundredth of the rate."""
    for level in range(exponent_native.BEST + 1):
        exponent_native.use_level(level)
        assert exponent_fast.trial() == "", level
