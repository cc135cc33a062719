"""Kept prompts and the scheduler: who waits for whom, what is kept again, and what is left in the end."""

import pytest
import torch
from live_models import wait_for
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

from moepack.runtime.planning.exceeded import BudgetExceeded
from moepack.server.batching.engine import Engine
from moepack.server.batching.jobs import Job
from moepack.server.batching.scheduler import Scheduler
from moepack.server.batching.tokens import Tokens
from moepack.server.options import Limits, Sampling

SYSTEM = [1 + n * 37 % 900 for n in range(200)]  # three whole chunks and a rest


@pytest.fixture
def scheduled(tmp_path, tokenizer):
    """Makes a scheduler that keeps so many bytes, a list of its passes, and a function that gets a prompt answered."""
    saved = save_tiny("qwen3_moe", tmp_path / "model", dtype=torch.float32)
    model, ends = AutoModelForCausalLM.from_pretrained(saved).eval(), []

    def make(most, before=lambda items: None):
        engine, passes = Engine(model, 256, most), []
        run = engine.run

        def noted(items):
            before(items)
            passes.append([len(item.tokens) for item in items])
            return run(items)

        engine.run = noted

        def post(events):
            for job, event in events:
                job.tell(event)

        made = Scheduler(engine, Tokens(tokenizer), Limits(), post)

        def ask(count, tokens):
            told = [[] for _ in range(count)]
            made.submit([Job(SYSTEM, tokens, Sampling(temperature=0), events.append) for events in told])
            wait_for(lambda: all(events and events[-1].finish for events in told))
            return ["".join(event.text for event in events) for events in told]

        made.start()
        ends.append(made.close)
        return made, passes, ask

    yield make
    for end in ends:
        end()


def test_nobody_waits_for_what_is_not_kept(scheduled):
    """The bytes hold no chunk, which the first pass shows. The other prompts are then read beside one another."""
    scheduler, passes, ask = scheduled(100)
    assert len(set(ask(4, 1))) == 1 and scheduler.totals.prefix_hits == 0
    assert passes == [[200], [200, 56], [144, 112], [88]]


def test_a_prompt_that_is_read_again_beside_its_answer_is_kept_again(scheduled):
    """The budget refuses two passes: kept chunks leave, then the younger one gives its cache up."""
    refused = []

    def refuse(items):
        if len(items) == 2 and items[0].slot.length >= 204 and len(refused) < 2:
            refused.append(len(items))
            raise BudgetExceeded("planted")

    scheduler, passes, ask = scheduled(1 << 30, refuse)
    assert len(set(ask(2, 12))) == 1 and scheduler.totals.preempted == 1
    assert [tokens[1:] for tokens in passes if max(tokens) > 1] == [[], [8], [204]]
    assert ask(1, 1) and scheduler._engine.kept_tokens() == 192 and scheduler.totals.prefix_hits == 2 * 192


def test_a_stopped_scheduler_keeps_nothing(scheduled):
    scheduler, _, ask = scheduled(1 << 30)
    ask(1, 1)
    assert scheduler._engine.kept_bytes > 0
    scheduler.close()
    assert scheduler._engine.kept_bytes == 0
