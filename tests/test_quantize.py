"""Quantisers: rounding to the grid, each method against the ones it must beat, odd shapes, odd scales."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from moepack.pack.spec import Version
from moepack.quantize import gptq, refit, rtn, sign
from moepack.quantize.grid import Quantised, dequantise, fix_scale
from moepack.quantize.methods import fallbacks, method_for, quantise

WIDTHS = [4, 3, 2, 1]


def weights(experts: int = 2, rows: int = 48, cols: int = 192, seed: int = 0) -> Tensor:
    return torch.randn(experts, rows, cols, generator=torch.Generator().manual_seed(seed)) * 0.02


def inputs(experts: int = 2, tokens: int = 2048, cols: int = 192, seed: int = 1) -> Tensor:
    """Correlated inputs (AR(1), 0.9) whose columns differ in variance, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(experts, tokens, cols, generator=generator)
    for c in range(1, cols):
        x[..., c] = 0.9 * x[..., c - 1] + (1 - 0.81) ** 0.5 * x[..., c]
    return x * torch.exp(0.5 * torch.randn(cols, generator=torch.Generator().manual_seed(0)))


def moments(x: Tensor) -> Tensor:
    return x.transpose(1, 2) @ x / x.shape[1]


def output_error(x: Tensor, weight: Tensor, q: Quantised, version: Version) -> float:
    want, got = x @ weight.transpose(1, 2), x @ dequantise(q, version).transpose(1, 2)
    return float((want - got).square().sum() / want.square().sum())


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("method", ["rtn", "hqq", "gptq"])
@pytest.mark.parametrize(("cols", "group_size"), [(192, 64), (100, 64), (33, 32), (24, 128), (288, 128)])
def test_shapes_dtypes_and_pack_agree(bits: int, method: str, cols: int, group_size: int) -> None:
    """Every method fills the same descriptor, last groups may be partial, and pack dequantises to the same values."""
    version = Version.affine(bits, group_size)
    w = weights(2, 8, cols)
    q = quantise(method_for(method, version), w, moments(inputs(2, 300, cols)), version)
    groups = -(-cols // group_size)
    assert q.codes.shape == w.shape and q.codes.dtype == torch.uint8 and int(q.codes.max()) < 1 << bits
    assert q.scale.shape == (2, 8, groups) and q.scale.dtype == torch.bfloat16
    assert (q.zero is None) if bits == 1 else (q.zero is not None and q.zero.dtype == torch.uint8)
    values = dequantise(q, version)
    for e in range(2):
        assert np.array_equal(q.matrix(e).dequantise(version), values[e].numpy())


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_rounding_is_within_half_a_step(bits: int) -> None:
    version, w = Version.affine(bits, 64), weights()
    q = rtn.quantise(w, version)
    step = q.scale.float()[..., torch.arange(192) // 64]
    error = (w - dequantise(q, version)).abs() / step
    inside = (q.codes > 0) & (q.codes < (1 << bits) - 1)
    assert error[inside].max() <= 0.5 + 1e-4
    # At the ends the zero point's own rounding, half a step at most, and the scale's (one part in 512) come on top.
    assert error.max() <= 1 + 2**bits / 512


def test_zero_weights_and_tiny_weights_survive() -> None:
    for bits in WIDTHS:
        version = Version.affine(bits, 64)
        assert torch.isfinite(dequantise(rtn.quantise(torch.zeros(1, 2, 64), version), version)).all()
        for method in ("rtn", "hqq"):
            tiny = weights(1, 8, 64) * 1e-12
            q = quantise(method, tiny, None, version)
            error = (dequantise(q, version) - tiny).square().sum() / tiny.square().sum()
            assert error < {4: 0.02, 3: 0.08, 2: 0.4, 1: 0.5}[bits], (method, bits)
    assert fix_scale(torch.zeros(1)).item() > 0


def test_gaussian_weight_errors_are_the_known_ones() -> None:
    """Relative squared error of rounding Gaussian weights in groups of 64, to check nothing is off by a factor."""
    w = weights(1, 256, 512)
    for bits, expected in ((4, 0.0083), (3, 0.0382), (2, 0.2073)):
        version = Version.affine(bits, 64)
        error = float((dequantise(rtn.quantise(w, version), version) - w).square().sum() / w.square().sum())
        assert error == pytest.approx(expected, rel=0.1)
    error = dequantise(rtn.quantise(w, Version.affine(1, 64)), Version.affine(1, 64)) - w
    assert float(error.square().sum() / w.square().sum()) == pytest.approx(1 - 2 / np.pi, rel=0.03)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_gptq_beats_rounding_on_held_out_inputs(bits: int) -> None:
    version, w, x = Version.affine(bits, 64), weights(), inputs()
    held_out = inputs(seed=2)
    made = output_error(held_out, w, gptq.quantise(w, moments(x), version), version)
    assert made < 0.75 * output_error(held_out, w, rtn.quantise(w, version), version)


@pytest.mark.parametrize("bits", WIDTHS)
def test_refitting_scales_never_hurts_what_it_minimises(bits: int) -> None:
    version, w, x = Version.affine(bits, 64), weights(), inputs()
    for start in (rtn.quantise(w, version), quantise("hqq", w, None, version)):
        better = refit.refit_scales(w, moments(x), start, version)
        assert torch.equal(better.codes, start.codes)
        damped = refit.damp(moments(x), refit.DAMP)

        def quadratic(q: Quantised, h: Tensor = damped) -> Tensor:
            error = w - dequantise(q, version)
            return ((error @ h) * error).sum(-1)

        assert (quadratic(better) <= quadratic(start) * (1 + 1e-4)).all()
        assert quadratic(better).sum() < quadratic(start).sum()


def test_refit_keeps_scales_of_groups_without_a_basis() -> None:
    """A group whose codes all equal its zero point decides nothing: its system is singular and must not spread NaNs."""
    version = Version.affine(4, 64)
    q = rtn.quantise(weights(), version)
    assert q.zero is not None
    codes = q.codes.clone()
    codes[0, 0, :64] = q.zero[0, 0, 0] >> 4
    out = refit.refit_scales(weights(), moments(inputs()), Quantised(codes, q.scale, q.zero), version)
    assert torch.isfinite(out.scale.float()).all()


def test_one_bit_is_below_half_and_half_of_plain_signs() -> None:
    version, w = Version.affine(1, 64), weights()
    made = sign.quantise(w, moments(inputs()), version)
    plain = output_error(inputs(seed=2), w, rtn.quantise(w, version), version)
    ours = output_error(inputs(seed=2), w, made, version)
    assert ours < 0.5 and ours < plain / 2


def test_gptq_through_the_library_is_the_librarys_codes() -> None:
    """What we unpack of the library's result is what it meant: codes times scales are its own dequantised weights."""
    from gptqmodel.quantization.config import QuantizeConfig
    from gptqmodel.quantization.gptq import GPTQ

    version, w, h = Version.affine(3, 64), weights(1), moments(inputs(1))
    linear = torch.nn.Linear(192, 48, bias=False)
    linear.weight.data = w[0].clone()
    options = {"mse": gptq.SCALE_SEARCH, "damp_percent": gptq.DAMP, "offload_to_disk": False}
    config = QuantizeConfig(bits=3, group_size=64, sym=False, desc_act=False, **options)
    task = GPTQ(linear, config)
    task.quantizer.configure(perchannel=True)
    task.H, task.nsamples = 2 * h[0], 1
    values, scale, zero, group, *_ = task.quantize()
    codes = (values / scale[:, group.long()]).round() + zero[:, group.long()]
    assert torch.equal(gptq.quantise(w, h, version).codes[0], codes.to(torch.uint8))


def test_importing_gptqmodel_leaves_the_environment(capfd: pytest.CaptureFixture[str]) -> None:
    import os
    import subprocess
    import sys

    code = (
        "import os; before = dict(os.environ)\n"
        "from moepack.quantize import gptq; gptq._library()\n"
        "assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ))
    assert out.returncode == 0, out.stderr
    assert out.stdout == ""


def test_fallbacks_and_method_names() -> None:
    assert method_for("gptq", Version.affine(1, 64)) == "sign" and method_for("gptq", Version.affine(2, 64)) == "gptq"
    assert method_for("hqq", Version.affine(1, 64)) == "hqq"
    assert fallbacks("gptq", Version.affine(2, 64)) == ("rtn", "hqq") and fallbacks("rtn", Version.affine(2, 64)) == ()
    with pytest.raises(ValueError, match="moments"):
        quantise("gptq", weights(), None, Version.affine(4, 64))
    with pytest.raises(ValueError, match="unknown"):
        quantise("magic", weights(), None, Version.affine(4, 64))
