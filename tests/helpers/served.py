"""Ask a server's application without a socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any


def ask(server: Any, body: dict[str, Any]) -> Any:
    """The JSON that a server's application answers a completion with."""
    sent: list[dict[str, Any]] = []

    async def talk() -> None:
        server.start()
        unread = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

        async def receive() -> Any:
            return unread.pop() if unread else await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "raw_path": b"/v1/completions"}
        scope |= {"headers": [(b"content-type", b"application/json"), (b"host", b"127.0.0.1")], "query_string": b""}
        scope |= {"http_version": "1.1", "scheme": "http", "server": ("127.0.0.1", 80), "root_path": ""}
        await server.app(scope, receive, send)
        server.stop()

    asyncio.run(talk())
    server.close()
    answer = json.loads(b"".join(m.get("body", b"") for m in sent))
    assert sent[0]["status"] == 200, answer
    return answer
