"""What a side does inside its limit: loads, then goes through texts, a line of JSON a pass. Measures nothing else.

Every side reads the same ids: a text's prompt at once, then its next tokens one by one, whatever the model would have
said. So routing is the text's on every side, and a row that is cut short has what was done until then.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.common import Row

from .cage import anonymous, bytes_read
from .shapes import TOPICS, text

SESSION = 7  # the seed of the session's texts
REPEATED = 32  # tokens whose keys and values fill a deep context


@dataclass(frozen=True, slots=True)
class Order:
    """What a side is asked.

    Attributes:
        path: of the model.
        options: the side's own, by name, such as its policy.
        memory: bytes that the side may take; it is in a cage of somewhat more.
        threads: on which it computes.
        prompt, decode: tokens of a text that are read at once, and one by one.
        depth: tokens of context before each text, of repeated keys and values.
    """

    path: str
    options: dict[str, str]
    memory: int
    threads: int
    prompt: int
    decode: int
    depth: int = 0

    @property
    def length(self) -> int:
        """Tokens of a text."""
        return self.prompt + self.decode


class Side(ABC):
    """A loaded model."""

    @abstractmethod
    def begin(self, before: list[int], depth: int) -> None:
        """Forget the text so far; begin with a context of so many tokens, which repeats what these few leave."""

    @abstractmethod
    def step(self, ids: list[int]) -> None:
        """Go on with these tokens, up to the logits of the last."""

    def facts(self) -> Row:
        """Counts since loading that a row keeps."""
        return {}


def serve(side: Callable[[Order], Side], order: Order) -> None:
    """Load, and go through the texts. A refusal is a line, too, and the end."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print

    def tell(**what: object) -> None:
        pid = os.getpid()
        counts = {"read": bytes_read(pid), "cpu": time.process_time(), "anonymous": anonymous(pid)}
        out.write(json.dumps({**what, **counts}) + "\n")
        out.flush()

    try:
        model = side(order)
    except Exception as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        tell(refused=" ".join(words).removeprefix(f"{order.path}: "))
        sys.exit(1)
    tell(loaded=True, **model.facts())
    for topic in range(TOPICS):
        ids = text(topic, order.length, SESSION)
        model.begin(text(topic, REPEATED, SESSION + 1), order.depth)
        for first in (0, *range(order.prompt, order.length)):
            part = ids[: order.prompt] if first == 0 else ids[first : first + 1]
            began = time.perf_counter()
            model.step(part)
            tell(text=topic, tokens=len(part), seconds=time.perf_counter() - began, **model.facts())
