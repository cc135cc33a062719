"""The server's routes: the OpenAI interface, health, metrics, the page and its JSON."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import functools
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from moepack.server.batching.engine import Engine
from moepack.server.batching.grammar import Grammars
from moepack.server.batching.jobs import Job, JobEvent
from moepack.server.batching.scheduler import Scheduler
from moepack.server.batching.tokens import Tokens
from moepack.server.errors import ApiError, failed, too_long
from moepack.server.options import UNLIMITED, Options
from moepack.version import __version__

from . import parse
from .answer import Answer, Gone, Streamed
from .fields import parse_json
from .guard import Guard, body, refusal
from .live_view import LiveView
from .metrics import Metrics
from .replies import ChatReply, CompletionReply, Reply
from .templates import render

HELPERS = 2  # threads beside the event loop; glibc keeps an arena for each thread that ever ran
Found = TypeVar("Found")


class Server:
    """The application: a model, its scheduler and the routes. Call `start` on the event loop that serves `app`."""

    def __init__(self, model: Any, tokenizer: Any, options: Options) -> None:
        self._options = options
        self.tokens = Tokens(tokenizer, getattr(model, "generation_config", None))
        if options.template is not None:
            tokenizer.chat_template = options.template
        text = model.config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        self._grammars = Grammars(tokenizer, self._vocabulary, self.tokens.ends)
        context = min(options.limits.context, int(getattr(text, "max_position_embeddings", None) or UNLIMITED))
        self.engine = Engine(model, options.limits.step_tokens)
        self.scheduler = Scheduler(self.engine, self.tokens, replace(options.limits, context=context), self._post)
        self.metrics = Metrics(model, self.engine, self.scheduler)
        self._view, self._serving = LiveView(model, options.name, self.engine, self.scheduler), model.moepack
        self._began = int(time.time())
        self._loop: asyncio.AbstractEventLoop | None = None
        self._helpers = concurrent.futures.ThreadPoolExecutor(HELPERS, "moepack-requests")
        routes = [
            Route("/", self._page),
            Route("/health", self._health),
            Route("/live", self._live),
            Route("/metrics", self._metrics),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/v1/completions", self._completions, methods=["POST"]),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {ApiError: _refusal, HTTPException: _http_error, Exception: _failure}
        inner = Starlette(routes=routes, exception_handlers=handlers)
        known = {route.path for route in routes}
        self.app = Guard(self._counted(inner, known), options.key, options.host)

    def start(self) -> None:
        """Start answering. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()

    def stop(self) -> None:
        """Refuse new requests."""
        self.scheduler.stop()

    def close(self) -> None:
        """Stop at once, and drop the sequences that still run."""
        self.scheduler.close()

    async def _aside(self, work: Callable[[], Found]) -> Found:
        """Run slow work on a helper thread: large bodies, templates, tokenising, the page's numbers."""
        return await asyncio.get_running_loop().run_in_executor(self._helpers, work)

    # --- from the scheduler's thread to the loop

    def _post(self, events: list[tuple[Job, JobEvent]]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, events)

    def _tell(self, events: list[tuple[Job, JobEvent]]) -> None:
        for job, event in events:
            if event.finish is not None:
                self.metrics.ended(job, event.generated)
            job.tell(event)

    def _counted(self, app: Any, known: set[str]) -> Any:
        async def counting(scope: Any, receive: Any, send: Any) -> None:
            async def sending(message: Any) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if scope["path"] in known else "other"
                    self.metrics.requests.labels(path, str(message["status"])).inc()
                await send(message)

            await app(scope, receive, sending if scope["type"] == "http" else send)

        return counting

    # --- other routes

    async def _page(self, request: Request) -> Response:
        page, policy = _page()
        headers = {"content-security-policy": policy, "x-content-type-options": "nosniff"}
        headers |= {"referrer-policy": "no-referrer", "cache-control": "no-cache"}
        return Response(page, media_type="text/html", headers=headers)

    async def _health(self, request: Request) -> Response:
        versions, answers = self._serving.health(), self.scheduler.health()
        good = bool(versions["ok"] and answers["ok"])
        found = {"status": "ok" if good else "failing", "versions": versions, "answers": answers}
        return JSONResponse(found, 200 if good else 503)

    async def _live(self, request: Request) -> Response:
        made = await self._aside(self._view)
        chats = bool(self.tokens.tokenizer.chat_template)
        return JSONResponse({**made, "chats": chats}, headers={"cache-control": "no-store"})

    async def _metrics(self, request: Request) -> Response:
        made = await self._aside(self.metrics.text)
        return Response(made, media_type="text/plain; version=0.0.4; charset=utf-8")

    def _described(self) -> dict[str, Any]:
        limits = self.scheduler.limits
        context = {"max_model_len": limits.context} if limits.context < UNLIMITED else {}
        return {
            "id": self._options.name, "object": "model", "created": self._began, "owned_by": f"moepack {__version__}",
            **context,
        }  # fmt: skip

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._described()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._described())

    def _check_model(self, name: str) -> None:
        if name != self._options.name:
            why = f"the model {name!r} is not here: {self._options.name!r} is"
            raise ApiError(404, why, "model", "model_not_found")

    # --- generation

    async def _completions(self, request: Request) -> Response:
        def encoded(asked: parse.Request) -> list[list[int]]:
            return [self.tokens.encode(p, asked.special, "prompt") if isinstance(p, str) else p for p in asked.prompts]

        return await self._answered(request, parse.completion, encoded, CompletionReply)

    async def _chat(self, request: Request) -> Response:
        return await self._answered(request, parse.chat, lambda asked: [render(self.tokens, asked)], ChatReply)

    async def _answered(
        self,
        request: Request,
        parsed: Callable[[dict[str, Any], int], parse.Request],
        encoded: Callable[[parse.Request], list[list[int]]],
        kind: type[Reply],
    ) -> Response:
        raw = await body(request, self._options.body)
        asked = await self._aside(lambda: parsed(parse_json(raw), self._vocabulary))
        if asked.model is not None:
            self._check_model(asked.model)
        answer = Answer()

        def prepare() -> Reply:
            prompts = encoded(asked)
            self._jobs(asked, prompts, answer)
            return kind(asked, prompts, self.tokens, self._options.name)

        reply = await self._aside(prepare)
        self.scheduler.submit(answer.jobs)
        batches = answer.batches(request.receive)
        if asked.stream:
            return Streamed(reply.chunks(batches))
        async for batch in batches:
            for index, event in batch:
                reply.choices[index].hear(event)
        return JSONResponse(reply.whole())

    def _jobs(self, asked: parse.Request, prompts: list[list[int]], answer: Answer) -> None:
        """Add a job for each answer to each prompt. Call it off the event loop: a grammar may take seconds."""
        grammar = None if asked.schema is None else self._grammars.check(asked.schema)
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "the prompt is empty", "prompt")
            room = self.scheduler.most_answer(len(prompt))
            wanted = room if asked.max_tokens is None else asked.max_tokens
            if wanted > room:
                held = f"{len(prompt) + room} tokens of a sequence is the most that this server holds"
                why = f"the prompt has {len(prompt)} tokens, and {wanted} are wanted: {held}, which leaves {room}"
                raise too_long(why, "max_tokens")
            for n in range(asked.count):
                seed = asked.sampling.seed
                sampling = asked.sampling if seed is None else replace(asked.sampling, seed=_mixed(seed, n))
                job = Job(prompt, wanted, sampling, functools.partial(answer.hear, len(answer.jobs)), asked.stops)
                job.ends = frozenset() if asked.ignores_ends else self.tokens.ends
                job.grammar = grammar
                job.wants_prompt = asked.echo and sampling.top_logprobs is not None
                answer.jobs.append(job)


def _mixed(seed: int, n: int) -> int:
    """Derive the seed of the n-th answer to a prompt; the first keeps the given seed."""
    return (seed + n * 0x9E3779B97F4A7C15) % (1 << 63)


@functools.cache
def _page() -> tuple[bytes, str]:
    """The page, and a content security policy that allows its one script and one style only."""
    page = files(__package__).joinpath("page.html").read_bytes()
    allowed = {}
    for tag in (b"script", b"style"):
        inner = page.partition(b"<%b>" % tag)[2].partition(b"</%b>" % tag)[0]
        allowed[tag.decode()] = "'sha256-" + base64.b64encode(hashlib.sha256(inner).digest()).decode() + "'"
    return page, (
        f"default-src 'none'; script-src {allowed['script']}; style-src {allowed['style']}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _refusal(request: Request, error: ApiError) -> Response:
    return refusal(error)


async def _http_error(request: Request, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    if isinstance(error, Gone):
        return Response(status_code=499)
    return refusal(failed("this server failed on the request"))
