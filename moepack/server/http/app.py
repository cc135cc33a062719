"""The server's routes: the OpenAI interface, health, metrics, the page and its JSON."""

from __future__ import annotations

import asyncio
import base64
import concurrent.futures
import functools
import hashlib
import time
from collections.abc import AsyncIterator, Callable
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

from . import parse, replies
from .answer import Answer, Gone, Streamed, collected
from .fields import parse_json
from .guard import Guard, body, refusal
from .live_view import LiveView
from .metrics import Metrics
from .replies import Choice, Head
from .templates import Templates

HELPERS = 2  # threads beside the event loop; glibc keeps an arena for each thread that ever ran
Found = TypeVar("Found")


class Server:
    """The application: a model, its scheduler and the routes. Call `start` on the event loop that serves `app`."""

    def __init__(self, model: Any, tokenizer: Any, options: Options) -> None:
        self._options = options
        self.tokens = Tokens(tokenizer, getattr(model, "generation_config", None))
        self.templates = Templates(self.tokens, options.template)
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
        self.app = Guard(self._counted(inner), options.key, options.host)

    def start(self) -> None:
        """Start answering. Call it on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.scheduler.start()

    def stop(self) -> None:
        """Refuse new requests."""
        self.scheduler.stop()

    def close(self) -> None:
        """Stop at once, and drop what still runs."""
        self.scheduler.close(0.0)

    def check(self) -> None:
        """Raise RuntimeError with the reason if answers fail."""
        found = self.scheduler.health()
        if not found["ok"]:
            raise RuntimeError(f"answers fail: {found['error']}")

    async def _aside(self, work: Callable[[], Found]) -> Found:
        """Run slow work off the event loop: large bodies, templates, tokenising, the page's numbers."""
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

    def _counted(self, app: Any) -> Any:
        known = {"/", "/health", "/live", "/metrics", "/v1/models", "/v1/completions", "/v1/chat/completions"}

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
        return JSONResponse({**made, "chats": self.templates.is_there}, headers={"cache-control": "no-store"})

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
            raise ApiError(
                404, f"the model {name!r} is not here: {self._options.name!r} is", "model", "model_not_found"
            )

    # --- generation

    async def _read(self, request: Request, reader: Callable[[dict[str, Any], int], Any]) -> Any:
        raw = await body(request, self._options.body)
        found = await self._aside(lambda: reader(parse_json(raw), self._vocabulary))
        if found.asked.model is not None:
            self._check_model(found.asked.model)
        return found

    def _jobs(self, asked: parse.RequestOptions, prompts: list[list[int]], answer: Answer, echo: bool = False) -> None:
        """Make a job for each answer to each prompt. Not on the event loop: a grammar may take seconds."""
        grammar = None if asked.schema is None else self._grammars.check(asked.schema)
        limits, index = [], 0
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "the prompt is empty", "prompt")
            room = self.scheduler.most_answer(len(prompt))
            wanted = room if asked.max_tokens is None else asked.max_tokens
            if wanted > room:
                held = f"{len(prompt) + room} tokens of a sequence is the most that this server holds"
                why = f"the prompt has {len(prompt)} tokens, and {wanted} are wanted: {held}, which leaves {room}"
                raise too_long(why, "max_tokens")
            limits.append(wanted)
        for prompt, most in zip(prompts, limits, strict=True):
            for n in range(asked.count):
                seed = asked.sampling.seed
                sampling = asked.sampling if seed is None else replace(asked.sampling, seed=_mixed(seed, n))
                job = Job(prompt, most, sampling, answer.listener(index), asked.stops)
                job.ends = frozenset() if asked.ignores_ends else self.tokens.ends
                job.grammar = None if grammar is None else functools.partial(self._grammars.mask, grammar)
                job.wants_prompt = echo and sampling.top_logprobs is not None
                answer.jobs.append(job)
                index += 1

    async def _completions(self, request: Request) -> Response:
        asked: parse.CompletionRequest = await self._read(request, parse.completion)
        answer = Answer()

        def prepare() -> list[list[int]]:
            found = [self.tokens.encode(p, asked.special, "prompt") if isinstance(p, str) else p for p in asked.prompts]
            self._jobs(asked.asked, found, answer, asked.echo)
            return found

        prompts = await self._aside(prepare)
        choices = [Choice(prompt) for prompt in prompts for _ in range(asked.asked.count)]
        head = Head("text_completion", self._options.name, "cmpl")
        self.scheduler.submit(answer.jobs)
        if asked.asked.stream:
            return Streamed(self._completion_pieces(request, asked, answer, choices, head))
        await collected(answer, request.receive, choices)
        made = []
        for index, choice in enumerate(choices):
            before = self._echoed(asked, index // asked.asked.count, choice) if asked.echo else ""
            scored = [*choice.of_prompt, *choice.scored] if asked.echo else choice.scored
            logprobs = None
            if asked.asked.sampling.top_logprobs is not None:
                logprobs = replies.completion_logprobs(self.tokens, scored)
            made.append(replies.completion_choice(index, before + choice.text, choice.finish, logprobs))
        return JSONResponse(head(made, usage=replies.usage(choices, asked.asked.count)))

    def _echoed(self, asked: parse.CompletionRequest, number: int, choice: Choice) -> str:
        prompt = asked.prompts[number]
        return prompt if isinstance(prompt, str) else self.tokens.decode(list(choice.prompt))

    async def _completion_pieces(
        self, request: Request, asked: parse.CompletionRequest, answer: Answer, choices: list[Choice], head: Head
    ) -> AsyncIterator[list[Any]]:
        wants, extra = asked.asked.sampling.top_logprobs is not None, _empty_usage(asked.asked)
        at, begun = [0] * len(choices), set()
        async for batch in answer.batches(request.receive):
            pieces = []
            for index, event in batch:
                choice, text, scored = choices[index], event.text, list(event.scored)
                choice.hear(event)
                if asked.echo and index not in begun:
                    text = self._echoed(asked, index // asked.asked.count, choice) + text
                    scored = [*event.prompt, *scored]
                begun.add(index)
                logprobs = replies.completion_logprobs(self.tokens, scored, at[index]) if wants else None
                at[index] += len(text)
                pieces.append(head([replies.completion_choice(index, text, event.finish, logprobs)], **extra))
            yield pieces
        if asked.asked.usage:
            yield [head([], usage=replies.usage(choices, asked.asked.count))]

    async def _chat(self, request: Request) -> Response:
        asked: parse.ChatRequest = await self._read(request, parse.chat)
        answer = Answer()

        def prepare() -> list[int]:
            found = self.templates.render(asked)
            self._jobs(asked.asked, [found], answer)
            return found

        prompt = await self._aside(prepare)
        choices = [Choice(prompt) for _ in range(asked.asked.count)]
        kind = "chat.completion.chunk" if asked.asked.stream else "chat.completion"
        head = Head(kind, self._options.name, "chatcmpl")
        self.scheduler.submit(answer.jobs)
        if asked.asked.stream:
            return Streamed(self._chat_pieces(request, asked, answer, choices, head))
        await collected(answer, request.receive, choices)
        wants = asked.asked.sampling.top_logprobs is not None
        made = [
            replies.chat_choice(index, choice, self.tokens, wants, bool(asked.tools))
            for index, choice in enumerate(choices)
        ]
        return JSONResponse(head(made, usage=replies.usage(choices, asked.asked.count)))

    async def _chat_pieces(
        self, request: Request, asked: parse.ChatRequest, answer: Answer, choices: list[Choice], head: Head
    ) -> AsyncIterator[list[Any]]:
        wants, extra = asked.asked.sampling.top_logprobs is not None, _empty_usage(asked.asked)
        begins = {"role": "assistant", "content": ""}
        yield [head([replies.chat_piece(n, begins)], **extra) for n in range(len(choices))]
        async for batch in answer.batches(request.receive):
            pieces = []
            for index, event in batch:
                choice = choices[index]
                choice.hear(event)
                logprobs = replies.chat_logprobs(self.tokens, event.scored) if wants else None
                text, finish, more = event.text, event.finish, {}
                if asked.tools:  # a possible tool call is sent only once it is whole
                    text, calls = self.templates.calls(choice.text) if finish else ("", [])
                    if calls:
                        finish = "tool_calls" if finish == "stop" else finish
                        more = {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls)]}
                delta = ({"content": text} if text else {}) | more
                if delta or event.scored:
                    pieces.append(head([replies.chat_piece(index, delta, None, logprobs)], **extra))
                if finish:
                    pieces.append(head([replies.chat_piece(index, {}, finish)], **extra))
            if pieces:
                yield pieces
        if asked.asked.usage:
            yield [head([], usage=replies.usage(choices, asked.asked.count))]


def _empty_usage(asked: parse.RequestOptions) -> dict[str, None]:
    """Each chunk's usage field: empty if the stream ends with its usage, else absent."""
    return {"usage": None} if asked.usage else {}


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
