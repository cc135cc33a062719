"""`moepack serve --replicas N`: copies of the server on Ray Serve, each with a budget of its own, behind one door.

The door is the same HTTP front as of one server, in an actor of the cluster; it hands requests to replicas through Ray
Serve's router. Replicas keep what their traffic makes hot: a request goes to the one that had prompts with the same
beginning, as long as that one is not busier than others (Ray's model multiplexing, with a prompt's beginning for a
model). Ray starts replicas anew whose health check fails. Decides nothing about answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import math
import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from moepack.cluster import connect
from moepack.pack.errors import InputError, MissingExtraError

from .command import COMPILED, SIGNALS, Serve, listening, opened, options_of, prepare, run, shown

BEGINNING = 64  # characters of a prompt by which it is sent where such prompts went
PREFIXES = 512  # beginnings that a replica is known for; of more the oldest are forgotten
LOADING = 1800.0  # seconds in which a replica is to be loaded
HEALTH = 5.0  # seconds between two looks at a replica
PAGE = "page"  # what is no generation always comes from one replica, so that numbers do not jump
SCOPE = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "root_path", "asgi")


def beginning(raw: bytes) -> str:
    """What a request's prompt is known by: a digest of the first characters of its text, or of its first message."""
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(raw)
        if isinstance(given, dict):
            found = given.get("messages", given.get("prompt"))
            found = found[0] if isinstance(found, list) and found and not isinstance(found[0], int) else found
            found = found.get("content") if isinstance(found, dict) else found
            text = found if isinstance(found, str) else json.dumps(found)
            return hashlib.sha256(text[:BEGINNING].encode(errors="replace")).hexdigest()[:16]
    return PAGE


class Replica:
    """One server without a door: Ray calls it for every request."""

    def __init__(self, asked: Serve) -> None:
        self._asked, self._entered = asked, contextlib.ExitStack()
        self._server = self._entered.enter_context(opened(asked, options_of(asked)))
        self._started = False

    async def check_health(self) -> None:
        """As Ray Serve calls it; what is raised has the replica started anew."""
        if self._started:
            self._server.check()

    async def answer(self, scope: dict[str, Any], raw: bytes) -> AsyncIterator[dict[str, Any]]:
        """A request's answer, in ASGI's messages. It ends when its reader does."""
        from ray import serve as ray_serve

        if not self._started:
            self._started = True
            self._server.start()
        if key := ray_serve.get_multiplexed_model_id():
            await self._known(key)  # type: ignore[attr-defined]  # _deploy adds it
        said: asyncio.Queue[Any] = asyncio.Queue()
        unread, gone = [{"type": "http.request", "body": raw, "more_body": False}], asyncio.Event()

        async def receive() -> dict[str, Any]:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def work() -> None:
            try:
                await self._server.app({**scope, "extensions": {}}, receive, said.put)
            finally:
                said.put_nowait(None)

        working = asyncio.ensure_future(work())
        try:
            while (message := await said.get()) is not None:
                yield message
            await working
        finally:
            gone.set()
            if not working.done():
                working.cancel()
                await asyncio.wait([working], timeout=5)

    def __del__(self) -> None:
        """As Ray Serve calls it, once nothing runs."""
        self._server.close()
        self._entered.close()


class Door:
    """The HTTP front: an actor, which Ray calls. As `run` in command.py wants it: it is what stands for a server."""

    def __init__(self, asked: Serve, name: str) -> None:
        from .http.guard import Guard

        self._asked, self._name, self._options = asked, name, options_of(asked)
        self.app = Guard(self._relay, self._options.key, asked.host)
        self._stopping = False
        self._opened: asyncio.Future[tuple[str, int]] = asyncio.get_event_loop().create_future()
        self._closed: asyncio.Task[None] | None = None
        self._uvicorn: Any = None

    # --- what Ray calls

    async def open(self) -> tuple[str, int]:
        """Listen: host and port."""
        self._closed = asyncio.ensure_future(self._listen())
        either: list[asyncio.Future[Any]] = [self._closed, self._opened]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            self._closed.result()
        return self._opened.result()

    async def closed(self) -> None:
        """Returns once it listens no more."""
        assert self._closed is not None
        await self._closed

    async def end(self) -> None:
        """Finish what runs, and close."""
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
            await self.closed()

    async def _listen(self) -> None:
        with listening(self._asked.host, self._asked.port) as listener:
            port = listener.getsockname()[1]

            def ready(uvicorn: Any) -> None:
                self._uvicorn = uvicorn
                self._opened.set_result((self._asked.host, port))

            await run(self, listener, self._asked, ready)

    # --- as a server

    def start(self) -> None:
        """The replicas have been started before."""

    def stop(self) -> None:
        """Take nothing on any more."""
        self._stopping = True

    def close(self) -> None:
        """Nothing is left."""

    # --- requests

    async def _relay(self, scope: Any, receive: Any, send: Any) -> None:
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        from .errors import ApiError
        from .http.guard import body

        if scope["type"] != "http":
            return
        raw, begun = b"", False
        try:
            if self._stopping:
                raise ApiError(503, "this server is stopping", None, "stopping")
            if scope["method"] == "POST":
                raw = await body(Request(scope, receive), self._options.body)
            key = beginning(raw) if raw else PAGE
            pieces = self._handle(key).remote({name: scope[name] for name in SCOPE if name in scope}, raw)
            gone = asyncio.ensure_future(_gone(receive))
            try:
                async for message in _until(gone, pieces):
                    begun = True
                    await send(message)
            finally:
                gone.cancel()
                pieces.cancel()
        except ApiError as error:
            headers = {"retry-after": "1"} if error.status in (429, 503) else None
            await JSONResponse(error.body(), error.status, headers)(scope, receive, send)
        except Exception as error:
            if begun:
                raise
            failed = ApiError(503, f"no replica answers: {type(error).__name__}", None, "unavailable")
            await JSONResponse(failed.body(), 503, {"retry-after": "1"})(scope, receive, send)

    def _handle(self, key: str) -> Any:
        from ray import serve as ray_serve

        handle = ray_serve.get_app_handle(self._name)
        return handle.options(stream=True, method_name="answer", multiplexed_model_id=key)


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _until(gone: asyncio.Future[None], pieces: Any) -> AsyncIterator[Any]:
    """What comes, until nobody reads it any more."""
    coming = aiter(pieces)
    while True:
        piece = asyncio.ensure_future(anext(coming))
        await asyncio.wait([piece, gone], return_when=asyncio.FIRST_COMPLETED)
        if not piece.done():
            piece.cancel()
            return
        try:
            yield piece.result()
        except StopAsyncIteration:
            return


def serve(asked: Serve, say: Callable[[str], None]) -> None:
    """Serve with replicas until a signal comes. `say` is told where, once it answers.

    Raises:
        InputError: when it cannot; replicas say why.
        MissingExtraError: without Ray Serve.
    """
    prepare()
    options = options_of(asked)
    cpus = max(asked.replicas, os.cpu_count() or 1)
    ray, started = connect(asked.address, num_cpus=cpus)
    name, stopped = f"moepack-{secrets.token_hex(4)}", threading.Event()
    before: dict[Any, Any] = {}
    try:
        try:
            from ray import serve as ray_serve
        except ImportError as error:
            raise MissingExtraError(str(error.name), "ray") from None
        _deploy(ray, ray_serve, asked, name)
        try:
            door = ray.remote(Door).options(num_cpus=0, max_concurrency=4096).remote(asked, name)
            try:
                host, port = ray.get(door.open.remote())
            except ray.exceptions.RayTaskError as error:
                raise error.cause if isinstance(error.cause, InputError) else error from None
            before |= {number: signal.signal(number, lambda *_: stopped.set()) for number in SIGNALS}
            say(f"{options.name} at {shown(host, port)}, {asked.replicas} replicas")
            closed = door.closed.remote()
            while not stopped.is_set() and not ray.wait([closed], timeout=0.5)[0]:
                pass
            ray.get(door.end.remote())
        finally:
            ray_serve.delete(name)
    finally:
        if started:
            ray.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)


def _deploy(ray: Any, ray_serve: Any, asked: Serve, name: str) -> None:
    """Start the replicas, and wait until they have loaded."""
    on_gpu = asked.load.device.startswith("cuda")
    kind, found = ("GPU", ray.cluster_resources().get("GPU", 0)) if on_gpu else ("CPU", ray.cluster_resources()["CPU"])
    if found < asked.replicas:
        raise InputError(f"{asked.replicas} replicas need a {kind} each: the cluster has {found:g}")
    threads = 1 if on_gpu else max(1, math.floor(found / asked.replicas))
    options = {"num_cpus": 1 if on_gpu else threads, "num_gpus": int(on_gpu)}
    variables = {**COMPILED, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    known = ray_serve.multiplexed(max_num_models_per_replica=PREFIXES)(_known)
    replica = type("Replica", (Replica,), {_known.__name__: known})  # Ray looks for it by its name
    deployment = ray_serve.deployment(replica).options(
        num_replicas=asked.replicas, ray_actor_options={**options, "runtime_env": {"env_vars": variables}},
        max_ongoing_requests=asked.max_sequences + asked.max_waiting, health_check_period_s=HEALTH,
        graceful_shutdown_timeout_s=asked.grace, max_constructor_retry_count=1,
    )  # fmt: skip
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray_serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    try:
        ray_serve.run(deployment.bind(asked), name=name, route_prefix=None)
    except RuntimeError as error:
        why = ray_serve.status().applications[name].deployments["Replica"].message
        ray_serve.delete(name)
        line = next((x for x in reversed(why.splitlines()) if "Error:" in x), str(error).splitlines()[0])
        raise InputError(f"replicas do not start: {line.strip()}") from None


async def _known(self: Replica, key: str) -> str:
    """A beginning that a replica is known for from now on."""
    return key
