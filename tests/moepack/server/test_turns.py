"""Which sequences decode in a step, by a model of steps that wait for the disk: seconds and waits by their number."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from moepack.server.batching.turns import CYCLE, TURN, Turns

# Seconds, and seconds of them waited, of a step of so many texts; moving on to another text is in them.


@dataclass(eq=False)
class Text:
    served: int = 0


def paged(count):
    """A step of each further text reads what memory cannot hold: one text has 7 tokens a second, 16 together 2.4."""
    waits = 0.035 if count == 1 else 0.4 * count
    return 0.1 + 0.01 * count + waits, waits


def shared(count):
    """More texts share what a step reads, so all together have the most tokens a second, though half of it is waits."""
    return 0.1 + 0.05 * count, 0.05 + 0.025 * count


def run(turns, texts, costs, seconds):
    """Take steps for so long, and return when each text was served."""
    now, served = 0.0, {text: [0.0] for text in texts}
    for step in itertools.count(1 + max(text.served for text in texts)):
        if now >= seconds:
            break
        mine = turns.choose(texts, now)
        assert mine and len(set(mine)) == len(mine) and set(mine) <= set(texts)
        took, waited = costs(len(mine))
        now += took
        turns.record(len(mine), len(texts), took, waited)
        for text in mine:
            text.served = step
            served[text].append(now)
    return served


def rate(served, since):
    """Tokens a second from then on."""
    times = [t for times in served.values() for t in times if t >= since]
    return len(times) / (max(times) - since)


def test_texts_that_take_each_others_experts_decode_one_at_a_time():
    turns, texts = Turns[Text](), [Text() for _ in range(16)]
    served = run(turns, texts, paged, 1000)
    assert turns.most == 1
    alone = 1 / paged(1)[0]
    assert rate(served, 300) > 0.85 * alone > 2 * 16 / paged(16)[0]  # what it tries now and then is in it
    gaps = [b - a for times in served.values() for a, b in itertools.pairwise(times) if a > 300]
    assert max(gaps) < CYCLE + 16 * TURN[0], "no text waits for longer than a cycle and what is tried in it"
    counts = [len(times) for times in served.values()]
    assert max(counts) < 1.5 * min(counts)


@pytest.mark.parametrize(("costs", "most"), [(shared, 0.9), (lambda count: (0.1 + 0.01 * count, 0.0), 1.0)])
def test_texts_that_gain_from_each_other_stay_together(costs, most):
    turns, texts = Turns[Text](), [Text() for _ in range(16)]
    served = run(turns, texts, costs, 1000)
    assert rate(served, 300) >= most * 16 / costs(16)[0]
    if most == 1.0:
        assert turns.most is None and all(len(times) == len(served[texts[0]]) for times in served.values())


def test_it_goes_back_when_traffic_changes():
    turns, texts = Turns[Text](), [Text() for _ in range(16)]
    run(turns, texts, paged, 400)
    assert turns.most == 1
    run(turns, texts, shared, 2000)
    assert turns.most is None or turns.most >= 8


def test_one_text_is_never_held_back():
    turns, text = Turns[Text](), Text()
    served = run(turns, [text], lambda count: (0.1, 0.09), 100)
    assert len(served[text]) - 1 == pytest.approx(1000, abs=2)


def test_a_turn_lasts_and_its_places_are_filled():
    """Who leaves in the middle of a turn is replaced by who decoded longest ago; the others keep their turn."""
    turns, texts = Turns[Text](), [Text() for _ in range(5)]
    turns.most = 2
    first = turns.choose(texts, 0)
    assert first == texts[:2] and turns.choose(texts, TURN[1] - 0.1) == first
    first[0].served = first[1].served = 1
    assert turns.choose(texts[1:], 1) == [texts[1], texts[2]]
    texts[1].served = texts[2].served = 2
    assert turns.choose(texts[1:], TURN[1] + 1) == [texts[3], texts[4]]
    assert turns.choose(texts[:2], 20) == texts[:2]
