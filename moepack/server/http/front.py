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

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from moepack.pack.manifest.strict_json import JsonObject
from moepack.server.about.page import page
from moepack.server.errors import ApiError
from moepack.server.options import Options

from .guard import Guard, refusal

if TYPE_CHECKING:
    import uvicorn

    from .app import Server

LONGEST = 600  # the most seconds after which a refused client is asked to come back
UNKNOWN = 5  # these seconds before anything was read, because imports alone take as long
Report = Callable[[int, int], None]


class Stopped(Exception):
    """The load is no longer wanted."""


class Progress:
    """The bytes that a load has read, and what follows from them. One thread reports, others read."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first = self._last = (0, 0.0)  # bytes read, and when, by the first and the last report
        self._total = 0
        self.stopping = False

    def report(self, done: int, total: int) -> None:
        """Note bytes read and bytes in all. Raises Stopped where the load is to end."""
        if self.stopping:
            raise Stopped
        self._last = done, self._clock()
        self._total = total
        if not self._first[0]:
            self._first = self._last

    def described(self) -> JsonObject:
        """Return the progress for JSON; rate and time left are null until it was reported twice."""
        (began, first), (done, last) = self._first, self._last
        rate = (done - began) / (last - first) if last > first else None
        passed = self._clock() - last
        return {
            "status": "loading", "bytes": done, "total_bytes": self._total, "bytes_per_second": rate,
            "seconds_left": max(0.0, (self._total - done) / rate - passed) if rate else None,
        }  # fmt: skip

    def retry_after(self) -> int:
        """Return the seconds, forecast from the bytes read so far, after which a client should ask again."""
        left = self.described()["seconds_left"]
        return UNKNOWN if left is None else min(LONGEST, max(1, math.ceil(left)))


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
            await self._loading(scope)(scope, receive, send)

    def _loading(self, scope: Scope) -> Response:
        """Make the answer to a request before the model is loaded: a browser's page, /health, or a refusal."""
        after = {"retry-after": str(self.progress.retry_after())}
        now = self.progress.described()
        if scope["path"] == "/health":
            return JSONResponse(now, 503, after)
        if scope["path"] == "/" and "text/html" in Headers(scope=scope).get("accept", ""):
            return page(503, after)
        share = f"{now['bytes'] / now['total_bytes']:.0%} of its bytes are read" if now["total_bytes"] else "wait"
        refused = ApiError(503, f"the model is loading: {share}", None, "loading")
        return refusal(refused, scope["path"], after)
