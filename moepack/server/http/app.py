"""The application: a model behind its scheduler, and the routes that have text generated or tokenised."""

from __future__ import annotations

import asyncio
import concurrent.futures
import difflib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from moepack.runtime.planning.config import longest_context
from moepack.server.about.info import Info
from moepack.server.about.live_view import LiveView
from moepack.server.about.metrics import Metrics
from moepack.server.batching.engine import Engine
from moepack.server.batching.grammar import Grammars, JsonMask
from moepack.server.batching.jobs import Job, JobEvent
from moepack.server.batching.prefix_files import PrefixFiles, described
from moepack.server.batching.scheduler import Scheduler
from moepack.server.batching.tokens import Tokens
from moepack.server.errors import ApiError, failed, too_long
from moepack.server.options import UNLIMITED, Options, Sampling
from moepack.server.own_sampling import defaults_of, own_sampling
from moepack.server.tools.parts import AnswerReader, PlainReader
from moepack.server.translated.message_reply import MessageReply
from moepack.server.translated.messages import counted, messages
from moepack.server.translated.response_reply import ResponseReply
from moepack.server.translated.responses import responses

from . import parse
from .answer import Answer, Gone, Streamed
from .guard import IGNORED, Guard, Json, body, refusal
from .json_body import parse_json
from .models import Object
from .replies import ChatReply, CompletionReply, Reply
from .templates import ChatTemplate
from .tokenizing import Tokenized, detokenize, tokenize

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send
    from transformers import PreTrainedTokenizerBase

    from moepack.runtime.served_model import ServedModel

log = logging.getLogger("moepack.server")
HELPERS = 2  # threads beside the event loop; glibc keeps an arena for each thread that ever ran
Found = TypeVar("Found")


class Server:
    """The application: a model, its scheduler and the routes. Call `start` on the event loop that serves `app`.

    Attributes:
        own: the model's own defaults of sampling, as far as they apply.
    """

    def __init__(self, model: ServedModel, tokenizer: PreTrainedTokenizerBase, options: Options) -> None:
        self._options = options
        self.tokens = Tokens(tokenizer, getattr(model, "generation_config", None))
        if options.template is not None:
            tokenizer.chat_template = options.template
        text = model.config.get_text_config()
        self._vocabulary = int(text.vocab_size)
        self.own = own_sampling(getattr(model, "generation_config", None)) if options.own_sampling else {}
        self._defaults = defaults_of(self.own)
        self._template = ChatTemplate(self.tokens, options.system_messages)
        self._ignored: set[str] = set()  # hints of which the log has told
        self._grammars = Grammars(tokenizer, self._vocabulary, self.tokens.ends)
        context = min(options.limits.context, longest_context(model.config) or UNLIMITED)
        folder = options.prefix_dir
        files = None if folder is None else PrefixFiles(folder, options.prefix_dir_bytes, described(model))
        self.engine = Engine(model, options.limits.step_tokens, options.limits.kept_bytes, files)
        self.scheduler = Scheduler(self.engine, self.tokens, replace(options.limits, context=context), self._post)
        self.metrics = Metrics(model, options.name, self.engine, self.scheduler)
        view, chats = LiveView(model, options.name, self.engine, self.scheduler), bool(tokenizer.chat_template)
        self._info = Info(options.name, model.moepack, self.scheduler, self.metrics, view, chats, self._aside)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._helpers = concurrent.futures.ThreadPoolExecutor(HELPERS, "moepack-requests")
        answered = partial(self._answered, prepared=self._prepare_chat)
        texts = partial(self._answered, prepared=self._prepare_texts)
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/tokenize": partial(self._computed, answer=partial(self._tokens_of, parsed=tokenize)),
            "/detokenize": partial(self._computed, answer=partial(self._tokens_of, parsed=detokenize)),
            "/v1/completions": partial(texts, parsed=parse.completion, kind=CompletionReply),
            "/v1/chat/completions": partial(answered, parsed=parse.chat, kind=ChatReply),
            "/v1/responses": partial(answered, parsed=responses, kind=ResponseReply),
            "/v1/messages": partial(answered, parsed=messages, kind=MessageReply),
            "/v1/messages/count_tokens": partial(self._computed, answer=self._count),
        }
        routes = [*self._info.routes, *(Route(path, answer, methods=["POST"]) for path, answer in posts.items())]
        handlers: dict[Any, Any] = {ApiError: _refusal, HTTPException: _http_error, Exception: _failure}
        handlers |= {Gone: _left, ClientDisconnect: _left}
        inner = Starlette(routes=routes, exception_handlers=handlers)
        known = {route.path for route in routes}
        self.app = Guard(self._counted(inner, known), options.keys, options.host)

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
                self.metrics.ended(job, event)
            job.tell(event)

    def _counted(self, app: ASGIApp, known: set[str]) -> ASGIApp:
        async def counting(scope: Scope, receive: Receive, send: Send) -> None:
            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if scope["path"] in known else "other"
                    self.metrics.requests.labels(path, str(message["status"])).inc()
                await send(message)

            await app(scope, receive, sending if scope["type"] == "http" else send)

        return counting

    # --- generation

    async def _computed(self, request: Request, answer: Callable[[Object], Object]) -> Response:
        """Answer a request whose answer is computed from its body at once."""
        raw = await body(request, self._options.body)
        return Json(await self._aside(lambda: answer(parse_json(raw))))

    def _tokens_of(self, given: Object, parsed: Callable[[Object, int], Tokenized]) -> Object:
        asked = parsed(given, self._vocabulary)
        self._info.check_model(asked.model)
        return asked.answer(self.tokens, self._template, self.scheduler.most_tokens)

    def _count(self, given: Object) -> Object:
        asked = counted(given, self._vocabulary)
        self._info.check_model(asked.model)
        assert asked.chat is not None
        return {"input_tokens": len(self._template.render(asked.chat)[1])}

    def _prepare_texts(self, asked: parse.Request) -> _Prepared:
        each = [self.tokens.encode(p, asked.special, "prompt") if isinstance(p, str) else p for p in asked.prompts]
        schema = asked.schema
        return _Prepared(each, grammar=None if schema is None else self._grammars.of_schema(schema))

    def _prepare_chat(self, asked: parse.Request) -> _Prepared:
        assert asked.chat is not None
        manners = self._template.manners
        tools = asked.chat.tools
        text, ids = self._template.render(asked.chat)
        grammar = None
        schema = None if tools.functions and tools.required else asked.schema  # then the answer is calls alone
        field = asked.names.schema
        if tools.binding or (tools.functions and schema is not None):
            grammar = self._grammars.of_calls(
                tools.functions, lambda: manners.grammar(tools, text, schema), schema, field
            )
        elif schema is not None:
            grammar = self._grammars.of_schema(schema, lambda schema: manners.json_grammar(schema, text), field)
        ignored = tuple(self._template.unfollowed(asked.chat))

        def reader() -> AnswerReader:
            return manners.reader(tools, text, schema is not None)

        return _Prepared([ids], reader, grammar, manners.shows_special, ignored)

    async def _answered(
        self,
        request: Request,
        parsed: Callable[[Object, int, Sampling], parse.Request],
        prepared: Callable[[parse.Request], _Prepared],
        kind: type[Reply],
    ) -> Response:
        raw = await body(request, self._options.body)
        asked = await self._aside(lambda: parsed(parse_json(raw), self._vocabulary, self._defaults))
        self._info.check_model(asked.model)
        answer = Answer()

        def prepare() -> tuple[Reply, tuple[str, ...]]:
            found = prepared(asked)
            self._jobs(asked, found, answer)
            for prompt in {id(job.prompt): job.prompt for job in answer.jobs if not job.wants_prompt}.values():
                self.engine.look_for(prompt)
            reply = kind(asked, found.prompts, self.tokens, self._options.name, found.reader)
            return reply, (*asked.unfollowed, *found.ignored)

        reply, ignored = await self._aside(prepare)
        headers = self._told(ignored)
        self.scheduler.submit(answer.jobs)
        batches = answer.batches(request.receive)
        if asked.stream:
            return Streamed(reply, batches, headers)
        async for batch in batches:
            for index, event in batch:
                reply.hear(index, event)
        return Json(reply.whole(), headers=headers)

    def _told(self, ignored: Iterable[str]) -> Mapping[str, str]:
        """Return the headers that name ignored hints. The log names each hint once."""
        names = list(ignored)
        for name in names:
            if name not in self._ignored:
                self._ignored.add(name)
                log.warning("%s is accepted, but no answer of this model follows it (header %s)", name, IGNORED)
        return {IGNORED: ", ".join(names)} if names else {}

    def _jobs(self, asked: parse.Request, prepared: _Prepared, answer: Answer) -> None:
        """Add a job for each answer to each prompt. Call it off the event loop: a grammar may take seconds."""
        for prompt in prepared.prompts:
            if not prompt:
                raise ApiError(400, "the prompt is empty", asked.names.prompt)
            room = self.scheduler.most_answer(len(prompt))
            wanted = room if asked.max_tokens is None else asked.max_tokens
            if asked.bound:
                wanted = min(wanted, room)
            if wanted > room:
                held = f"this model's maximum context length is {len(prompt) + room} tokens, which leaves {room}"
                why = f"the prompt has {len(prompt)} tokens, and {wanted} are wanted: {held}"
                raise too_long(why, asked.names.limit)
            for n in range(asked.count):
                seed = asked.sampling.seed
                sampling = asked.sampling if seed is None else replace(asked.sampling, seed=_mixed(seed, n))
                job = Job(prompt, wanted, sampling, partial(answer.hear, len(answer.jobs)), asked.stops)
                job.ends = frozenset() if asked.ignores_ends else self.tokens.ends
                job.grammar, job.shows_special = prepared.grammar, prepared.shows_special
                job.wants_prompt = asked.echo and sampling.top_logprobs is not None
                answer.jobs.append(job)


@dataclass(frozen=True, slots=True)
class _Prepared:
    """The parsed parts of a request from which its jobs are made."""

    prompts: list[list[int]]
    reader: Callable[[], AnswerReader] = PlainReader  # makes what reads an answer of a chat
    grammar: Callable[[], JsonMask] | None = None  # makes the mask of an answer
    shows_special: bool = False  # whether answers are decoded with special tokens
    ignored: tuple[str, ...] = ()  # fields with hints that the chat template cannot follow


def _mixed(seed: int, n: int) -> int:
    """Derive the seed of the n-th answer to a prompt; the first keeps the given seed."""
    return (seed + n * 0x9E3779B97F4A7C15) % (1 << 63)


async def _refusal(request: Request, error: ApiError) -> Response:
    return refusal(error, request.scope["path"])


async def _http_error(request: Request, error: HTTPException) -> Response:
    path = request.scope["path"]
    said = str(error.detail)
    if error.status_code == 404:
        near = difflib.get_close_matches(path, [route.path for route in request.app.routes], 1, cutoff=0.75)
        said = f"there is no path {path[:128]!r}: " + (f"did you mean {near[0]}?" if near else "see /openapi.json")
    return refusal(ApiError(error.status_code, said), path, error.headers)


async def _left(request: Request, error: Exception) -> Response:
    """Answer nobody: as a failure, a client that leaves would cost a traceback in the log."""
    return Response(status_code=499)


async def _failure(request: Request, error: Exception) -> Response:
    return refusal(failed("this server failed on the request"), request.scope["path"])
