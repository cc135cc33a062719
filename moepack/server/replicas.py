"""`moepack serve --replicas N`: copies of the server on Ray Serve, each with its own budget, behind one HTTP front.

The front is an actor on the node where the command was typed. Each request goes to the replica that has served prompts
with the same beginning, unless its queue is full (`routing`). So the hot experts of a replica fit its own traffic. This
is Ray's model multiplexing, with a prompt's beginning as the model. Ray restarts replicas whose health check fails.
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
import socket
import threading
from collections.abc import AsyncIterator, Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError, MissingExtraError
from moepack.pack.processors import processors
from moepack.runtime.planning.options import AUTO
from moepack.shared.cluster import connect

from .command import COMPILED, Serve, handling, listening, opened, options_of, prepare, run, shown, stop_signals
from .own_sampling import described

if TYPE_CHECKING:
    import uvicorn
    from ray.serve.handle import DeploymentHandle
    from starlette.responses import JSONResponse
    from starlette.types import Message, Receive, Scope, Send

BEGINNING = 64  # characters at a prompt's beginning that choose its replica
PREFIXES = 512  # beginnings that a replica remembers; the oldest are dropped first
HEALTH = 5.0  # seconds between health checks
PAGE = "page"  # key of requests without a prompt: one replica answers all, so that the page's numbers are consistent
SCOPE = ("type", "method", "path", "raw_path", "query_string", "headers", "http_version", "scheme", "root_path", "asgi")


def beginning(raw: bytes) -> str:
    """Return a request's routing key: a digest of its prompt's or first message's beginning; PAGE without either."""
    with contextlib.suppress(ValueError, RecursionError):
        given = json.loads(raw)
        if isinstance(given, dict):
            found = given.get("messages", given.get("prompt", given.get("input")))
            found = found[0] if isinstance(found, list) and found and not isinstance(found[0], int) else found
            found = found.get("content") if isinstance(found, dict) else found
            text = found if isinstance(found, str) else json.dumps(found)
            return hashlib.sha256(text[:BEGINNING].encode(errors="replace")).hexdigest()[:16]
    return PAGE


class Replica:
    """A server without an HTTP front. Ray calls it for each request."""

    def __init__(self, asked: Serve) -> None:
        self._entered = contextlib.ExitStack()
        self._server = self._entered.enter_context(opened(asked, options_of(asked)))
        self._started = False

    async def check_health(self) -> None:
        """Raise if answers fail; Ray Serve then restarts the replica."""
        found = self._server.scheduler.health()
        if self._started and not found["ok"]:
            raise RuntimeError(f"answers fail: {found['error']}")

    async def sampling(self) -> str:
        """Describe the model's own defaults of sampling."""
        return described(self._server.own)

    async def load(self) -> dict[str, int]:
        """Return how busy it is."""
        from .about.info import load_of

        return load_of(self._server.scheduler)

    async def answer(self, scope: Scope, raw: bytes) -> AsyncIterator[Message]:
        """Yield the ASGI messages of a request's answer; cancel the request when the caller stops reading."""
        from ray import serve as ray_serve

        if not self._started:
            self._started = True
            self._server.start()
        if key := ray_serve.get_multiplexed_model_id():
            await self._known(key)  # type: ignore[attr-defined]  # _deploy adds `_known`
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        unread = [{"type": "http.request", "body": raw, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
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
        """Release the model; Ray Serve calls this once no request runs."""
        self._server.close()
        self._entered.close()


class Door:
    """The HTTP front of all replicas: a Ray actor, which `command.run` runs in the place of a `Server`."""

    def __init__(self, asked: Serve, name: str) -> None:
        from .http.guard import Guard

        self._asked = asked
        self._name = name
        self._options = options_of(asked)
        self.app = Guard(self._relay, self._options.keys, asked.host)
        self._stopping = False
        self._opened: asyncio.Future[tuple[uvicorn.Server, int]] = asyncio.get_event_loop().create_future()
        self._closed: asyncio.Future[None] = asyncio.get_event_loop().create_future()

    # --- called through Ray

    async def open(self) -> int:
        """Listen, and return the port."""
        self._closed = asyncio.ensure_future(self._listen())
        either: list[asyncio.Future[Any]] = [self._closed, self._opened]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._opened.done():
            self._closed.result()
        return self._opened.result()[1]

    async def closed(self) -> None:
        """Wait until the front has stopped listening."""
        await self._closed

    async def end(self) -> None:
        """Finish running requests and close."""
        self._opened.result()[0].should_exit = True
        await self._closed

    async def _listen(self) -> None:
        with listening(self._asked.host, self._asked.port) as listener:
            port = listener.getsockname()[1]
            await run(self, listener, self._asked, lambda uvicorn: self._opened.set_result((uvicorn, port)))

    # --- as a server

    def start(self) -> None:
        """Do nothing: the replicas run already."""

    def stop(self) -> None:
        """Refuse new requests."""
        self._stopping = True

    def close(self) -> None:
        """Do nothing: no request is left."""

    # --- requests

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        from ray import serve as ray_serve
        from starlette.requests import ClientDisconnect, Request

        from .errors import ApiError, stopping
        from .http.guard import body, disconnected, refusal

        if scope["type"] != "http":
            return
        raw = b""
        begun = False
        try:
            if self._stopping:
                raise stopping()
            if scope["method"] == "POST":
                raw = await body(Request(scope, receive), self._options.body)
            handle = ray_serve.get_app_handle(self._name)
            if (scope["method"], scope["path"]) == ("GET", "/load") and hasattr(handle, "broadcast"):
                await _loads(await handle.broadcast("load").results_async(timeout_s=HEALTH))(scope, receive, send)
                return
            handle = handle.options(
                stream=True, method_name="answer", multiplexed_model_id=beginning(raw) if raw else PAGE
            )
            pieces: Any = handle.remote({name: scope[name] for name in SCOPE if name in scope}, raw)

            async def relayed() -> None:
                nonlocal begun
                async for message in pieces:
                    begun = True
                    await send(message)

            working = asyncio.ensure_future(relayed())
            gone = asyncio.ensure_future(disconnected(receive))
            try:
                await asyncio.wait([working, gone], return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()
            finally:
                working.cancel()
                gone.cancel()
                pieces.cancel()
        except ClientDisconnect:
            return
        except ApiError as error:
            await refusal(error, scope["path"])(scope, receive, send)
        except Exception as error:
            if begun:
                raise
            why = f"no replica answers: {type(error).__name__}"
            await refusal(ApiError(503, why, None, "unavailable"), scope["path"])(scope, receive, send)


def _loads(replicas: list[dict[str, int]]) -> JSONResponse:
    """The answer to /load: the sums, and each replica's own numbers."""
    from starlette.responses import JSONResponse

    from .about.info import FRESH

    sums: dict[str, object] = {name: sum(one[name] for one in replicas) for name in replicas[0]}
    return JSONResponse({**sums, "replicas": replicas}, headers=FRESH)


def serve(asked: Serve, say: Callable[[str], None]) -> None:
    """Serve with replicas until a signal comes. Once they answer, `say` receives the address.

    Raises:
        InputError: if the front cannot listen or replicas do not start; the message gives the cause.
        MissingExtraError: without Ray Serve.
    """
    if asked.load.memory == AUTO:
        raise InputError("--memory auto is for one process: give each replica's own size")
    if asked.load.profile is not None:
        raise InputError("--profile is for one process: replicas would write one file")
    prepare()
    options = options_of(asked)
    cpus = max(asked.replicas, processors())
    ray, started = connect(asked.address, num_cpus=cpus)
    name = f"moepack-{secrets.token_hex(4)}"
    stopped = threading.Event()
    with contextlib.ExitStack() as undo:
        handled = undo.enter_context(contextlib.ExitStack())  # left last: a second signal ends nothing early
        if started:
            undo.callback(ray.shutdown)
        try:
            from ray import serve as ray_serve
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
        except ImportError as error:
            raise MissingExtraError(str(error.name), "ray") from None
        replica = _deploy(ray, ray_serve, asked, name)
        undo.callback(ray_serve.delete, name)
        node, elsewhere = node_of_front(ray)
        place = NodeAffinitySchedulingStrategy(node, soft=False)
        actor = ray.remote(Door).options(num_cpus=0, max_concurrency=4096, scheduling_strategy=place)
        door = actor.remote(asked, name)
        try:
            port = ray.get(door.open.remote())
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, InputError) else error from None
        handled.enter_context(handling(stop_signals(), lambda *_: stopped.set()))
        where = f"{options.name} at {shown(asked.host, port)}{elsewhere}, {asked.replicas} replicas"
        say("; ".join(filter(None, (where, replica.sampling.remote().result()))))
        closed = door.closed.remote()
        while not stopped.is_set() and not ray.wait([closed], timeout=0.5)[0]:
            pass
        ray.get(door.end.remote())


def node_of_front(ray: ModuleType) -> tuple[str, str]:
    """Return the node for the front, and what the address says of the node where it is another machine.

    It is the node where the command was typed: no other node's end then ends the front. A machine outside of the
    cluster has no node. Its front runs where the ray:// address leads.
    """
    alive = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}
    connected = str(ray.get_runtime_context().get_node_id())  # with ray://, the node that answers the address
    if _is_ours(alive[connected]):
        return connected, ""
    ours = [node for node, address in alive.items() if _is_ours(address)]
    return (ours[0], "") if ours else (connected, f" of node {alive[connected]}")


def _is_ours(address: str) -> bool:
    """Whether an IP address is one of this machine's: others cannot be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as tried:
        try:
            tried.bind((address, 0))
        except OSError:
            return False
    return True


def _deploy(ray: ModuleType, ray_serve: ModuleType, asked: Serve, name: str) -> DeploymentHandle[Any]:
    """Start the replicas, wait until they are loaded, and return what calls one of them."""
    from ray.serve.config import RequestRouterConfig

    on_gpu = asked.load.device.startswith("cuda")
    kind, found = ("GPU", ray.cluster_resources().get("GPU", 0)) if on_gpu else ("CPU", ray.cluster_resources()["CPU"])
    if found < asked.replicas:
        raise InputError(f"{asked.replicas} replicas need a {kind} each: the cluster has {found:g}")
    threads = 1 if on_gpu else max(1, math.floor(found / asked.replicas))
    options = {"num_cpus": 1 if on_gpu else threads, "num_gpus": int(on_gpu)}
    variables = {**COMPILED, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads))}
    router = RequestRouterConfig(request_router_class="moepack.server.routing.ByBeginning")  # type: ignore[arg-type]
    known = ray_serve.multiplexed(max_num_models_per_replica=PREFIXES)(_known)
    replica = type("Replica", (Replica,), {_known.__name__: known})  # Ray finds the method by its name
    deployment = ray_serve.deployment(replica).options(
        num_replicas=asked.replicas,
        ray_actor_options={**options, "runtime_env": {"env_vars": variables}},
        max_ongoing_requests=asked.max_sequences + asked.max_waiting,
        health_check_period_s=HEALTH,
        graceful_shutdown_timeout_s=asked.grace,
        max_constructor_retry_count=1,
        request_router_config=router,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray_serve.start(proxy_location="Disabled", logging_config={"log_level": "WARNING"})
    try:
        handle: DeploymentHandle[Any] = ray_serve.run(deployment.bind(asked), name=name, route_prefix=None)
        return handle
    except RuntimeError as error:
        why = ray_serve.status().applications[name].deployments["Replica"].message
        ray_serve.delete(name)
        line = next((x for x in reversed(why.splitlines()) if "Error:" in x), str(error).splitlines()[0])
        raise InputError(f"replicas do not start: {line.strip()}") from None


async def _known(self: Replica, key: str) -> str:
    """Return the key. Ray's multiplexing wraps this function to remember which replica has had which key."""
    return key
