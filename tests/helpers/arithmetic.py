"""A scheduler whose engine is arithmetic: the next token is a sum, so that a lost or doubled token shows."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from live_models import wait_for
from support import PATIENCE

from moepack.server.batching.engine import CacheSlot, StepInput
from moepack.server.batching.jobs import Job, JobEvent
from moepack.server.batching.scheduler import Scheduler
from moepack.server.options import Limits, Sampling

WORDS = 50


class Words:
    """A tokenizer: token n is "n "."""

    def decode(self, tokens: list[int], special: bool = False) -> str:
        return "".join(f"{t} " for t in tokens)


@dataclass
class Machine:
    """An engine whose next token is the sum of all tokens before, so that a lost or doubled one shows."""

    room: int = 1 << 30  # tokens of all caches together
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    passes: list[list[tuple[int, int]]] = field(default_factory=list)  # (tokens, length before) of every item
    caches: dict[int, list[int]] = field(default_factory=dict)
    most_held: int = 0
    before: Callable[[list[StepInput]], None] = lambda items: None
    gate: threading.Event | None = None
    most_kept = 0
    ran: int = 1 << 30  # items of a pass, where each has one of its own and the budget refuses the next
    at_once: Callable[[], int | None] = lambda: None  # sequences of a decoding pass
    seconds: float = 0.0  # that passes waited for experts
    kept: int = 0  # tokens of kept chunks, of prompts that nobody asks for

    def waited(self) -> float:
        return self.seconds

    def keys(self, prompt) -> tuple[bytes, ...]:
        return ()

    def kept_ahead(self, slot: CacheSlot, most: int) -> int:
        return 0

    def keeps_next(self, item: StepInput) -> int:
        return 0

    def kept_tokens(self, items=()) -> int:
        return self.kept

    def evict(self, spared=()) -> bool:
        self.kept -= 64 * (evicted := self.kept > 0)
        return evicted

    def close(self):
        while self.evict():
            pass

    def add(self, wanted: int, keys: tuple[bytes, ...] = (), prompt: int = 0, most: int = 0) -> CacheSlot:
        slot = CacheSlot()
        slot.cache = slot
        self.caches[id(slot)] = []
        return slot

    def remove(self, slot: CacheSlot):
        self.caches.pop(id(slot), None)
        slot.length = 0

    def held(self) -> int:
        return sum(len(tokens) for tokens in self.caches.values())

    def fits(self, items, joining=(), kept: bool = True) -> bool:
        return self.held() + sum(len(i.tokens) for i in items) + sum(joining) + self.kept * kept <= self.room

    def lacks(self, tokens: int) -> int:
        return max(0, tokens - self.room)

    def most_tokens(self, most: int) -> int:
        return min(most, self.room)

    def run(self, items: list[StepInput]) -> list[Any]:
        if self.gate is not None:
            self.gate.wait(PATIENCE)
        self.before(items)
        items = items[: self.ran]
        self.passes.append([(len(i.tokens), i.slot.length) for i in items])
        out = []
        for item in items:
            cache = self.caches[id(item.slot)]
            assert len(cache) == item.slot.length
            rows = []
            for token in item.tokens:
                cache.append(token)
                rows.append(torch.nn.functional.one_hot(torch.tensor(sum(cache) % WORDS), WORDS).float() * 9)
            item.slot.length += len(item.tokens)
            out.append(torch.stack(rows[-item.wanted :]) if item.wanted else None)
        self.most_held = max(self.most_held, self.held())
        return out


def expected(prompt: list[int], count: int) -> str:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % WORDS)
    return Words().decode(tokens[len(prompt) :])


@dataclass
class Bench:
    """A scheduler over a machine or an engine, and its events."""

    machine: Any
    limits: Limits
    tokens: Any = field(default_factory=Words)
    events: list[list[JobEvent]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self):
        self.scheduler = Scheduler(self.machine, self.tokens, self.limits, self._post)
        self.scheduler.start()

    def _post(self, events: list[tuple[Job, JobEvent]]):
        for job, event in events:
            job.tell(event)

    def ask(self, prompt: list[int], count: int, **more) -> list[JobEvent]:
        mine: list[JobEvent] = []
        job = Job(prompt, count, more.pop("sampling", Sampling(temperature=0)), mine.append, **more)
        self.scheduler.submit([job])
        self.jobs.append(job)
        self.events.append(mine)
        return mine

    def ended(self):
        left = [events for job, events in zip(self.jobs, self.events, strict=True) if not job.cancelled]
        wait_for(lambda: all(e and (e[-1].finish or e[-1].error) for e in left))

    def answers(self, prompts: list[list[int]], count: int) -> list[str]:
        """What is answered to prompts that are asked at once, while no pass runs if the machine has a gate."""
        told = [self.ask(prompt, count) for prompt in prompts]
        self.open()
        return [said(events) for events in told]

    def open(self):
        if (gate := getattr(self.machine, "gate", None)) is not None:
            gate.set()


def said(events: list[JobEvent]) -> str:
    """A job's answer, once it has ended."""
    wait_for(lambda: bool(events) and (events[-1].finish or events[-1].error))
    assert events[-1].error is None, events[-1].error
    return "".join(event.text for event in events)


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    """Make schedulers, which are closed behind the test."""
    made: list[Bench] = []

    def make(machine: Any = None, tokens: Any = None, **limits) -> Bench:
        given = {"sequences": 4, "waiting": 20, "step_tokens": 8, "context": 1000, **limits}
        made.append(Bench(machine or Machine(), Limits(**given), tokens or Words()))
        return made[-1]

    yield make
    for one in made:
        one.open()
        one.scheduler.close()
