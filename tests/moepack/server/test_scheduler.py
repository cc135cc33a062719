"""The scheduler: chunks, room, preemption, cancelling, failing, stopping. The engine is arithmetic."""

import itertools
import threading
import time

import pytest
from arithmetic import WORDS, Machine, expected, said
from live_models import wait_for

from moepack.runtime.planning.exceeded import BudgetExceeded
from moepack.server.batching import scheduler, turns
from moepack.server.batching.packed_cache import NotPackable
from moepack.server.batching.scheduler import SCORED
from moepack.server.errors import ApiError
from moepack.server.options import Sampling


def alone(prompts, count):
    """What each prompt is answered alone."""
    return [expected(prompt, count) for prompt in prompts]


def test_an_error_that_a_gpu_reports_late_fails_its_pass_alone(bench, monkeypatch):
    """It comes where the pass's tokens are read. Sequences that come later are answered."""
    b, found = bench(Machine(at_once=lambda: 16)), scheduler.likeliest_of

    def fails(*given):
        monkeypatch.setattr(scheduler, "likeliest_of", found)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(scheduler, "likeliest_of", fails)
    told = b.ask([1, 2], 5)
    wait_for(lambda: told and told[-1].error is not None)
    assert "the model failed" in str(told[-1].error)
    prompts = [[n, 3] for n in range(3)]
    assert b.answers(prompts, 5) == alone(prompts, 5)


def test_no_more_decode_at_once_than_a_replayed_pass_holds(bench):
    """Five sequences by passes of two, in turn; a pass that reads a prompt may have more."""
    served = []
    gate = threading.Event()
    machine = Machine(at_once=lambda: 2, gate=gate, before=lambda items: served.append([i.slot for i in items]))
    b = bench(machine, sequences=5)
    prompts = [[n + 1] for n in range(5)]
    assert b.answers(prompts, 12) == alone(prompts, 12)
    decoding = [p for p in b.machine.passes if all(before for _, before in p)]
    assert max(map(len, decoding)) == 2 and len(decoding) >= 5 * 11 // 2
    for slot in {slot for slots in served for slot in slots}:
        when = [n for n, slots in enumerate(served) if slot in slots]
        assert max(b - a for a, b in itertools.pairwise(when)) <= 6, "one waits longer than others"


def test_answers_do_not_change_by_turns(bench, monkeypatch):
    """Steps of several sequences wait, so these decode one at a time; a new one is read meanwhile, one that leaves."""
    monkeypatch.setattr(turns, "WINDOW", 0.05)
    monkeypatch.setattr(turns, "TURN", (0.005, 0.01))

    def waits(items):
        seconds = 0.001 if len(items) == 1 else 0.01 * len(items)
        time.sleep(seconds)
        machine.seconds += seconds

    machine = Machine(gate=threading.Event(), before=waits)
    b = bench(machine, sequences=5)
    told = [b.ask([n + 1] * (n + 1), 200) for n in range(4)]
    b.open()
    wait_for(lambda: b.scheduler.turns.most == 1)
    told.append(b.ask([5] * 5, 200))
    b.jobs[0].cancelled = True
    b.ended()
    for n, events in enumerate(told[1:], 1):
        assert said(events) == expected([n + 1] * (n + 1), 200)
    assert any(len(p) == 1 for p in machine.passes) and machine.held() == 0


def crowded(bench, room, count, tokens, kept=0, **limits):
    """Answer several sequences at once in `room` tokens, each as it is alone."""
    b = bench(Machine(room=room, kept=kept, gate=threading.Event()), step_tokens=16, **limits)
    prompts = [[n + 1] * 5 for n in range(count)]
    assert b.answers(prompts, tokens) == alone(prompts, tokens)
    return b


@pytest.mark.parametrize("room, limits", [(60, {}), (1 << 30, {"kv_tokens": 60})])
def test_no_more_is_held_than_there_is_room_for(room, limits, bench):
    """The budget or the limit of the caches holds 60 tokens. Of three sequences of up to 45 each, the others wait, and
    every answer is what it is alone."""
    b = crowded(bench, room, 3, 40, **limits)
    assert 44 <= b.machine.most_held <= 60 and (limits or b.scheduler.totals.preempted == 0)
    assert b.scheduler.most_answer(20) == 40


def test_the_youngest_gives_way_and_is_read_again(bench):
    b = crowded(bench, 100, 2, 80)
    assert b.machine.most_held <= 100 and b.scheduler.totals.preempted >= 1
    assert b.scheduler.totals.generated_tokens == 160  # none was sampled twice


def test_what_can_never_fit_is_refused_with_what_would(bench):
    scheduler = bench(Machine(room=100)).scheduler
    assert scheduler.most_answer(30) == 70
    with pytest.raises(ApiError, match=r"100 tokens > 99 maximum .* which the memory budget holds now") as caught:
        scheduler.most_answer(100)
    assert caught.value.status == 400
    assert bench(context=50).scheduler.most_answer(30) == 20
    with pytest.raises(ApiError, match=r"50 tokens > 49 maximum \(this model's maximum context length is 50 tokens\)"):
        bench(context=50).scheduler.most_answer(50)
    with pytest.raises(ApiError, match="prompt is too long: 21 tokens > 20 maximum"):
        bench(prompt=20).scheduler.most_answer(21)


def test_a_full_queue(bench):
    b = bench(Machine(gate=threading.Event()), sequences=1, waiting=3)
    b.ask([1], 5)
    wait_for(lambda: b.scheduler.running)
    for _ in range(3):
        b.ask([2], 5)
    with pytest.raises(ApiError) as caught:
        b.ask([3], 5)
    assert caught.value.status == 429
    b.open()
    b.ended()


def test_a_cancelled_job_leaves_before_the_next_step(bench):
    b = bench(Machine(gate=threading.Event()))
    b.ask([1], 900)
    b.ask([2], 5)
    b.jobs[0].cancelled = True
    b.open()
    b.ended()
    wait_for(lambda: not b.scheduler.running)
    assert b.scheduler.totals.cancelled == 1 and b.machine.held() == 0 and len(b.machine.passes) < 20


def test_ends_and_stop_strings(bench):
    b = bench()
    whole = expected([3, 4], 10).split()
    told = b.ask([3, 4], 10, ends=frozenset({int(whole[4])}))
    at = whole.index(whole[4])
    b.ended()
    assert said(told).split() == whole[:at] and told[-1].finish == "stop" and told[-1].generated == at + 1
    told = b.ask([3, 4], 10, stops=(f"{whole[2]} {whole[3]}",), sampling=Sampling(temperature=0, top_logprobs=1))
    b.ended()
    assert said(told).split() == whole[:2] and told[-1].finish == "stop"
    assert [s.token for e in told for s in e.scored] == [int(t) for t in whole[:2]]  # none of what was cut off


def test_probabilities_of_a_prompt(bench):
    """Each token's, given those before it, in a prompt longer than a step, beside others; in slices, to save memory."""
    b = bench(step_tokens=64)
    prompt = [n * 7 % 31 for n in range(150)]
    b.ask([1], 50)
    told = b.ask(prompt, 1, wants_prompt=True, sampling=Sampling(temperature=0, top_logprobs=1))
    b.ended()
    found = next(e.prompt for e in told if e.prompt)
    assert [s.token for s in found] == prompt and found[0].logprob is None
    for n in range(1, len(prompt)):
        assert found[n].top[0][0] == sum(prompt[:n]) % WORDS
    assert max(count for p in b.machine.passes for count, _ in p) == SCORED
    alone = b.ask(prompt, 0, wants_prompt=True, sampling=Sampling(temperature=0, top_logprobs=0))
    b.ended()
    assert [s.logprob for s in alone[-1].prompt] == [s.logprob for s in found]
    assert alone[-1].generated == 0 and alone[-1].finish == "length"


def test_a_budget_that_refuses_is_asked_for_less(bench):
    """The budget refuses passes of more than three tokens: prompts go in smaller pieces, and nothing is lost."""
    most = 3

    def refuse(items):
        if sum(len(i.tokens) for i in items) > most:
            raise BudgetExceeded(f"more than {most}")

    b = bench(Machine(before=refuse))
    prompts = [[n + 1] * 20 for n in range(5)]
    assert b.answers(prompts, 5) == alone(prompts, 5)
    most = 0
    told = [b.ask([1] * 9, 5), b.ask([2], 5)]
    b.ended()
    assert all(e[-1].error is not None and "more than 0" in str(e[-1].error) for e in told) and b.machine.held() == 0


def test_passes_that_ran_before_a_refusal_count(bench):
    """The fault: a prompt that had been read, and whose logits were lost, was asked for no token any more."""
    prompts = [[n + 1] * 9 for n in range(3)]
    assert bench(Machine(ran=1)).answers(prompts, 5) == alone(prompts, 5)


@pytest.mark.parametrize(("room", "limits"), [(300, {}), (1 << 30, {"kv_tokens": 300})])
def test_kept_chunks_leave_before_a_request_waits(room, limits, bench):
    """Two sequences of 45 tokens fit beside 192 kept ones, three beside 128, and four beside 64."""
    for count, kept in ((2, 192), (3, 128), (4, 64)):
        b = crowded(bench, room, count, 40, kept=192, **limits)
        assert b.machine.kept == kept and b.scheduler.totals.preempted == 0
        assert max(len(p) for p in b.machine.passes) == count


def test_a_pass_that_fails_fails_its_sequences_alone(bench):
    broken = True

    def fail(items):
        if broken:
            raise OSError("the disk is gone")

    b = bench(Machine(before=fail, kept=128))
    told = b.ask([1], 5)
    b.ended()
    assert told[-1].error is not None and told[-1].error.status == 500
    wait_for(lambda: not b.machine.kept)  # memory may have been short
    assert not b.scheduler.health()["ok"] and "the disk is gone" in str(b.scheduler.health()["error"])
    broken = False
    assert b.answers([[1]], 5) == alone([[1]], 5) and b.scheduler.health()["ok"]


def test_a_model_that_cannot_be_packed_after_all_is_read_again(bench):
    def fail(items):
        if not b.machine.passes:
            b.machine.passes.append([])
            b.machine.caches.clear()
            raise NotPackable("no")

    b = bench(Machine(before=fail))
    prompts = [[n + 1] * 3 for n in range(3)]
    assert b.answers(prompts, 5) == alone(prompts, 5)


def test_stopping_finishes_what_runs_and_drops_what_waits(bench):
    b = bench(Machine(gate=threading.Event()), sequences=1)
    told = [b.ask([1], 30), b.ask([2], 30)]
    wait_for(lambda: b.scheduler.running)
    b.scheduler.stop()
    b.open()
    b.ended()
    assert said(told[0]) == expected([1], 30)
    assert told[1][-1].error.status == 503
    with pytest.raises(ApiError, match="stopping"):
        b.ask([1], 1)


def test_closing_drops_what_runs(bench):
    b = bench(Machine(before=lambda items: time.sleep(0.05)))
    told = b.ask([1], 900)
    wait_for(lambda: told)
    b.scheduler.close()
    assert len(told) < 900 and told[-1].error.status == 503
