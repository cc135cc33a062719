"""A server in this process, on a thread of its own: the bundle of the demo model, under `hotness` in a budget."""

import asyncio
import json
import queue
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support import PATIENCE, load_for_logits

import moepack

pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from moepack.server.batching.jobs import JobEvent
from moepack.server.command import Serve, run
from moepack.server.http.app import Server
from moepack.server.options import Limits, Options
from moepack.server.tools.delimited import HERMES
from moepack.server.tools.thinking import Thinking

TEMPLATE = (
    "{% if tools %}<tools>{% for t in tools %}{{ t.function.name }} {% endfor %}</tools>"
    '<tool_call>{"name": ...}</tool_call>\n{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' and not loop.index0 %}{{ raise_exception('a tool cannot begin') }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)
NAME, BUDGET = "mini", 5_000_000


def post(url: str, body: dict[str, Any] | bytes | None, **headers: str) -> bytes:
    """The answer to JSON, or to a GET without a body. Raises HTTPError for a refusal."""
    raw = json.dumps(body).encode() if isinstance(body, dict) else body
    given = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    with urllib.request.urlopen(urllib.request.Request(url, raw, given), timeout=PATIENCE) as answer:
        return bytes(answer.read())


def ask(url: str, prompt: str, **more) -> dict[str, Any]:
    """The choice of a greedy completion."""
    body = {"model": NAME, "prompt": prompt, "temperature": 0, **more}
    choice: dict[str, Any] = json.loads(post(f"{url}/v1/completions", body))["choices"][0]
    return choice


def reply_of(kind, asked):
    """The answer of an interface to a chat, by a model that thinks and calls."""
    return kind(asked, [[1, 2]], None, NAME, lambda: Thinking(HERMES.reader({}), True))


# Reasoning, a text and two calls, in pieces that cut their marks.
EVENTS = [
    JobEvent("Let me ", generated=2),
    JobEvent("see.</think>\n\nI ask.\n", generated=6),
    JobEvent('<tool_call>{"name": "time", "arguments": {"zone"', generated=12),
    JobEvent(': "utc"}}</tool_call><tool_call>{"name": "time", "argum', generated=18),
    JobEvent('ents": {}}</tool_call>', finish="stop", generated=24),
]


def chunks_of(reply, events: list[Any]) -> list[Any]:
    """What a reply sends for these events of a job, each in a batch of its own."""

    async def batches() -> AsyncIterator[list[tuple[int, Any]]]:
        for event in events:
            yield [(0, event)]

    async def collect() -> list[Any]:
        return [piece async for pieces in reply.chunks(batches()) for piece in pieces]

    return asyncio.run(collect())


@dataclass
class Running:
    """A server that answers."""

    port: int
    server: Server
    model: Any

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, **options):
        openai = pytest.importorskip("openai")
        given = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE, **options}
        return openai.OpenAI(**given)

    def idle(self):
        """Wait until nobody is answered."""
        until = time.monotonic() + PATIENCE
        scheduler = self.server.scheduler
        while scheduler.running or scheduler.waiting:
            assert time.monotonic() < until, "sequences are left"
            time.sleep(0.01)


def begin(model, tokenizer, options: Options) -> tuple[Running, Callable[[], None]]:
    """Serve on a free port until the function is called."""
    server = Server(model, tokenizer, options)
    listener = socket.socket()
    listener.bind((options.host, 0))
    found = Running(listener.getsockname()[1], server, model)
    answering: queue.SimpleQueue[Any] = queue.SimpleQueue()
    asked = Serve("", grace=1.0)
    thread = threading.Thread(target=lambda: asyncio.run(run(server, listener, asked, answering.put)), daemon=True)
    thread.start()
    uvicorn = answering.get(timeout=PATIENCE)

    def end():
        uvicorn.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()

    return found, end


@contextmanager
def serving(model, tokenizer, options: Options) -> Iterator[Running]:
    """Serve a model, and close it in the end."""
    found, end = begin(model, tokenizer, options)
    try:
        yield found
    finally:
        end()
        model.moepack.close()


@pytest.fixture(scope="session")
def tokenizer(bundle: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundle)


@pytest.fixture(scope="session")
def options() -> Options:
    return Options(NAME, template=TEMPLATE, limits=Limits(sequences=8, waiting=300, step_tokens=64), body=1 << 16)


@pytest.fixture(scope="session")
def running(bundle: Path, tokenizer, options: Options) -> Iterator[Running]:
    budget = {"device_memory": BUDGET, "prefill_tokens": 64, "all_logits": False}
    with serving(load_for_logits(bundle, policy="hotness:interval=0.2", **budget), tokenizer, options) as found:
        yield found


@pytest.fixture(scope="session")
def client(exact: Running):
    """OpenAI's client of the server whose answers do not change: no version does."""
    return exact.client()


@pytest.fixture(scope="session")
def exact(bundle: Path, tokenizer, options: Options) -> Iterator[Running]:
    """Another one, without a budget: every expert at bf16, in float32, where a batch changes next to nothing."""
    with serving(moepack.load(bundle, policy="static:bf16", dtype=torch.float32), tokenizer, options) as found:
        yield found


@pytest.fixture(scope="session")
def plain(demo_model: Path):
    """The checkpoint of that one, in plain transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
