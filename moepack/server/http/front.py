"""What answers from the first moment on: while the model loads, its progress; afterwards the server.

It decides nothing about loading or answers, and imports neither torch nor transformers, so that the port opens at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from moepack.pack.manifest.strict_json import JsonObject
from moepack.server.errors import ApiError
from moepack.server.options import Options

from .guard import Guard, refusal

if TYPE_CHECKING:
    import uvicorn

    from .app import Server

LONGEST = 60  # the most seconds after which a refused client is asked to come back
Report = Callable[[int, int], None]


class Stopped(Exception):
    """The load is no longer wanted."""


class Progress:
    """The bytes that a load has read, and what follows from them. One thread reports, others read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._began, self._now = clock, 0.0, (0, 0, 0.0)
        self.stopping = False

    def report(self, done: int, total: int) -> None:
        """Note bytes read and bytes in all. Raises Stopped where the load is to end."""
        if self.stopping:
            raise Stopped
        at = self._clock()
        if not self._now[0]:
            self._began = at
        self._now = done, total, at - self._began

    def described(self) -> JsonObject:
        """Return the progress for JSON; rate and time left are null until some bytes were read."""
        done, total, seconds = self._now
        rate = done / seconds if seconds > 0 else None
        return {
            "status": "loading", "bytes": done, "total_bytes": total, "bytes_per_second": rate,
            "seconds_left": (total - done) / rate if rate else None,
        }  # fmt: skip


class Front:
    """The application of `moepack serve`: it loads on a thread of its own, and then passes requests on."""

    def __init__(
        self, options: Options, load: Callable[[contextlib.ExitStack, Report], Server], ready: Callable[[], None]
    ) -> None:
        """Set up.

        Args:
            load: makes the `Server`; what it enters into the stack ends with the front. It reports bytes read of bytes
                in all, and ends with the exception that a report raises.
            ready: called once requests are answered.
        """
        self.progress = Progress()
        self.error: BaseException | None = None  # why the load failed
        self.app = Guard(self._answer, options.keys, options.host)
        self._load, self._ready, self._held = load, ready, contextlib.ExitStack()
        self._server: Server | None = None  # once it is loaded
        self._end: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._run, name="moepack-load", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Note the event loop. Call it there, before `begin`."""
        self._loop = asyncio.get_running_loop()

    def begin(self, uvicorn: uvicorn.Server) -> None:
        """Load, now that the port is open. Where that fails, `uvicorn` ends, and `error` says why."""

        def end() -> None:
            uvicorn.should_exit = True

        self._end = end
        self._thread.start()

    def _run(self) -> None:
        assert self._loop is not None
        try:
            server = self._load(self._held, self.progress.report)
        except BaseException as error:
            self.error = None if isinstance(error, Stopped) or self.progress.stopping else error
            after: Callable[[], None] = self._end
        else:
            after = lambda: self._open(server)  # noqa: E731
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            self._loop.call_soon_threadsafe(after)

    def _open(self, server: Server) -> None:
        if self.progress.stopping:  # `close` may have released the model
            return
        server.start()
        self._server = server
        self._ready()

    def stop(self) -> None:
        """Refuse new requests, and end a load that is under way."""
        self.progress.stopping = True
        if self._server is not None:
            self._server.stop()

    def close(self) -> None:
        """Wait for the end of the load, and release the model."""
        if self._thread.is_alive():
            self._thread.join()
        if self._server is not None:
            self._server.close()
        self._held.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._server is not None:
            await self._server.app(scope, receive, send)
        elif scope["type"] == "http":
            now = self.progress.described()
            after = {"retry-after": str(min(LONGEST, max(1, math.ceil(now["seconds_left"] or 1))))}
            if scope["path"] == "/health":
                await JSONResponse(now, 503, after)(scope, receive, send)
                return
            share = f"{now['bytes'] / now['total_bytes']:.0%} of its bytes are read" if now["total_bytes"] else "wait"
            refused = ApiError(503, f"the model is loading: {share}", None, "loading")
            await refusal(refused, scope["path"], after)(scope, receive, send)
