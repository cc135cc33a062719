"""Ask a server's application without a socket."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any


def complete(bundle: str | Path, options, prompt: str, tokens: int, step_tokens: int = 256, **more) -> str:
    """The text of a greedy completion by a server of a bundle, which is described as a replica is."""
    from moepack.server.command import Serve, opened, options_of

    command = pickle.loads(pickle.dumps(Serve(str(bundle), options, name="it", step_tokens=step_tokens)))
    with opened(command, options_of(command)) as server:
        body = {"model": "it", "prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}
        return ask(server, body)["choices"][0]["text"]


def ask(server, body: dict[str, Any]):
    """The JSON that a server's application answers a completion with; it is closed then."""
    return ask_at_once(server, [body])[0]


def ask_at_once(server, bodies: list[dict[str, Any]]) -> list[Any]:
    """The answers to completions that are asked for at once."""

    async def talk(body: dict[str, Any]) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []
        unread = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive():
            return unread.pop() if unread else await asyncio.Event().wait()

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        scope |= {"headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")], "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "root_path": ""}
        await server.app(scope, receive, send)
        return sent

    async def all_of_them() -> list[list[dict[str, Any]]]:
        server.start()
        sent = await asyncio.gather(*map(talk, bodies))
        server.stop()
        return sent

    made = asyncio.run(all_of_them())
    server.close()
    answers = [json.loads(b"".join(m.get("body", b"") for m in sent)) for sent in made]
    assert all(sent[0]["status"] == 200 for sent in made), answers
    return answers
