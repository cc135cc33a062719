"""Checks before every request: the API key, the host name, and limits on size and time."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import h11
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from moepack.server.errors import ApiError

from .json_body import check_values

# Paths that need no key: the page itself asks for the key, health checks and balancers have none.
OPEN = frozenset({"/", "/health", "/load"})
HEADERS = 10.0  # seconds to receive a request's headers
BODY = 30.0  # seconds to receive a request's body
LONGEST, MANY, LONG = 4096, 100, 32 << 10  # bytes of a URL; number of headers; bytes of all headers
FIRST = 128 << 10  # bytes of a body at which its values are first counted
REQUEST_ID = b"x-request-id"
IGNORED = "X-Moepack-Ignored"  # the header that names a request's hints which its answer does not follow
_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")  # what of a client may stand in headers and logs


class Guard:
    """ASGI middleware: name each request, check its API key, in constant time, and the host name of a local server."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], host: str) -> None:
        """Set up for a server that listens on `host`.

        If only this machine can reach `host`, requests for other names are refused: otherwise a web page could reach
        the server through a name of the page's own that resolves here (DNS rebinding)."""
        self._app, self._keys = app, [key.encode() for key in keys]
        self._names = frozenset({"localhost", "127.0.0.1", "[::1]", host, f"[{host}]"}) if is_local(host) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check one request and pass it on (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(REQUEST_ID, b"")
        name = given if _ID.fullmatch(given) else secrets.token_hex(16).encode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                if all(header != REQUEST_ID for header, _ in headers):  # a guard behind this one may have named it
                    message = {**message, "headers": [*headers, (REQUEST_ID, name)]}
            await send(message)

        error = self._refused(scope)
        await (self._app if error is None else refusal(error, scope["path"]))(scope, receive, named)

    def _refused(self, scope: Scope) -> ApiError | None:
        if len(scope["raw_path"]) + len(scope["query_string"]) > LONGEST:
            return ApiError(414, f"the address is longer than {LONGEST} bytes")
        if len(scope["headers"]) > MANY or sum(len(k) + len(v) for k, v in scope["headers"]) > LONG:
            return ApiError(431, f"there are more than {MANY} headers, or {LONG} bytes of them")
        headers = dict(scope["headers"])
        name = headers.get(b"host", b"").decode("latin-1")
        if self._names is not None and _without_port(name) not in self._names:
            return ApiError(
                403, f"the Host header is {name[:80]!r}: this server answers to localhost alone, or to --host"
            )
        if not self._keys or scope["path"] in OPEN:
            return None
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        given = given.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # as Anthropic's clients
        if sum(hmac.compare_digest(given, key) for key in self._keys):  # not `any`: every key takes its time
            return None
        return ApiError(
            401, "the API key is missing or wrong: send it as Authorization: Bearer KEY", None, "invalid_api_key"
        )


def patient(most: int) -> type[Patient]:
    """Return a protocol of its own for one server, which holds so many connections."""
    return type("Patient", (Patient,), {"most": most, "idle": {}})


def shared(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Let pages of these origins (`https://host`, or `*` for all) read answers; without any, no page may."""
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", IGNORED],
    )


class Json(JSONResponse):
    """A JSON answer. Half a surrogate pair, which clients and models may escape in JSON, is sent as `?`."""

    def render(self, content: object) -> bytes:
        """Write the answer."""
        return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(errors="replace")


def refusal(error: ApiError, path: str, headers: Mapping[str, str] | None = None) -> Json:
    """Make the response to a refused request, in the shape of the interface that its path belongs to."""
    if headers is None and error.status in (429, 503):
        headers = {"retry-after": "1"}
    body = error.anthropic() if path.startswith("/v1/messages") else error.body()
    return Json(body, error.status, headers)


async def disconnected(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _without_port(name: str) -> str:
    head, colon, port = name.rpartition(":")
    return head if colon and port.isdigit() else name


async def body(request: Request, most: int) -> bytes:
    """Read a request's body.

    Raises:
        ApiError: if its content type is not JSON, it is compressed, it is longer than `most` bytes, it has very many
            values, or it takes too long.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # else any web page could send forms here: browsers send them without asking
        raise ApiError(415, "send JSON, as Content-Type: application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding not in ("", "identity"):
        raise ApiError(415, f"send the body as it is, without Content-Encoding: {coding[:64]}")
    told = request.headers.get("content-length", "0")
    if told.isdigit() and int(told[:20]) > most:
        raise ApiError(413, f"the body is longer than {most} bytes")
    found, checked = bytearray(), 0
    try:
        async with asyncio.timeout(BODY):
            async for part in request.stream():
                found += part
                if len(found) > most:
                    raise ApiError(413, f"the body is longer than {most} bytes")
                if len(found) > max(FIRST, 2 * checked):  # early, and each time of twice as much: 5 ms for 4 MiB
                    check_values(found)
                    checked = len(found)
            check_values(found)
    except TimeoutError:
        raise ApiError(408, f"the body did not come within {BODY:g} seconds") from None
    return bytes(found)


class Bounded:
    """ASGI middleware: refuse requests beyond the most that are open at a time, but for those that need no key."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it (ASGI)."""
        if scope["type"] == "http" and scope["path"] not in OPEN and self._open >= self._most:
            why = f"{self._most} requests are open: try again later"
            await refusal(ApiError(503, why, None, "too_many_connections"), scope["path"])(scope, receive, send)
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1


class Patient(H11Protocol):
    """uvicorn's protocol with a time limit for headers, and with room for those who have something to ask.

    Beyond `most` connections the one that has had no request for longest is closed for each new one.
    """

    most: int
    idle: dict[Patient, None]  # connections without a request, the longest idle first
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Start the time limit for a new connection."""
        super().connection_made(transport)
        if len(self.connections) > self.most and self.idle:
            longest = next(iter(self.idle))
            del self.idle[longest]
            longest.transport.close()
        self.idle[self] = None
        self._late = self.loop.call_later(HEADERS, transport.close)

    def data_received(self, data: bytes) -> None:
        """Handle received bytes, and stop the time limit once the headers are complete."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._heard()
            self.idle.pop(self, None)
        elif self._late is None:
            self._late = self.loop.call_later(HEADERS, self.transport.close)

    def on_response_complete(self) -> None:
        """Note that the connection has no request, unless the next one came already."""
        super().on_response_complete()
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the time limit of a closed connection."""
        self._heard()
        self.idle.pop(self, None)
        super().connection_lost(exc)

    def _heard(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
