"""What is fair between requests: the rule by itself, and a scheduler whose clock is the number of its passes."""

from collections import Counter

import hypothesis.strategies as st
import pytest
from arithmetic import Bench, Machine, expected
from hypothesis import example, given, settings
from live_models import wait_for

from moepack.server.batching.fairness import UnreadPrompt, claims, gives_way, joins, shares
from moepack.server.batching.jobs import Job
from moepack.server.options import Limits, Sampling

# --- the rule

LEFT = st.integers(1, 60)
PROMPTS = st.lists(st.builds(UnreadPrompt, st.integers(0, 4), LEFT, LEFT, st.none() | st.integers(0, 2)), max_size=12)


@given(st.integers(0, 40), PROMPTS, st.integers(1, 64))
@settings(max_examples=400, deadline=None)
def test_a_pass_is_shared(decoding, prompts, room):
    """It is full if there is enough to read. Nobody reads more than it may, nor what another one reads. The oldest
    request has half of what prompts have, and one that is shorter than all others and fits the other half, all."""
    decodes, given = shares(decoding, prompts, room)
    counts = dict(given)
    assert len(counts) == len(given) and all(0 < count <= prompts[n].wanted for n, count in given)
    chunks = [prompts[n].chunk for n in counts if prompts[n].chunk is not None]
    read = sum(counts.values())
    assert decodes <= decoding and decodes + read <= room
    assert decodes >= min(decoding, room // 2), "prompts take no more than half from those that decode"
    assert decodes == decoding or decodes + read == room
    if not prompts:
        assert decodes == min(decoding, room)
        return
    by_request = Counter()
    for n, count in given:
        by_request[prompts[n].request] += count
    oldest = min(one.request for one in prompts)
    first_readers = {
        (one.request, n if one.chunk is None else one.chunk): one for n, one in reversed([*enumerate(prompts)])
    }
    its_own = sum(one.wanted for (request, _), one in first_readers.items() if request == oldest)
    assert by_request[oldest] >= min(its_own, (read + 1) // 2)
    assert len(set(chunks)) == len(chunks)
    left = Counter()
    for (request, _), one in first_readers.items():
        left[request] += one.left
    shortest = min(left, key=lambda request: (left[request], request))
    mine = [n for n, one in enumerate(prompts) if one.request == shortest]
    free = all(prompts[n].chunk is None for n in mine)
    if free and shortest != oldest and sum(prompts[n].wanted for n in mine) <= read // 2:
        assert all(counts.get(n) == prompts[n].wanted for n in mine)


def test_equal_prompts_are_read_one_after_the_other():
    """Not side by side, which would end all of them late."""
    prompts = [UnreadPrompt(n, 100, 100) for n in range(3)]
    assert shares(4, prompts, 64) == (4, [(0, 60)])
    assert shares(0, prompts, 128) == (0, [(0, 100), (1, 28)])


def test_a_request_is_as_long_as_all_that_it_reads():
    """Two choices of 40 tokens come after one prompt of 50, and before it if they read the same."""
    alone = UnreadPrompt(2, 50, 50)
    assert shares(0, [UnreadPrompt(0, 500, 500), *[UnreadPrompt(1, 40, 40)] * 2, alone], 100)[1] == [(3, 50), (0, 50)]
    same = [UnreadPrompt(1, 40, 40, "chunk")] * 2
    assert shares(0, [UnreadPrompt(0, 500, 500), *same, alone], 100)[1] == [(1, 40), (3, 10), (0, 50)]


@given(st.lists(st.integers(0, 5), min_size=1), st.lists(st.integers(0, 5), min_size=1))
def test_places_go_to_who_has_fewest(waiting, running):
    held = Counter(running)
    one = joins(waiting, running)
    assert held[waiting[one]] == min(held[request] for request in waiting)
    assert all(held[request] > held[waiting[one]] for request in waiting[:one])
    victim = gives_way(running)
    assert held[running[victim]] == max(held.values())
    assert all(held[request] < held[running[victim]] for request in running[victim + 1 :])
    assert len(running) == 1 or victim > 0
    assert claims(waiting[one], running) == (held[waiting[one]] == 0 and max(held.values()) > 1)


# --- a scheduler


class Clocked:
    """A scheduler whose clock is its passes: what is asked in a pass is known to the next one."""

    def __init__(self, **limits):
        self.due = lambda number: None  # called in each pass, with its number from 0
        self.first = {}  # the pass that made a request's first token
        self.asked = {}  # the pass in which a request came
        self.told = {}  # the text of a request's choice
        self.finished = Counter()
        self.wanted = {}  # prompt, answer, choices
        self.shares = []  # sequences of each request in a pass
        self.late = []  # what to do if nobody is left
        machine = Machine(before=self._before)
        self.bench = Bench(machine, Limits(waiting=1000, context=1000, **limits))
        self.scheduler = self.bench.scheduler
        post = self.scheduler._post

        def posted(events):
            post(events)
            if self.late and not self.scheduler.running and not self.scheduler.waiting:
                self.late.pop()()

        self.scheduler._post = posted

    def _before(self, items):
        running = Counter(one.request for one in self.scheduler._running)
        waiting = {one.request for one in self.scheduler._waiting}
        assert sum(len(item.tokens) for item in items) <= self.scheduler.limits.step_tokens
        assert waiting <= set(running) or max(running.values()) == 1, "one has several places while another has none"
        self.shares.append(running)
        self.due(self.now)

    @property
    def now(self):
        return len(self.bench.machine.passes)

    def ask(self, prompt, answer=1, choices=1):
        """Send a request; return its number."""
        number = len(self.asked)
        tokens = [1 + (number * 7 + n) % 40 for n in range(prompt)]
        self.asked[number] = self.now
        self.wanted[number] = tokens, answer, choices

        def hear(choice, event):
            assert event.error is None
            self.told[number, choice] = self.told.get((number, choice), "") + event.text
            self.first.setdefault(number, self.now - 1)
            self.finished[number] += event.finish is not None

        sampling = Sampling(temperature=0)
        jobs = [Job(tokens, answer, sampling, lambda event, n=n: hear(n, event)) for n in range(choices)]
        self.scheduler.submit(jobs)
        return number

    def has_ended(self, number):
        return self.finished[number] == self.wanted[number][2]

    def end(self):
        """Wait until all is answered, as each choice is answered alone."""
        wait_for(lambda: all(map(self.has_ended, tuple(self.asked))) and not self.late)
        for number, (prompt, answer, choices) in self.wanted.items():
            assert {self.told[number, n] for n in range(choices)} == {expected(prompt, answer)}

    def waited(self, number):
        """Passes between a request and its first token: 1 if the next pass made it."""
        return self.first[number] - self.asked[number]


@pytest.fixture
def clocked():
    made = []

    def call(**limits):
        made.append(Clocked(**limits))
        return made[-1]

    yield call
    for one in made:
        one.scheduler.close()


@pytest.mark.parametrize("others", [[(190, 2, 1)] * 3, [(10, 24, 128)], [(10, 24, 32)] * 4, [(190, 2, 8), (1, 60, 8)]])
def test_a_short_request_has_its_first_token_in_the_next_pass(others, clocked):
    """Behind long prompts, behind many choices, behind many requests of several, whenever it comes."""
    c = clocked(sequences=8, step_tokens=26)
    short = []

    def due(number):
        if number % 5 == 2 and number < 40:
            short.append(c.ask(5, 3))

    c.due = due
    for other in others:
        c.ask(*other)
    c.end()
    assert len(short) >= 4 and {c.waited(number) for number in short} == {1}


def test_a_long_prompt_keeps_its_speed_beside_short_ones(clocked):
    """What they read and make is all that it loses, and never more than half of a pass."""
    c = clocked(sequences=8, step_tokens=32)
    c.due = lambda number: c.ask(2, 1) if number % 2 and number < 30 else None
    long = c.ask(300)
    c.end()
    assert c.waited(long) + 1 <= (300 + 2 * 6) // 32 + 1
    c = clocked(sequences=8, step_tokens=32)
    c.due = lambda number: None if c.has_ended(long) else [c.ask(9, 1) for _ in range(8)] and None
    long = c.ask(300)
    c.end()
    assert c.waited(long) + 1 <= 2 * 300 // 32 + 1, "there are always enough shorter ones to fill a pass"


ASKED = st.tuples(st.integers(0, 6), st.integers(1, 40), st.integers(1, 6), st.integers(1, 9))


@given(st.lists(ASKED, min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 24))
@example([(0, 40, 6, 9), (1, 40, 6, 9), (1, 1, 1, 1)], 2, 3)
@example([(0, 4, 6, 1)] * 8, 5, 1)
@settings(max_examples=40, deadline=None)
def test_whatever_comes_all_are_answered_as_alone(asked, sequences, step):
    """Requests come after so many passes. `Clocked` checks every pass, and every answer."""
    c = Clocked(sequences=sequences, step_tokens=step)
    left = list(reversed(asked))
    since = 0

    def next_one():
        nonlocal since
        since = c.now
        _, prompt, answer, choices = left.pop()
        c.ask(prompt, answer, choices)

    def due(number):
        while left and number - since >= left[-1][0]:
            next_one()
            c.late.pop()

    try:
        c.late = [next_one] * (len(left) - 1)
        c.due = due
        next_one()
        c.end()
    finally:
        c.scheduler.close()
