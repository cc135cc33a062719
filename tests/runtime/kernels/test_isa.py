"""MOEPACK_ISA bounds the compiled loops' instruction sets, in this process and in those it starts."""

import pytest
import torch
from expert_layers import native

from moepack.pack import isa
from moepack.pack.errors import InputError


def test_the_bound(monkeypatch):
    monkeypatch.delenv(isa.VARIABLE, raising=False)
    assert [isa.bound(best) for best in range(6)] == [0, 1, 2, 3, 4, 5]
    monkeypatch.setenv(isa.VARIABLE, "avx2")
    assert [isa.bound(best) for best in range(1, 5)] == [1] * 4
    with pytest.raises(InputError, match=r"MOEPACK_ISA=avx2: this processor does not have it: its levels are plain$"):
        isa.bound(0)
    monkeypatch.setenv(isa.VARIABLE, "AVX2")
    with pytest.raises(InputError, match=r"MOEPACK_ISA=AVX2: unknown level: .* are plain, avx2, avx512$"):
        isa.bound(2)


def test_levels_are_named_lowest_first():
    assert native.levels() == isa.LEVELS[: len(native.levels())] and native.levels()[0] == "plain"
    assert native.LEVELS[native.level] in native.levels()
    try:
        for level in range(native.BEST + 1):
            native.use_level(level)
            assert native.has_tiles(torch.bfloat16) == (native.LEVELS[level] in ("avx512-bf16", "amx"))
            assert not native.has_tiles(torch.float32)
    finally:
        native.use_level()


@pytest.mark.parametrize(("capability", "has"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_before_ampere_multiplies_in_float32(capability, has, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert isa.has_bf16(torch.device("cuda", 1)) == has


@pytest.mark.parametrize(("bound", "has"), [("AVX2", False), ("AVX512_CORE_VNNI", False), ("AVX512_CORE_AMX", True)])
def test_onednns_bound_leaves_torch_without_bf16(bound, has, monkeypatch):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setattr(isa, "ONEDNN_BOUND", bound)
    assert isa.has_bf16(torch.device("cpu")) == has
    assert isa.emulated(torch.device("cpu"), torch.bfloat16) != has
