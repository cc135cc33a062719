"""The answer to one request: its jobs, their events, and the client's disconnection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moepack.server.batching.jobs import Job, JobEvent
from moepack.server.errors import ApiError

from .guard import disconnected
from .replies import sse

PATIENCE = 60.0  # seconds a client may stop reading a stream


class Gone(Exception):
    """The client has disconnected."""


class Answer:
    """The events of several jobs, in order of arrival. Used on the event loop only."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._events: asyncio.Queue[tuple[int, JobEvent] | None] = asyncio.Queue()

    def listener(self, index: int) -> Callable[[JobEvent], None]:
        """Make the function that receives a job's events, on the event loop."""
        return lambda event: self._events.put_nowait((index, event))

    def cancel(self) -> None:
        """Cancel the jobs: they leave before the next step."""
        for job in self.jobs:
            job.cancelled = True

    async def _watch(self, receive: Receive) -> None:
        await disconnected(receive)
        self._events.put_nowait(None)

    async def batches(self, receive: Receive) -> AsyncIterator[list[tuple[int, JobEvent]]]:
        """Yield events as they arrive, in batches, until every job has ended.

        Raises:
            Gone: when the client has left. Its jobs are cancelled, as they are however this ends.
            ApiError: when a job could not be answered.
        """
        watch = asyncio.create_task(self._watch(receive))
        left = len(self.jobs)
        try:
            while left:
                found = [await self._events.get()]
                while not self._events.empty():
                    found.append(self._events.get_nowait())
                batch = []
                for pair in found:
                    if pair is None:
                        raise Gone
                    _, event = pair
                    if isinstance(event.error, ApiError):
                        raise event.error
                    if event.error is not None:
                        raise ApiError(500, "the model failed", None, "internal")
                    left -= event.finish is not None
                    batch.append(pair)
                yield batch
        finally:
            self.cancel()
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch


class Streamed(Response):
    """A response of server-sent events. An error is sent as the last one."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncIterator[list[Any]]) -> None:
        """Each item of `pieces` is sent at once: a list of values, as JSON."""
        super().__init__(None, headers={"cache-control": "no-store", "x-accel-buffering": "no"})
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        try:
            async for pieces in self._pieces:
                await _sent(send, {"type": "http.response.body", "body": b"".join(map(sse, pieces)), "more_body": True})
            last = sse("[DONE]")
        except Gone:
            return
        except ApiError as error:
            last = sse(error.body())
        await _sent(send, {"type": "http.response.body", "body": last, "more_body": False})


async def _sent(send: Send, message: Message) -> None:
    await asyncio.wait_for(send(message), PATIENCE)


async def collected(answer: Answer, receive: Receive, hear: Sequence[Any]) -> None:
    """Add every event of an answer to its choice."""
    async for batch in answer.batches(receive):
        for index, event in batch:
            hear[index].hear(event)
