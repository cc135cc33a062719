"""Who waits for room, for what and for how long: with caches of one byte a token, and no model."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch
from live_models import wait_for
from support import PATIENCE

from moepack.pack.errors import InputError
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.fixed import Activations, KvShape, MeasuredNeeds, Workload
from moepack.runtime.residency import kv_reserve
from moepack.runtime.residency.kv_reserve import KvBudget
from moepack.runtime.residency.reserves import FreeReserve

MOST = 1000  # bytes for caches, and so tokens; a token takes one more of activations, ten are held back


class Cache:
    """Of one byte a token."""

    def __init__(self, tokens=0):
        self.held = torch.empty(tokens, dtype=torch.uint8)

    def get_seq_length(self):
        return len(self.held)


@pytest.fixture
def watch(monkeypatch):
    monkeypatch.setattr(kv_reserve, "PATIENCE", 1.0)
    monkeypatch.setattr(kv_reserve, "LINGER", 0.0)
    monkeypatch.setattr(kv_reserve, "STEP", 1)
    passes = Activations((1, 2), (1, 2), (1.0, 1.0, 2.0, 2.0))
    needs = MeasuredNeeds(Workload(prefill_tokens=10), KvShape(((0, 1, None),)), 10, passes)
    config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(use_cache=True))
    return KvBudget(config, needs, FreeReserve(BudgetTracker(MOST, 0)), MOST)


def run(watch, tokens, cache=None, inside=lambda: None):
    """A pass of so many tokens; what it leaves."""
    with watch.room({"input_ids": torch.zeros(1, tokens), "past_key_values": cache}) as done:
        inside()
        left = cache or Cache()
        left.held = torch.empty(len(left.held) + tokens, dtype=torch.uint8)
        done((left,))
    return left


def made(watch, tokens):
    """A cache of so many tokens, by passes whose activations are held back."""
    cache = Cache()
    for _ in range(0, tokens, 10):
        run(watch, 10, cache)
    return cache


def bare(watch, tokens=5, inside=lambda: None):
    """A pass without a cache."""
    with watch.room({"input_ids": torch.zeros(1, tokens), "use_cache": False}):
        inside()


class Beside(threading.Thread):
    """What runs meanwhile; `end` waits for it and says what it raised and how long it took."""

    def __init__(self, work):
        super().__init__(daemon=True)
        self._work, self.error, self.seconds = work, None, 0.0
        self.start()

    def run(self):
        began = time.monotonic()
        try:
            self._work()
        except BaseException as error:
            self.error = error.with_traceback(None)  # whose frames would hold a cache
        self.seconds = time.monotonic() - began

    def end(self):
        self.join(PATIENCE)
        assert not self.is_alive()
        return self.error


@pytest.fixture
def patient(monkeypatch):
    """Nobody is refused for having waited too long."""
    monkeypatch.setattr(kv_reserve, "PATIENCE", float(PATIENCE))


@pytest.fixture
def somebody():
    """Another thread, which might let a cache go."""
    end = threading.Event()
    other = Beside(end.wait)
    yield
    end.set()
    other.end()


def test_a_cache_that_became_smaller_outside_a_pass_is_counted_again(watch):
    cache = made(watch, 600)
    cache.held = cache.held[:100].clone()
    assert watch.used == 600
    watch.recount(cache)
    assert watch.used == 100
    watch.recount(Cache(50))  # no pass has seen it
    assert watch.used == 100
    made(watch, 800)


def test_what_never_fits_is_refused_at_once_and_holds_up_nobody(watch):
    gate = threading.Event()
    other = Beside(lambda: run(watch, 10, inside=gate.wait))
    wait_for(lambda: bool(watch._passes))
    with pytest.raises(InputError, match=r"which holds \d+ tokens; 1 other passes run"):
        run(watch, MOST + 1)
    bare(watch)
    assert not watch.waits and not watch._queue.waiting
    gate.set()
    assert other.end() is None


def test_what_fits_passes_one_that_cannot_run_now(watch, somebody, patient):
    held = made(watch, 600)
    large = Beside(lambda: run(watch, 450))
    wait_for(lambda: len(watch._queue.waiting) >= 1)
    bare(watch)
    run(watch, 20)
    assert watch.waits == 1 and watch._queue.waiting, "what was held and 20 tokens more fits"
    del held
    assert large.end() is None


def test_a_large_pass_does_not_starve_behind_small_ones(watch, monkeypatch):
    """Two threads whose passes overlap all the time: each ends once the next has begun, or cannot begin."""
    monkeypatch.setattr(kv_reserve, "PATIENCE", 8.0)  # half of it passes before the large one goes first
    stop, begun, passes = threading.Event(), threading.Condition(), [0]

    def until_the_next_began():
        with begun:
            passes[0] += 1
            mine = passes[0]
            begun.notify_all()
            begun.wait_for(lambda: passes[0] > mine, 0.25)

    def small():
        while not stop.is_set():
            bare(watch, 150, inside=until_the_next_began)

    others = [Beside(small), Beside(small)]
    with begun:
        assert begun.wait_for(lambda: passes[0] > 1, PATIENCE)
    large = Beside(lambda: run(watch, 450))  # 900 bytes, beside which 150 more do not fit
    assert large.end() is None  # and not refused, as it is when it has waited for PATIENCE
    stop.set()
    assert [other.end() for other in others] == [None, None]


def test_a_wait_that_was_in_vain_says_what_for(watch, monkeypatch):
    """Bytes that could be reserved, and never are: experts that do not leave."""
    monkeypatch.setattr(FreeReserve, "grow", lambda self, size: False)
    with pytest.raises(InputError, match="over 8 tokens of 1 sequence waited 1 s for experts or other passes"):
        run(watch, 8)


@pytest.mark.parametrize("inside", [False, True])
def test_a_prompt_waits_for_a_generation_that_goes_on(watch, inside, patient):
    """Whether it comes while a token is decoded or between two: the tokens do not wait for it, and it waits."""
    began, prompts = threading.Event(), []

    def generate():
        cache = made(watch, 600)
        began.set()
        for _ in range(10):
            run(watch, 1, cache, inside=lambda: time.sleep(0.03 * inside))
            time.sleep(0.03 * (not inside))

    generation = Beside(generate)
    assert began.wait(PATIENCE)
    prompts.append(Beside(lambda: run(watch, 450)))
    wait_for(lambda: len(watch._queue.waiting) >= 1)
    assert generation.end() is None
    assert prompts[0].end() is None and watch.waits == 1


def test_two_generations_that_wait_for_each_other(watch, patient):
    """The one that closes the circle is refused at once, and the other goes on."""
    both = threading.Barrier(2, timeout=PATIENCE)

    def generate(after):
        cache = made(watch, 400)
        both.wait()
        wait_for(lambda: len(watch._queue.waiting) >= after)
        run(watch, 200, cache)

    one, two = (Beside(lambda after=after: generate(after)) for after in (0, 1))
    assert one.end() is None and isinstance(two.end(), InputError)


def test_who_is_alone_is_refused_at_once(watch, monkeypatch):
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    held = made(watch, 600)
    with pytest.raises(InputError, match="other caches"):
        run(watch, 450)
    assert not watch.waits and len(held.held) == 600


def test_those_that_wait_sleep_until_something_happens(watch, monkeypatch):
    monkeypatch.setattr(kv_reserve, "PATIENCE", float(PATIENCE))
    monkeypatch.setattr(kv_reserve, "LOOK", (20.0, 20.0))
    gate = threading.Event()
    running = Beside(lambda: run(watch, 400, inside=gate.wait))
    wait_for(lambda: bool(watch._passes))
    others = [Beside(lambda: bare(watch, 900)) for _ in range(3)]
    wait_for(lambda: len(watch._queue.waiting) >= 3)
    gate.set()
    assert [other.end() for other in [running, *others]] == [None] * 4, "each is woken by the end of the one before"
    held = made(watch, 600)
    large = Beside(lambda: run(watch, 450))
    wait_for(lambda: len(watch._queue.waiting) >= 1)
    del held
    assert large.end() is None, "and by the death of a cache"
