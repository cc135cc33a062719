"""What may fail while versions change, what is seen of it, and how serving ends: real threads, on the CPU."""

import threading

import pytest
import torch
from live_models import FAST, ROOM, least, load, ours, run, wait_for
from support import PATIENCE

import moepack
from moepack.pack.errors import InputError
from moepack.runtime.store.files import Stored


def test_a_round_that_fails_is_seen_and_tried_again(bundle, caplog):
    model = load(bundle)
    live = model.moepack.manager
    assert model.moepack.health()["worker"] == "running" and model.moepack.health()["ok"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live.policy, "decide", lambda event: 1 / 0)
        wait_for(lambda: live.worker.failures > 0, model)
        health = model.moepack.health()
        assert not health["ok"] and health["worker"] == "failing" and "division by zero" in health["error"]
        assert torch.isfinite(run(model, 1)).all()
    wait_for(lambda: model.moepack.health()["ok"] and live.residency.counts.promotions > 0, model)
    assert model.moepack.counters()["worker_failures"] == live.worker.failures
    assert sum("a round failed" in r.getMessage() for r in caplog.records) == 1
    model.moepack.close()
    assert model.moepack.health()["worker"] == "stopped"
    assert moepack.load(bundle, policy="static:w2").moepack.health()["worker"] == "none"


def test_a_finalizer_on_the_workers_own_thread(bundle):
    """The collector may end a model on its own worker, between any two of its instructions."""
    before = ours()
    model = load(bundle)
    live = model.moepack.manager
    wait_for(lambda: live.residency.counts.promotions > 0, model)
    wakeups, ended = live.worker._wakeups, threading.Event()

    class Wakeups:
        """The queue, with the model's finalizer run inside `get`."""

        put, empty, qsize, get_nowait = wakeups.put, wakeups.empty, wakeups.qsize, wakeups.get_nowait

        @staticmethod
        def get(timeout):
            live.abandon()
            ended.set()
            wakeups.get(timeout=timeout)

    live.worker._wakeups = Wakeups
    live.worker.wake()
    wakeups.put(None)
    assert ended.wait(PATIENCE)
    live.worker.join()
    assert model.moepack.health()["worker"] == "stopped" and not live.store._files
    wait_for(lambda: not ours() - before)


@pytest.mark.parametrize("what", ["copy", "file"])
def test_what_never_ends_holds_no_pass_up(bundle, what, monkeypatch):
    """A copy; or opening a file of the high version, which happens when that is first asked for."""
    model = load(bundle)
    live, gate = model.moepack.manager, threading.Event()
    owner, name = (Stored, "read_into") if what == "copy" else (live.store, "stored")
    real = getattr(owner, name)
    # A pass that waits for it would end after a promotion.
    monkeypatch.setattr(owner, name, lambda *args: (gate.wait(PATIENCE), real(*args))[1])
    wait_for(lambda: len(live.residency.flying) > 0, model)
    for seed in range(10):
        run(model, seed)
    assert live.residency.counts.promotions == 0
    gate.set()
    wait_for(lambda: live.residency.counts.promotions > 0, model)


def test_a_pass_that_runs_while_the_model_is_closed(bundle):
    """It goes on with its epoch to its end; one that begins afterwards is told in one line."""
    model = load(bundle, FAST.replace("0.02", "1e9"))
    live = model.moepack.manager
    want = run(model, 3)
    keys = list(live.residency.entries)
    assert {name for row in model.moepack.versions for name in row} == {"w2"}

    def close(*_):
        live.transitions.want(dict.fromkeys(keys[::2], 0))
        wait_for(lambda: any(e.active == 0 for e in live.residency.entries.values()))
        model.moepack.close()

    hook = model.model.layers[1].register_forward_pre_hook(close)
    got = run(model, 3)
    hook.remove()
    assert torch.equal(got, want) and all(layer.steps is None for layer in live.layers), "and then it was let go"
    with pytest.raises(InputError, match="this model was closed: load the bundle again"):
        run(model, 3)
    with pytest.raises(InputError, match="this model was closed"), live.step():
        pass


@pytest.mark.parametrize("where", ["moepack.runtime.residency.opening.make_pools", "moepack.runtime.attach.own"])
def test_a_load_that_fails_leaves_no_thread(bundle, where, monkeypatch):
    before = ours()
    enough = least(bundle) + ROOM

    def failing(*_):
        raise MemoryError("planted")

    monkeypatch.setattr(where, failing)
    with pytest.raises(MemoryError, match="planted"):
        load(bundle, FAST, enough)
    assert not ours() - before
