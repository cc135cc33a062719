"""Forward passes as steps: however they begin and end, from several threads; and what all of them take together."""

import contextlib
import gc
import inspect
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from live_models import FAST, load, wait_for
from support import PATIENCE, at_once, ids, load_for_logits
from transformers import StaticCache

import moepack
from moepack.pack.errors import InputError
from moepack.runtime.kv.growing import CodedKvLayer
from moepack.runtime.kv.sizes import cache_bytes
from moepack.runtime.planning.skeleton import LiveBytes
from moepack.runtime.residency.kv_queue import PassClaim
from moepack.runtime.step.context import current


@pytest.fixture
def model(bundle):
    return load(bundle, room=3_000_000, prefill_tokens=64)


def busy(model, threads, seconds):
    """Promotions while so many threads run passes that overlap all the time, and what is hot keeps changing."""
    stop = time.monotonic() + seconds
    live = model.moepack.manager
    before = live.residency.counts.promotions

    def work(number):
        seed = number
        with torch.inference_mode():
            while time.monotonic() < stop:
                seed += threads
                tokens = 1 + (int(10 * time.monotonic()) % 2) * 2000 + ids(48, seed) % 1500
                assert torch.isfinite(model(tokens, use_cache=False).logits).all()

    at_once(work, threads)
    return int(live.residency.counts.promotions - before)


def test_passes_that_overlap_do_not_starve_promotions(model):
    """With publication between steps only, 319 passes that overlapped gave none; the rest is the machine's cores."""
    live = model.moepack.manager
    done = threading.Event()

    def always():
        """A step is open at every moment: two take turns, each ending after the other has begun."""
        first = live.step()
        first.__enter__()
        while not done.wait(0.0005):
            second = live.residency.begin()
            first.__exit__(None, None, None)
            first = live.step()
            first.__enter__()
            live.residency.end(second[0])
        first.__exit__(None, None, None)

    thread = threading.Thread(target=always)
    thread.start()
    try:
        promotions = busy(model, 2, 3.0)
    finally:
        done.set()
        thread.join()
    counters = model.moepack.counters()
    assert promotions > 20 and counters["forward_waits"] == 0
    assert live.tracker.peak <= live.plan.budget


def open_steps(model):
    return len(model.moepack.manager.residency.steps.open)


def raising(error):
    def fail(*_):
        raise error("planted")

    return fail


@pytest.mark.parametrize("policy", [FAST, "lru:hi=bf16,lo=w2", "importance"])
def test_an_interrupted_pass_ends_its_step(bundle, policy):
    model = load(bundle, policy, room=2_000_000, prefill_tokens=64)
    for error in (KeyboardInterrupt, SystemExit, RuntimeError):
        hook = model.model.layers[2].register_forward_pre_hook(raising(error))
        for call in (model, model.forward, model.model, model.model.forward):
            with pytest.raises(error), torch.inference_mode():
                call(ids(20))
            assert open_steps(model) == 0 and not model.moepack.caches._passes
        hook.remove()
    out = []  # under lru, passes take turns by a lock: another thread finds it free

    def again():
        with torch.inference_mode():
            out.append(model(ids(20)).logits)

    thread = threading.Thread(target=again)
    thread.start()
    thread.join(PATIENCE)
    assert out and torch.isfinite(out[0]).all()


@pytest.mark.parametrize("policy", [FAST, "lru:hi=bf16,lo=w2"])
def test_an_interruption_inside_a_context_leaves_nothing_even_if_it_is_kept(policy, bundle):
    """The fault: a context that has begun, and that no `with` knows of yet, stays open as long as the traceback."""
    model = load(bundle, policy, room=2_000_000, prefill_tokens=64)
    manager = model.moepack.manager
    kept = []
    with torch.inference_mode():
        wanted = model(ids(20)).logits.shape
        for place in range(200):
            left = iter(range(place))

            def interrupt(frame, event, _, left=left):
                inside = frame.f_code.co_filename == contextlib.__file__ and event in ("c_return", "return")
                if inside and next(left, None) is None:
                    sys.setprofile(None)
                    raise KeyboardInterrupt

            sys.setprofile(interrupt)
            try:
                model(ids(20))
            except KeyboardInterrupt as error:
                kept.append(error)
            else:
                break
            finally:
                sys.setprofile(None)
            assert current() is None and open_steps(model) == 0 and not model.moepack.caches._passes, place
            assert not manager._one_at_a_time._lock._is_owned(), place
        assert len(kept) > 20 and model(ids(20)).logits.shape == wanted
    with manager.pass_lock():
        kept.clear()
        assert manager._blocking == manager._one_at_a_time._lock._is_owned(), "an earlier pass does not end this one"
    model.moepack.close()


def test_what_a_second_interruption_left_ends_with_the_threads_next_pass(bundle):
    """Planted: what a pass has between two instructions, where an interruption would leave it."""
    model = load(bundle, "lru:hi=bf16,lo=w2", room=2_000_000, prefill_tokens=64)
    manager = model.moepack.manager
    manager.residency.begin()
    manager.pass_lock().__enter__()
    model.moepack.caches._passes.add(PassClaim(None, 10**9, 10**9))
    with torch.inference_mode():
        model(ids(20))
    assert open_steps(model) == 0 and not model.moepack.caches._passes
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(manager._one_at_a_time._lock.acquire, timeout=PATIENCE).result(), (
            "another thread finds it free"
        )
    model.moepack.close()


@pytest.mark.parametrize("what", ["pages", "mark"])
def test_a_step_ends_though_its_pages_or_its_mark_do_not(model, what, monkeypatch):
    """Else the blocks that it could read would never be free again."""
    live = model.moepack.manager
    if what == "pages":
        monkeypatch.setattr(live, "in_place", SimpleNamespace(begin=lambda: None, end=raising(RuntimeError)))
    else:
        monkeypatch.setattr(live.residency, "_mark", raising(RuntimeError))
    with pytest.raises(RuntimeError, match="planted"), live.step():
        pass
    monkeypatch.undo()
    assert open_steps(model) == 0


def test_every_way_to_run_a_pass_is_a_step(model):
    """One number for the model, its decoder, and their `forward`; one for each layer where experts are called alone."""
    residency = model.moepack.manager.residency
    x, expert = ids(8), model.model.layers[1].mlp.experts
    with torch.inference_mode():
        for call in (model, model.forward, model.model, model.model.forward):
            before = residency.steps.begun
            call(x)
            assert residency.steps.begun == before + 1 and open_steps(model) == 0
        before = residency.steps.begun
        expert(torch.zeros(1, 128, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))
        assert residency.steps.begun == before + 1
        with model.moepack.manager.step():
            model(x)
            assert residency.steps.begun == before + 2, "what runs inside a step belongs to it"


def test_a_step_sees_one_epoch(bundle):
    """Between two layers of a pass all experts are switched: the pass goes on with what it began with."""
    idle = FAST.replace("interval=0.02", "interval=1000")  # the policy itself switches none
    model = load(bundle, idle, room=3_000_000, prefill_tokens=64)
    live = model.moepack.manager
    live.device.limit(None)
    seen = []

    def switch(*_):
        live.transitions.want(dict.fromkeys(list(live.residency.entries)[::2], 0))
        wait_for(lambda: sum(e.active == 0 for e in live.residency.entries.values()) >= 8, live.transitions.tick)
        seen.append({h.version.name for layer in live.layers for h in layer.current.handles})

    with torch.inference_mode():
        want = model(ids(24), use_cache=False).logits
        versions = model.moepack.versions
        hook = model.model.layers[1].register_forward_pre_hook(switch)
        got = model(ids(24), use_cache=False).logits
        hook.remove()
        after = model(ids(24), use_cache=False).logits
    assert all(name == "w2" for row in versions for name in row) and seen == [{"w2", "bf16"}]
    assert torch.equal(got, want), "the pass under which versions changed"
    assert not torch.equal(after, want)


@pytest.mark.parametrize(("policy", "memory"), [("static:w2", None), ("static:w2", 1 << 30), (FAST, 30_000_000)])
def test_the_model_is_let_go_at_once(bundle, policy, memory):
    """Nothing that watches it makes a circle of references: experts' memory goes with the model, uncollected."""
    gc.collect()
    gc.disable()
    try:
        model = load_for_logits(bundle, policy=policy, device_memory=memory, kv_tokens=64)
        assert type(model).__name__ == "Qwen3MoeForCausalLM"
        assert "logits_to_keep" in inspect.signature(model.forward).parameters
        with torch.inference_mode():
            model.generate(ids(8), max_new_tokens=2)
        experts = model.moepack.layers[0]
        parts = [weakref.ref(model), weakref.ref(model.moepack), weakref.ref(experts.current.handles[0].extent)]
        del model, experts
        wait_for(lambda: all(part() is None for part in parts))  # threads that change versions end by themselves
    finally:
        gc.enable()


# --- what a pass is given, and asked to return


@torch.inference_mode()
def test_caches_and_embeddings_are_seen_however_they_are_given(bundle):
    model = load(bundle, "static:w2", room=700_000, prefill_tokens=64)
    watch, x = model.moepack.caches, ids(8)
    mask = torch.ones_like(x)
    cache = StaticCache(model.config, max_cache_len=500)
    model(x, mask, None, cache)
    assert watch.used == cache_bytes(cache) > 500_000
    del cache
    with pytest.raises(InputError, match="a forward pass over 5000 tokens"):
        model(x, mask, None, StaticCache(model.config, max_cache_len=5000))
    long = model.model.embed_tokens(ids(3000))
    for call in (model, model.forward, model.model):
        with pytest.raises(InputError, match="a forward pass over 3000 tokens"):
            call(None, None, None, None, long)
    assert watch.used == 0 and torch.isfinite(model(None, None, None, None, long[:, :8]).logits).all()
    with pytest.raises(TypeError, match="multiple values"):
        model(x, input_ids=x)


def test_a_pass_without_a_cache_codes_its_own(bundle):
    """However its caller says that there is none; what does not fit the forward is refused as it was."""
    model = moepack.load(bundle, policy="static:w4", kv=8)
    with torch.no_grad():
        made = [
            model(ids(8), None, None, None),
            model(ids(8), past_key_values=None),
            model.model(ids(8), None, None, None),
        ]
        for layer in [layer for out in made for layer in out.past_key_values.layers]:
            assert type(layer) is CodedKvLayer and layer.keys.dtype == torch.uint8
        with pytest.raises(TypeError, match="multiple values for argument 'input_ids'"):
            model(ids(8), input_ids=ids(8))


def test_the_cache_of_continuous_batching_is_refused_before_it_is_made(bundle):
    model = load(bundle, "static:w2", room=700_000, prefill_tokens=64)
    before = model.moepack.tracker.peak
    for call in (lambda: model.generate_batch([[1, 2, 3]]), model.init_continuous_batching):
        with pytest.raises(InputError, match="continuous batching is not counted in a budget"):
            call()
    with pytest.raises(InputError, match="continuous batching is not counted in a budget"):
        model(ids(4), cache=type("PagedAttentionCache", (), {})())
    assert model.moepack.tracker.peak == before
    assert type(moepack.load(bundle, policy="static:w2").init_continuous_batching()).__name__.endswith("Manager")


ASKED = {  # what a pass is asked for, and how it is loaded
    "all logits": ({}, {"all_logits": False}),
    "some logits": ({"logits_to_keep": 200}, {"all_logits": False}),
    "a loss": ({"labels": True}, {}),
    "a loss of all logits": ({"labels": True}, {"all_logits": False}),
    "hidden states": ({"output_hidden_states": True}, {}),
    "attentions": ({"output_attentions": True}, {"attn_implementation": "eager"}),
    "router logits": ({"output_router_logits": True}, {}),
}


@pytest.mark.parametrize(("asked", "options"), ASKED.values(), ids=ASKED)
def test_what_a_pass_returns_counts(bundle, asked, options):
    """In the smallest budget more than the workload's is refused; what counts is what storages add up to, or more."""
    attention = {k: v for k, v in options.items() if k != "all_logits"}
    workload = {k: v for k, v in options.items() if k == "all_logits"}
    model = load_for_logits(bundle, policy="static:w2", device_memory=1 << 30, prefill_tokens=256, **options)
    x, watch, seen = ids(256), model.moepack.caches, []
    given = {**asked, "labels": x} if asked.get("labels") else asked
    provide = watch._provide
    watch._provide = lambda mine, *rest: (seen.append(mine), provide(mine, *rest))
    peaks = []
    for extra in ({"logits_to_keep": 1} if workload else {}, given):
        with torch.no_grad(), LiveBytes(model) as live:
            out = model(x, use_cache=False, **extra)
        peaks.append(live.peak)
        del out
    plain, more = seen
    assert plain.returned == 0 and peaks[1] <= more.beside, (peaks, more)
    assert more.returned <= 1.3 * (peaks[1] - peaks[0]) + plain.beside, "and not much more than that"
    small = load(bundle, "static:w2", room=0, prefill_tokens=256, **workload)
    if attention:
        small.set_attn_implementation("eager")
    with torch.inference_mode():
        small(x, use_cache=False, **({"logits_to_keep": 1} if workload else {}))
        with pytest.raises(InputError, match="more than is held back for activations"):
            small(x, use_cache=False, **given)


# --- traces


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_ends_the_trace_and_nothing_else(bundle, tmp_path, caplog):
    model = load(bundle, room=1_000_000, prefill_tokens=64)
    model.moepack.trace(tmp_path / "trace")
    model.moepack._wrapper._trace._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
    with torch.inference_mode():
        for seed in range(3):
            assert torch.isfinite(model(ids(8, seed), use_cache=False).logits).all()
    model.moepack.close()
    said = f"{tmp_path / 'trace'}: the trace ends early, it cannot be written: No space left on device"
    assert caplog.text.count(said) == 1
    assert not model.moepack.manager.worker._thread.is_alive()
