"""Clients for a server of the OpenAI interface: streams over plain sockets, timed token by token. No library between.

Against `moepack serve`, with `ignore_eos`, every answer has as many tokens as were asked for; another server may send
fewer, and what came is what counts.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.common import Row


@dataclass
class Reply:
    """One answer: its status, when its pieces came (seconds from the request), and the tokens that it counts."""

    status: int = 0
    at: list[float] = field(default_factory=list)
    text: str = ""
    tokens: int = 0
    error: str | None = None

    @property
    def first(self) -> float:
        """TTFT in seconds."""
        return self.at[0]

    @property
    def each(self) -> float:
        """TPOT in seconds: the mean of what lies between its pieces."""
        return (self.at[-1] - self.at[0]) / max(1, len(self.at) - 1)


Ask = Callable[[int, int], Awaitable[Reply]]  # by a client's number and its turn


async def stream(port: int, path: str, body: Row) -> Reply:
    """Ask once, and read the stream to its end."""
    reply = Reply()
    began = time.perf_counter()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        raw = json.dumps({**body, "stream": True}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        await writer.drain()
        reply.status = int((await reader.readline()).split()[1])
        async for line in reader:
            if not line.startswith(b"data: "):
                if reply.status != 200 and line.startswith(b"{"):
                    reply.error = line.decode(errors="replace")
                continue
            if line.startswith(b"data: [DONE]"):
                break
            event = json.loads(line[6:])
            if "error" in event:
                reply.error = str(event["error"])
                break
            if event.get("usage"):
                reply.tokens = event["usage"]["completion_tokens"]
            for choice in event.get("choices", ()):
                piece = choice.get("text") or (choice.get("delta") or {}).get("content")
                if piece:
                    reply.text += piece
                    reply.at.append(time.perf_counter() - began)
        writer.close()
    except (OSError, ValueError, IndexError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.tokens = reply.tokens or len(reply.at)
    if reply.error is None and not reply.at:
        reply.error = f"status {reply.status}, and no text"
    return reply


async def clients(count: int, seconds: float, ask: Ask) -> tuple[list[Reply], float]:
    """`count` clients that ask one thing after another for so long: the replies, and the seconds it took.

    `ask` is given the client's number and its turn.
    """
    replies: list[Reply] = []
    began = time.perf_counter()

    async def one(number: int) -> None:
        turn = 0
        while time.perf_counter() - began < seconds:
            replies.append(await ask(number, turn))
            turn += 1

    await asyncio.gather(*(one(n) for n in range(count)))
    return replies, time.perf_counter() - began


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which `share` of them lie."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return statistics.quantiles(values, n=100, method="inclusive")[min(98, round(100 * share) - 1)]
