"""Models served from pages: the same bits as all resident, whatever moves, fails or runs at once; and the bytes."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from live_models import at, ids, least, load, logits, ours, same, same_at_once, stop_after, wait_for
from support import PATIENCE, at_once, damage, smaps
from tiny_models import build_tiny

import moepack
from moepack.pack.errors import BundleError, InputError
from moepack.pack.reader import open_bundle
from moepack.reports.evaluate import evaluate
from moepack.runtime.experts import backends, packed
from moepack.runtime.paging import paging as paging_module
from moepack.runtime.paging.window import State
from moepack.runtime.planning import plan as plan_module
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.paging import window_size
from moepack.runtime.residency import kv_reserve
from moepack.runtime.trace import read_trace

ROOM = 8_000_000  # for all experts of the demo model, uncompressed
ONLY = "versions: [bf16]\ncalibration: {samples: 4, length: 32, batch_size: 4}\nallocation: {average_bits: 16}\n"


def paged(bundle: Path, options: str = "alpha=1", room: int = ROOM, **more: Any) -> Any:
    return load(bundle, f"paged:{options}" if options else "paged", room=room, **more)


def nothing_is_held(model: Any) -> None:
    window = model.moepack.manager.paging.window  # a load that nobody wants any more still ends, on its own thread
    wait_for(lambda: not any(m.pins or m.state is not State.RESIDENT or m.at != m.page for m in window.mapped()))
    assert not any(of.evicting for of in window._of) and not model.moepack.manager.paging._line


@pytest.fixture(scope="module")
def plain(bundle: Path) -> Any:
    """Every expert resident, uncompressed."""
    return moepack.load(bundle, policy="static:bf16")


SETTINGS = ("alpha=0.5,resident=0.25", "alpha=1,resident=1", "alpha=0.01,ahead=no", "")


@pytest.mark.parametrize("options", SETTINGS)
def test_the_same_bits_as_all_resident(bundle: Path, plain: Any, options: str) -> None:
    """Prompts, padding, one token, generation: from memory, compressed memory, and files."""
    model = paged(bundle, options)
    for size, batch in ((48, 1), (1, 1), (7, 3), (512, 1), (2, 1)):
        tokens = ids(size, size, batch)
        mask = torch.ones_like(tokens)
        mask[:, : size // 3] = 0
        assert torch.equal(logits(model, tokens), logits(plain, tokens))
        assert torch.equal(logits(model, tokens, attention_mask=mask), logits(plain, tokens, attention_mask=mask))
    made = [m.generate(ids(1, 20), max_new_tokens=12, do_sample=False) for m in (model, plain)]
    assert torch.equal(*made)
    assert model.moepack.counters()["forward_waits"] > 0 or "resident=1" in options
    nothing_is_held(model)


@pytest.mark.parametrize("way", ["reference", "no codec in C", "small matrices", "float32"])
def test_other_kernels(bundle: Path, plain: Any, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where experts are run by torch, decoded by NumPy, or multiplied by tiles: bytes come first, then products."""
    dtype = torch.float32 if way == "float32" else "auto"
    if way == "reference":
        monkeypatch.setattr(backends, "library", lambda: None)
    elif way == "no codec in C":
        monkeypatch.setattr(packed, "_native", lambda: None)
    elif way == "small matrices":
        monkeypatch.setattr("moepack.pack.codec.exponent_native.open_coded", lambda *args: None)
    other = moepack.load(bundle, policy="static:bf16", dtype=dtype) if way in ("reference", "float32") else plain
    model = paged(bundle, "alpha=0.5", dtype=dtype)
    same(model, other, 1, 5, 300)
    nothing_is_held(model)


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3", "mixtral"])
def test_families(family: str, demo_model: Path, text: Path, tmp_path: Path) -> None:
    """Biases; shared experts and a layer without experts; every expert chosen by every token. One version is enough."""
    more = {"num_experts_per_tok": 4} if family == "mixtral" else {}
    path = build_tiny(family, tmp_path, ONLY, demo_model, text, **more)
    model = paged(path, "alpha=0.5", 200_000)
    same(model, moepack.load(path, policy="static:bf16"), 1, 9, 64)
    assert at(model, "bf16@packed") and at(model, "bf16@stored")
    nothing_is_held(model)


def test_the_least_budget_and_a_byte_more(bundle: Path, plain: Any) -> None:
    """Everything is read from files then; a byte less is refused, with the least that would do."""
    smallest = least(bundle, "paged")
    with pytest.raises(InputError, match=f"the least that would do is {smallest} bytes"):
        load(bundle, "paged", smallest - 1)
    for budget in (smallest, smallest + 1):
        model = load(bundle, "paged", budget)
        assert at(model, "bf16@stored") == sum(x.experts for x in open_bundle(bundle).layers)
        same(model, plain, 40)
        assert model.moepack.resident_bytes_peak <= budget
        model.moepack.close()


def test_the_bytes_that_are_taken(bundle: Path) -> None:
    """What the plan says: compressed extents, the window, its loaders' buffers; and no more than that is touched."""
    from moepack.reports.plan import plan, render

    smallest = least(bundle, "paged:alpha=1")
    model = load(bundle, "paged:alpha=1", smallest + ROOM)
    live, opened = model.moepack.manager, open_bundle(bundle)
    experts = sum(x.experts for x in opened.layers)
    bf16 = sum(row[0] * n for row, n in zip(live.plan.blocks, live.plan.experts, strict=True))
    pool = sum(size for name, size in live.tracker.named().items() if name.startswith("bf16@packed"))
    assert pool == sum(row[1] * n for row, n in zip(live.plan.blocks, live.plan.experts, strict=True))
    assert at(model, "bf16@packed") == experts
    version = next(v for v in opened.manifest.versions if v.plain)
    size = window_size(opened.layers, version)
    assert size.blocks == 2 * opened.layers[0].experts and size.bytes == 2 * bf16 // len(opened.layers)
    assert live.plan.window == size.bytes + 2 * live.plan.staging == live.tracker.held("fixed") - (
        model.moepack.fixed.total - live.plan.window)  # fmt: skip
    for seed in range(6):
        logits(model, ids(seed, 400))
    space = live.paging.space
    resident = sum(space.size(m.page) for m in live.paging.window.mapped())
    assert resident <= size.bytes and space.fresh <= 2 * size.blocks
    assert resident_bytes(space) <= size.bytes
    assert model.moepack.resident_bytes_peak <= smallest + ROOM
    planned = plan(bundle, LoadOptions(device_memory=smallest + ROOM, policy="paged:alpha=1"))
    assert planned.fixed.window == live.plan.window and planned.least_bytes == smallest
    assert "window for paged experts" in render(planned)[1] and planned.per_layer[0].versions["bf16@packed"]


def resident_bytes(space: Any) -> int:
    """Of the pages' range."""
    last = space._places[-1]
    return smaps(space._at, space._at + last.first + last.stride * 16)[0]


def test_the_kv_cache_takes_expert_memory_and_gives_it_back(
    bundle: Path, plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alpha falls as the reserve grows, and rises again when it shrinks; the bits stay the same throughout.

    On backends that are so slow that loading is what takes the time: on this small model it is not.
    """
    monkeypatch.setattr(kv_reserve, "LINGER", 1e9)  # what no cache needs goes back when this test says so
    monkeypatch.setattr(plan_module, "measure_rates", lambda *args: (float("inf"), 2e6, 1e6))
    model = paged(bundle, "alpha=1,interval=0.02,theta=1,rate=0", room=4_000_000)
    live, whole = model.moepack.manager, at(model, "bf16@packed")
    live.paging.window._keeps = False  # else all that is asked for is soon there
    size = live.tracker.held("bf16@packed/" + str(live.plan.sizes[0][1])) or live.tracker.free
    assert whole > 0 and live.policy.alpha > 0.9

    serve = functools.partial(same, model, plain, 1, 30)
    serve()
    grown = live.tracker.free + size // 2
    live.grow_kv(grown)
    wait_for(lambda: not live.transitions.kv_asked, serve)
    low = at(model, "bf16@packed")
    assert 0 < low < 0.8 * whole and live.tracker.held("kv") == grown
    assert live.tracker.peak <= live.tracker.budget
    live.transitions.shrink_kv(grown)
    wait_for(lambda: at(model, "bf16@packed") > 0.9 * whole, serve)
    assert live.policy.alpha > 0.9
    serve()
    nothing_is_held(model)


def test_real_caches_push_experts_out(bundle: Path, plain: Any) -> None:
    """A sequence that grows beyond what was held back: the model's own passes ask for the bytes."""
    model = paged(bundle, "alpha=1,interval=0.02,rate=0", room=4_000_000, kv_tokens=16, batch=2)
    before = at(model, "bf16@packed")
    made = [m.generate(ids(5, 200, 2), max_new_tokens=30, do_sample=False) for m in (model, plain)]
    assert torch.equal(*made) and before > 0
    assert model.moepack.resident_bytes_peak <= model.moepack.budget_bytes


def test_threads_share_the_window(bundle: Path, plain: Any) -> None:
    """Steps at once, of prompts and of tokens, over pages that come and go: the same bits; all of them end."""
    model = paged(bundle, "alpha=0.5")
    want = {n: logits(plain, ids(n, n)) for n in (1, 60, 2, 300)}
    same_at_once(model, want, tuple(want), threads=3, rounds=8)
    nothing_is_held(model)


@pytest.mark.parametrize(
    ("where", "error"),
    [("place", KeyboardInterrupt), ("loaded", RuntimeError), ("bind", KeyboardInterrupt), ("decode", RuntimeError)],
)
def test_an_interrupted_pass_lets_go(
    bundle: Path, plain: Any, where: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far it had come with its pages: the next pass finds them whole, or loads them anew."""
    model = paged(bundle, "alpha=1")
    paging = model.moepack.manager.paging
    holder, name = {
        "place": (paging, "place"), "loaded": (paging, "loaded"), "bind": (paging.space, "bind"),
        "decode": (paging_module.RunPages, "_packed"),
    }[where]  # fmt: skip
    stop_after(monkeypatch, holder, name, 5, error)
    with pytest.raises(error, match="stopped"):
        for n in (1, 2, 3, 4):
            logits(model, ids(n, n))
    monkeypatch.undo()
    nothing_is_held(model)
    same(model, plain, 1, 40)
    version = model.moepack.manager.plan.ladder[0].version
    assert resident_bytes(paging.space) <= window_size(open_bundle(bundle).layers, version).bytes


def test_an_interruption_while_another_pass_has_the_lock_does_not_keep_it(bundle: Path) -> None:
    """Ctrl-C is seen on the way out of waiting for the lock."""
    model = paged(bundle, "alpha=1")
    paging = model.moepack.manager.paging
    stopped: list[object] = []

    def serve() -> None:
        with pytest.raises(KeyboardInterrupt) as error:
            logits(model, ids(1, 8))
        stopped.append(error.type)

    with paging._change:
        thread = threading.Thread(target=serve)
        thread.start()
        time.sleep(1)  # it waits for the lock by then
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(KeyboardInterrupt))
    thread.join(PATIENCE)
    assert not thread.is_alive() and stopped == [KeyboardInterrupt]
    nothing_is_held(model)
    at_once(lambda _: logits(model, ids(1, 8)), 1)  # else the lock is held for ever


def test_a_pass_that_is_closed_between_taking_pages_and_loading_them_ends(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody would bring what it asks for."""
    model = paged(bundle, "alpha=0.1")
    begin = paging_module.RunPages.begin

    def closing(pages: Any, loads: Any) -> None:
        pages._paging.close()
        begin(pages, loads)

    monkeypatch.setattr(paging_module.RunPages, "begin", closing)
    with pytest.raises(InputError, match=r"^this model was closed: load the bundle again$"):
        at_once(lambda _: logits(model, ids(1, 64)), 1)


def test_damage_is_named_and_not_served(damaged: Path, plain: Any) -> None:
    """Stored bytes are digested each time that they are read, by whomever."""
    opened, chosen = open_bundle(damaged), []
    module = plain.get_submodule(opened.layers[1].module)
    hook = module.register_forward_pre_hook(lambda module, args: chosen.append(int(args[1][0, 0])))
    want = logits(plain, ids(0, 512))
    hook.remove()
    damage(damaged, "bf16", 1, chosen[:1])
    model = load(damaged, "paged", least(damaged, "paged"))
    for ahead in (True, False):
        model.moepack.manager.paging._ahead = ahead
        with pytest.raises(BundleError, match=rf"layer 1, expert {chosen[0]}, version bf16: its bytes do not match"):
            logits(model, ids(0, 512))
    damage(damaged, "bf16", 1, chosen[:1])
    assert torch.equal(logits(model, ids(0, 512)), want), "it is asked for again"
    nothing_is_held(model)


def test_bandwidth_is_not_measured_on_damage(damaged: Path) -> None:
    budget = least(damaged, "paged")
    damage(damaged, "bf16", 0, [1], 700)
    with pytest.raises(BundleError, match="layer 0, expert 1, version bf16: its bytes do not match"):
        load(damaged, "paged", budget)


@pytest.mark.parametrize("tokens", [1, 300])
def test_packed_bytes_that_are_no_code_are_refused(bundle: Path, plain: Any, tokens: int) -> None:
    """What only decoding shows, in a product and beforehand: memory went bad after its digest was checked."""
    model = paged(bundle, "alpha=1,ahead=no")
    snapshot = model.moepack.layers[2].current
    extents = [h.packed.extent.numpy() for h in snapshot.handles]
    kept = [extent.copy() for extent in extents]
    for extent in extents:
        extent[600:60_000] = 0xFF
    with pytest.raises(BundleError, match=r"layer 2, expert \d+, version bf16: "):
        logits(model, ids(tokens, tokens))
    nothing_is_held(model)
    for extent, bytes_ in zip(extents, kept, strict=True):
        extent[:] = bytes_
    for handle in snapshot.handles:
        handle.packed._opened = [None, None]
        vars(handle.packed).pop("_parts", None)
    same(model, plain, tokens)


def test_prompts_look_ahead_and_tokens_do_not(bundle: Path) -> None:
    counts = {}
    for ahead in ("yes", "no"):
        model = paged(bundle, f"alpha=0.5,ahead={ahead}")
        logits(model, ids(0, 512))
        made = counts[ahead] = model.moepack.manager.paging.counts
        assert made.waits == model.moepack.counters()["forward_waits"] > 0 and made.waited > 0
        assert model.moepack.counters()["bytes_moved"] > 0 and all(made.demanded)
        brought = sum(made.ahead)
        logits(model, ids(1, 1))
        assert sum(made.ahead) == brought
        model.moepack.close()
    assert all(counts["yes"].ahead) and not any(counts["no"].ahead)
    assert counts["yes"].waits < counts["no"].waits


def test_traces_eval_and_threads_end(bundle: Path, evaluation: Path, tmp_path: Path) -> None:
    before = ours()
    given = LoadOptions(policy="paged:alpha=0.5", device_memory=least(bundle, "paged") + ROOM)
    out = evaluate(bundle, [str(evaluation)], given, samples=2, trace=tmp_path / "trace")
    other = evaluate(bundle, [str(evaluation)], LoadOptions(policy="static:bf16", device_memory=1 << 30), samples=2)
    assert out.perplexity == other.perplexity and out.forward_waits > 0
    trace = read_trace(tmp_path / "trace")
    assert all(n == 0 for record in trace.records for row in record.active for n in row), "bf16 is what is active"
    assert trace.records[-1].waits == out.forward_waits
    model = paged(bundle, "alpha=0.5")
    logits(model, ids(0, 512))
    assert {t.name for t in ours() - before} >= {"moepack-load-1", "moepack-load-2"}
    model.moepack.close()
    wait_for(lambda: not ours() - before)
    with pytest.raises(InputError, match="closed"):
        logits(model, ids(0, 4))
