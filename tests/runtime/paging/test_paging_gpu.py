"""Models paged on a GPU that is not there: the bits of resident weights, and each rule broken on purpose is seen."""

from __future__ import annotations

import contextlib
import functools
import gc
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gpu_stand_in import RATES, StandIn, install, kernels
from live_models import at, ids, least, load, logits, same, same_at_once, stop_after, wait_for
from support import damage

import moepack
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.runtime.devices.cuda import StreamMark
from moepack.runtime.devices.handle_tables import DeviceTables
from moepack.runtime.paging.gpu_filler import GpuFiller, GpuRunPages
from moepack.runtime.paging.gpu_rates import gpu_rates
from moepack.runtime.paging.window import State
from moepack.runtime.planning import paging as planning
from moepack.runtime.planning.paging import window_size
from moepack.runtime.policies import paged as policy_module
from moepack.runtime.policies.placements import Placement, Where
from moepack.runtime.residency import kv_reserve
from moepack.runtime.residency import manager as manager_module

ROOM = 800_000  # for all experts, packed, and some


@pytest.fixture(scope="module")
def want(small: Path) -> Any:
    """What resident uncompressed weights make of some tokens, by the same kernels."""
    with pytest.MonkeyPatch.context() as patch:
        kernels(patch)
        model = moepack.load(small, policy="static:bf16")
        return {n: logits(model, ids(n, n)) for n in (1, 9, 2)}


def paged(bundle: Path, options: str = "alpha=1", room: int = ROOM, **more: Any) -> Any:
    return load(bundle, f"paged:{options}", room=room, **{"prefill_tokens": 32, **more})


@pytest.mark.parametrize("options", ["alpha=0.5,resident=0.3", "alpha=0.01,ahead=no"])
def test_the_same_bits_as_all_resident(small: Path, want: Any, gpu: StandIn, options: str) -> None:
    """Prompts, which load ahead, and tokens, which decode on demand: packed, stored, resident."""
    model = paged(small, options)
    same(model, want, 9, 1, 9)
    live = model.moepack.manager
    mapped, space, bundle = live.paging.window.mapped(), live.paging.space, open_bundle(small)
    assert not any(m.pins or m.state is not State.RESIDENT or m.at != m.page for m in mapped)
    counters, counts = model.moepack.counters(), live.paging.counts
    assert (counters["forward_waits"] > 0 and "ahead=no" in options) or sum(counts.ahead) > 0
    version, arena = live.plan.ladder[0].version, space._memory.numel()
    assert len({m.block for m in mapped}) == len(mapped) > 8
    for m in mapped:
        _, position, expert = m.page
        matrices, slot = bundle.layers[position].matrices, space.slot(m).numpy()
        assert m.block * version.resident_size(matrices) <= slot.ctypes.data - space._memory.data_ptr() < arena
        restored = np.zeros(version.resident_size(matrices), np.uint8)
        version.restore(matrices, bundle.extent("bf16", position, expert), restored, 1)
        for s in version.sections(matrices):  # what lies between them is no expert's
            assert np.array_equal(*(x[s.offset : s.offset + s.size] for x in (slot, restored))), (m.page, s)
    assert arena == window_size(bundle.layers, version, True).bytes < live.plan.window
    assert gpu.gpu.most - arena <= live.tracker.peak - live.plan.fixed and live.tracker.peak <= live.tracker.budget


def test_versions_other_than_bf16_are_refused(small: Path, gpu: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_module, "lossless", lambda versions: versions[1])
    with pytest.raises(InputError, match=r"bundle: w4 is paged on a CPU alone: a GPU's pages are bf16$"):
        paged(small)


def test_the_decoder_of_gpus(small: Path, want: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernel in place of the host's decoder, until it has decoded two experts: the interpreter is slow."""
    from moepack.runtime.kernels.exponent_triton import decode

    decoded = 0

    def by_triton(jobs: Any) -> Any:
        nonlocal decoded
        decoded += len(jobs)
        if decoded >= 4:
            made.gpu.decodes_by = None
        return decode(jobs)

    made = install(monkeypatch, decodes_by=by_triton)
    model = paged(small, "alpha=0.6,ahead=no")
    same(model, want, 1)
    assert decoded >= 4
    model.moepack.close()
    gc.collect()
    assert made.wrong() == [] and made.leaks() == []


def test_the_kv_cache_takes_expert_memory_and_gives_it_back(
    small: Path, want: Any, gpu: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed experts leave, their pieces go back to the device, and come again; the bits stay the same throughout."""
    monkeypatch.setattr(kv_reserve, "LINGER", 1e9)  # what no cache needs goes back when this test says so
    monkeypatch.setattr(manager_module, "gpu_rates", lambda *args: (float("inf"), 2e4, 1e4))
    model = paged(small, "alpha=1,interval=0.02,theta=1,rate=0", room=520_000)
    live, whole = model.moepack.manager, at(model, "bf16@packed")
    live.paging.window._keeps = False  # else all that is asked for is soon there
    assert whole == 24 and live.policy.alpha == 1
    memory, window = sum(gpu.gpu.blocks.values()), live.plan.window

    serve = functools.partial(same, model, want, 1, 2)
    serve()
    packed = live.plan.sizes[0][1] * 24
    grown = live.tracker.free + packed // 2
    live.grow_kv(grown)
    wait_for(lambda: not live.transitions.kv_asked, serve)
    low = at(model, "bf16@packed")
    assert 0 < low < 0.8 * whole and live.tracker.held("kv") == grown
    pools = sum(n for name, n in live.tracker.named().items() if name.startswith("bf16"))
    arena = live.paging.space._memory.numel()
    assert sum(gpu.gpu.blocks.values()) - arena == pools < 0.8 * packed, "the tracker has what torch has"
    assert live.tracker.peak <= live.tracker.budget and memory <= packed + window
    live.transitions.shrink_kv(grown)
    wait_for(lambda: at(model, "bf16@packed") > low, serve)
    serve()


def test_rates_are_measured_and_add_up_side_by_side(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bus and a GPU: the policy takes the slower one's time, not both times together."""
    made = install(monkeypatch)
    bundle = open_bundle(small)
    ladder = tuple(Placement(bundle.versions[0], where) for where in (Where.DEVICE, Where.PACKED, Where.STORED))
    monkeypatch.setattr(planning, "BRIEFLY", 0.01)
    rates = gpu_rates(bundle, ladder, torch.device("cuda"))
    assert rates[0] == float("inf") and all(0 < rate < 1e12 for rate in rates[1:]) and made.gpu.wrong == []
    model = paged(small, "alpha=0.5")
    setting = model.moepack.manager.policy._setting
    assert setting.together and setting.rates == RATES
    assert model.moepack.manager.policy._seconds([[4e9, 3e9]]) == pytest.approx(3.0)


def test_threads_share_the_window(small: Path, want: Any, gpu: StandIn) -> None:
    model = paged(small, "alpha=0.5")
    same_at_once(model, want, tuple(want), threads=2, rounds=2)


def test_what_only_decoding_shows_ends_the_pass_and_is_not_served(small: Path, want: Any, gpu: StandIn) -> None:
    """Memory went bad after its digest was checked: decoders report, the page goes, the bytes come back right."""
    model = paged(small, "alpha=1")
    extents = [h.packed.extent.numpy() for h in model.moepack.layers[2].current.handles]
    kept = [extent.copy() for extent in extents]
    for extent in extents:
        extent[600:16_000] = 0xFF
    for n in (1, 9):
        with pytest.raises(BundleError, match=r"layer 2, expert \d+, version bf16: "):
            logits(model, ids(n, n))
    for extent, bytes_ in zip(extents, kept, strict=True):
        extent[:] = bytes_
    same(model, want, 1, 9)


def test_damage_in_a_file_is_named_and_not_served(small: Path, want: Any, gpu: StandIn, tmp_path: Path) -> None:
    path = Path(shutil.copytree(small, tmp_path / "damaged"))
    damage(path, "bf16", 1, range(8))
    model = load(path, "paged", least(path, "paged", prefill_tokens=32), prefill_tokens=32, host_memory=1)
    for n in (1, 9):
        with pytest.raises(BundleError, match=r"layer 1, expert \d+, version bf16: its bytes do not match"):
            logits(model, ids(n, n))
    damage(path, "bf16", 1, range(8))
    same(model, want, 1, 9)


@pytest.mark.parametrize("where", ["loaded", "words", "decode"])
def test_an_interrupted_pass_lets_go(
    small: Path, want: Any, gpu: StandIn, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = paged(small, "alpha=1,ahead=no")
    paging = model.moepack.manager.paging
    holder: Any = {"loaded": paging, "words": paging.space, "decode": paging.filler.device}[where]
    stop_after(monkeypatch, holder, where, 2)
    with pytest.raises(KeyboardInterrupt):
        for n in (1, 2):
            logits(model, ids(n, n))
    assert not any(m.pins for m in paging.window.mapped())
    same(model, want, 1, 9)


def _nothing(*_: Any) -> None:
    pass


def _unordered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuFiller, "follow", _nothing)


def _ended(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StreamMark, "done", lambda mark: True)


def _no_address(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GpuRunPages, "_write_handles", _nothing)


def _shared_table(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeviceTables, "give", lambda tables, table: tables._free.append(table))


@pytest.mark.parametrize(
    ("plant", "options", "seen"),
    [
        (_unordered, "alpha=1,ahead=no", "written to while it is read"),
        (_unordered, "alpha=0.01,ahead=no", "read before its load has ended"),
        (_ended, "alpha=1,ahead=no", "written to while it is read"),
        (_no_address, "alpha=1", "read where nothing is"),
        (_shared_table, "alpha=1", "written to while it is read"),
        (_nothing, "alpha=1,ahead=no", ""), (_nothing, "alpha=0.01", ""),
    ],
)  # fmt: skip
def test_planted(small: Path, plant: Any, options: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels go on reading for long: no slot is filled and no table written to meanwhile, unless a rule is broken."""
    made = install(monkeypatch, computes=False)
    model = paged(small, f"{options},interval=60")
    made.gpu.patience = 1 << 30  # until somebody waits
    plant(monkeypatch)
    with contextlib.suppress(RuntimeError, BundleError):
        for n in (9, 1, 9, 1, 1, 1, 1, 1):
            logits(model, ids(n, n))
    monkeypatch.undo()
    model.moepack.close()
    assert seen in made.wrong() if seen else not made.wrong()
