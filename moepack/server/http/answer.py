"""The answer to one request: its jobs, their events, and the client's disconnection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from moepack.server.batching.jobs import Job, JobEvent
from moepack.server.errors import ApiError, failed

from .guard import disconnected
from .replies import Reply

PATIENCE = 60.0  # seconds a client may stop reading a stream
SILENCE = 15.0  # seconds before the first token after which a comment is sent; Node's fetch gives up after 300
COMMENT = b": the prompt is read\n\n"
Events = list[dict[str, object]]


class Gone(Exception):
    """The client has disconnected."""


class Answer:
    """The events of several jobs, in order of arrival. Use it on the event loop only."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self._events: asyncio.Queue[tuple[int, JobEvent] | None] = asyncio.Queue()  # None: the client has left

    def hear(self, index: int, event: JobEvent) -> None:
        """Queue an event of the job `index`. Call it on the event loop."""
        self._events.put_nowait((index, event))

    async def batches(self, receive: Receive) -> AsyncIterator[list[tuple[int, JobEvent]]]:
        """Yield events as they arrive, in batches, until every job has ended.

        At the end, also after an error, jobs that still run are cancelled: they leave before the next step.

        Raises:
            Gone: if the client has left.
            ApiError: if a job could not be answered.
        """
        watch = asyncio.create_task(disconnected(receive))
        watch.add_done_callback(lambda _: self._events.put_nowait(None))
        left = len(self.jobs)
        try:
            while left:
                batch: list[tuple[int, JobEvent]] = []
                while not batch or not self._events.empty():
                    if (pair := await self._events.get()) is None:
                        raise Gone
                    if (error := pair[1].error) is not None:
                        raise error if isinstance(error, ApiError) else failed("the model failed")
                    left -= pair[1].finish is not None
                    batch.append(pair)
                yield batch
        finally:
            for job in self.jobs:
                job.cancelled = True
            watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watch


class Streamed(Response):
    """A response of server-sent events. An error is sent as the last event."""

    media_type = "text/event-stream"

    def __init__(
        self, reply: Reply, batches: AsyncIterator[list[tuple[int, JobEvent]]], headers: Mapping[str, str]
    ) -> None:
        """Send a reply's events as soon as they come, with these headers beside a stream's own."""
        super().__init__(None, headers={"cache-control": "no-store", "x-accel-buffering": "no", **headers})
        self._reply, self._batches = reply, batches

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        chunks = self._reply.chunks(self._batches)
        try:
            await self._send(send, await self._first(chunks, send))
            async for events in chunks:
                await self._send(send, events)
            last = self._reply.done
        except Gone:
            return
        except ApiError as error:
            last = self._reply.event(self._reply.failure(error))
        await _sent(send, {"type": "http.response.body", "body": last, "more_body": False})

    async def _first(self, chunks: AsyncIterator[Events], send: Send) -> Events:
        """Wait for the first events. Meanwhile send comments, because clients give up on a silent stream."""
        waiting = asyncio.ensure_future(anext(chunks))
        try:
            while not (await asyncio.wait([waiting], timeout=SILENCE))[0]:
                await _sent(send, {"type": "http.response.body", "body": COMMENT, "more_body": True})
            return waiting.result()
        finally:
            waiting.cancel()

    async def _send(self, send: Send, events: Events) -> None:
        body = b"".join(map(self._reply.event, events))
        await _sent(send, {"type": "http.response.body", "body": body, "more_body": True})


async def _sent(send: Send, message: Message) -> None:
    await asyncio.wait_for(send(message), PATIENCE)
