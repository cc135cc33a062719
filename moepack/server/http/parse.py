"""Parse requests of the OpenAI interface. Unknown and unsupported fields are refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, Field, model_validator

from moepack.server.errors import bad
from moepack.server.options import DEFAULTS, Sampling
from moepack.server.tools.parts import Tools

from .models import (
    Body,
    Flag,
    Hint,
    List,
    NoFields,
    NoItems,
    Number,
    Object,
    Off,
    On,
    One,
    OpenBody,
    Text,
    Whole,
    Zero,
    read,
    wrong,
)
from .toolbox import MOST_TOOLS, Choice, ChosenTool, EarlierCall, Listed, Tool, chosen

MOST_STOPS, MOST_CHOICES, MOST_TOP = 16, 128, 20
MOST_BIAS = 100.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """A client's names for the parts of its request, for error messages."""

    prompt: str
    limit: str = "max_tokens"
    schema: str = "response_format"
    effort: str = "reasoning_effort"


CHAT_NAMES = Names(prompt="messages")


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation for the model's template."""

    messages: list[Object]  # in the shape that templates read
    origins: list[str]  # the field that each message comes from, for example messages[0]
    shown: Listed = field(default_factory=list)  # functions, in the shape that templates read
    tools: Tools = field(default_factory=Tools)  # those that the model may or must call
    effort: str | None = None  # how much to reason, in the words of the model's template
    template: Object = field(default_factory=dict)  # further arguments of the model's template
    thinks: bool | None = None  # whether to reason, where the template leaves a choice; None leaves it to it
    special: bool = False  # whether to add the tokens that begin or end a text, beside those that the template writes
    names: Names = field(default_factory=lambda: CHAT_NAMES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for completions of `prompts`, or for the next message of a chat."""

    model: str | None  # the name of the model; None, in completions alone, for the served model
    sampling: Sampling
    max_tokens: int | None  # the most tokens of the answer; None allows all that fit
    count: int = 1  # answers to each prompt
    stops: tuple[str, ...] = ()  # strings that end an answer
    ignores_ends: bool = False  # whether the answer continues after a token that ends answers
    stream: bool = False  # whether to stream the answer
    usage: bool = False  # whether a stream ends with its token counts
    continuous: bool = False  # whether every chunk of it has them
    schema: Object | None = None  # the schema of a JSON answer; None allows any text
    prompts: tuple[str | list[int], ...] = ()  # texts or token ids
    echo: bool = False  # whether the answer begins with the prompt
    special: bool = True  # whether to add the tokens that begin or end a text
    chat: Dialogue | None = None  # the chat; None for completions
    bound: bool = False  # whether max_tokens may exceed what fits: the answer then ends where its room does
    names: Names = CHAT_NAMES
    unfollowed: tuple[str, ...] = ()  # fields with hints that no answer follows
    repeated: Object = field(default_factory=dict)  # what a response repeats of its request


# --- fields that requests share


def _biases(given: Object) -> dict[str, float]:
    """Check numbers one by one, and no further than the first wrong one."""
    for name, value in given.items():
        if type(value) not in (int, float) or not -MOST_BIAS <= value <= MOST_BIAS:
            raise wrong(f"must be a number from {-MOST_BIAS:g} to {MOST_BIAS:g}", name)
    return given


_BIAS = {"additionalProperties": {"type": "number", "minimum": -MOST_BIAS, "maximum": MOST_BIAS}}
Biases = Annotated[Object, AfterValidator(_biases), Field(json_schema_extra=_BIAS)]
Stop = Annotated[Text, Field(min_length=1, max_length=1000)]
Stops = Annotated[List[Stop], Field(max_length=MOST_STOPS)]


class Unused(Body):
    """Fields of OpenAI, vLLM, llama.cpp and Ollama that change no answer at these values."""

    user: Text | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    metadata: Object | None = None
    store: Annotated[Flag, Hint(False)] = False
    service_tier: Annotated[Text | None, Hint("auto", "default")] = None
    priority: Whole | None = None
    request_id: Text | None = None
    use_beam_search: Off | None = None
    length_penalty: Number | None = None  # of beams
    early_stopping: Flag | None = None  # of beams
    min_tokens: Zero | None = None
    stop_token_ids: NoItems | None = None
    bad_words: NoItems | None = None
    logits_processors: NoItems | None = None
    include_stop_str_in_output: Off | None = None
    skip_special_tokens: On | None = None
    spaces_between_special_tokens: Flag | None = None
    return_token_ids: Off | None = None
    return_tokens_as_token_ids: Off | None = None
    mm_processor_kwargs: NoFields | None = None
    vllm_xargs: NoFields | None = None
    keep_alive: Text | Number | None = None
    cache_prompt: Flag | None = None
    typical_p: One | None = None
    repeat_penalty: One | None = None
    mirostat: Zero | None = None


class Sampled(Unused):
    """Fields that say how tokens are chosen, and where the answer ends. None leaves the choice to the server."""

    temperature: Number | None = Field(None, ge=0, le=100)
    top_p: Number | None = Field(None, ge=0, le=1)
    top_k: Whole | None = Field(None, ge=-1, le=1 << 31)
    min_p: Number | None = Field(None, ge=0, le=1)
    seed: Whole | None = Field(None, ge=-(1 << 63), le=(1 << 63) - 1)
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(0.0, ge=-2, le=2)
    repetition_penalty: Number | None = Field(None, ge=0.01, le=100)
    logit_bias: Biases = Field(default_factory=dict)
    stop: Stop | Stops = Field(default_factory=list)
    ignore_eos: Flag = False
    stream: Flag = False

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def sampling(self, vocabulary: int, defaults: Sampling, top: int | None) -> Sampling:
        """How tokens are chosen; `top` alternatives are reported with each."""
        for name in self.logit_bias:
            if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= vocabulary:
                raise bad(f"logit_bias[{name!r}]", f"is not a token: tokens go from 0 to {vocabulary - 1}")
        asked = defaults.with_given(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition=self.repetition_penalty,
        )
        return replace(
            asked,
            seed=self.seed,
            presence=self.presence_penalty,
            frequency=self.frequency_penalty,
            bias={int(name): float(value) for name, value in self.logit_bias.items()},
            top_logprobs=top,
        )


class StreamOptions(Body):
    """Options for what a stream reports in addition to the answer."""

    include_obfuscation: Annotated[Flag, Hint(False)] = False


class UsageOptions(StreamOptions):
    """Options for the token counts of a stream."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False  # in every chunk, as vLLM says it


class JsonSchema(Body):
    """A JSON schema with its name and description."""

    name: Text | None = None
    description: Text | None = None
    strict: Flag = False
    schema_: Object = Field(alias="schema")


class ResponseFormat(Body):
    """The answer's form: any text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _whole(self) -> ResponseFormat:
        check_schema(self.type, self.json_schema, "json_schema")
        return self


def check_schema(kind: str, schema: object, where: str) -> None:
    """Refuse a form without its schema, and a schema that the form does not take."""
    if kind == "json_schema" and schema is None:
        raise wrong("is missing", where)
    if kind != "json_schema" and schema is not None:
        raise wrong(f"is not supported beside {kind}", where, "unsupported")


def wanted_schema(kind: str, schema: Object | None) -> Object | None:
    """The JSON schema of an answer's form; None allows any text."""
    return {"type": "object"} if kind == "json_object" else schema


class Completed(Sampled):
    """Fields of chats and completions."""

    n: Whole = Field(1, ge=1, le=MOST_CHOICES)
    modalities: Annotated[List[Literal["text"]], Field(min_length=1, max_length=1)] | None = None
    stream_options: UsageOptions | None = None
    response_format: ResponseFormat | None = None

    def request(self, sampling: Sampling, limit: int | None, **own: Any) -> Request:
        """Make the request; `own` holds fields of one kind alone."""
        options = self.stream_options or UsageOptions()
        if self.stream_options is not None and not self.stream:
            raise bad("stream_options", "needs stream: true")
        return Request(
            sampling=sampling,
            max_tokens=limit,
            unfollowed=tuple(self.unfollowed()),
            count=self.n,
            stream=self.stream,
            usage=options.include_usage,
            continuous=options.include_usage and options.continuous_usage_stats,
            stops=self.stops,
            ignores_ends=self.ignore_eos,
            schema=self._schema(),
            **own,
        )

    def _schema(self) -> Object | None:
        form = self.response_format
        if form is None:
            return None
        return wanted_schema(form.type, None if form.json_schema is None else form.json_schema.schema_)


# --- completions

Texts = Annotated[List[Text], Field(min_length=1, max_length=MOST_CHOICES)]
Tokens = Annotated[List[Annotated[Whole, Field(ge=0)]], Field(min_length=1)]


class CompletionBody(Completed):
    """A request to /v1/completions."""

    model: Text | None = None
    prompt: Text | Texts | Tokens | Annotated[List[Tokens], Field(min_length=1, max_length=MOST_CHOICES)]
    echo: Flag = False
    add_special_tokens: Flag = True
    logprobs: Whole | None = Field(None, ge=0, le=MOST_TOP)
    best_of: Whole | None = None
    suffix: Literal[""] | None = None
    max_tokens: Whole = Field(16, ge=0, le=1 << 31)


def completion(given: Object, vocabulary: int, defaults: Sampling = DEFAULTS) -> Request:
    """Parse a request to /v1/completions. An ApiError names the field that is wrong or unsupported."""
    body = read(CompletionBody, given)
    if body.best_of not in (None, 1, body.n):
        raise bad("best_of", f"must be 1 or n, which is {body.n}", "unsupported")
    if not body.max_tokens and not body.echo:
        raise bad("max_tokens", "must be at least 1, or 0 with echo")
    prompts = _prompts(body.prompt)
    check_tokens("prompt", (token for prompt in prompts if not isinstance(prompt, str) for token in prompt), vocabulary)
    own: Object = {"model": body.model, "prompts": prompts, "echo": body.echo, "special": body.add_special_tokens}
    sampling = body.sampling(vocabulary, defaults, body.logprobs)
    return body.request(sampling, body.max_tokens, names=Names(prompt="prompt"), **own)


def check_tokens(where: str, tokens: Iterable[int], vocabulary: int) -> None:
    """Refuse tokens beyond a vocabulary."""
    if any(token >= vocabulary for token in tokens):
        raise bad(where, f"has an invalid token: tokens go from 0 to {vocabulary - 1}")


def _prompts(given: str | list[str] | list[int] | list[list[int]]) -> tuple[str | list[int], ...]:
    return (given,) if isinstance(given, str) or isinstance(given[0], int) else tuple(given)


# --- chats

RESERVED = frozenset({"messages", "conversation", "tools", "tokenize", "chat_template", "documents"})


class TextPart(OpenBody):
    """A part of a message."""

    type: Literal["text"]
    text: Text


Content = Text | List[TextPart]


class HasText(Protocol):
    """A part of a text."""

    text: Text


def joined(content: str | Sequence[HasText] | None, between: str = "") -> str:
    """Return a text that may come in parts, or not at all."""
    if content is None or isinstance(content, str):
        return content or ""
    return between.join(part.text for part in content)


class AnyMessage(Body):
    """The fields of every message."""

    role: Text
    content: Content | None
    name: Text | None = None
    # of Anthropic's clients, and of those that keep chats: they change no answer
    cache_control: Object | None = None
    id: Text | None = None
    timestamp: Text | Number | None = None

    def said(self) -> Object:
        """The message as templates read it."""
        role = "system" if self.role == "developer" else self.role
        name: Object = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": joined(self.content), **name}


class Message(AnyMessage):
    """A message that no model wrote."""

    role: Literal["system", "developer", "user"]
    content: Content


class ToolMessage(AnyMessage):
    """The result of a call."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Text = ""

    def said(self) -> Object:
        """The message as templates read it."""
        return {**super().said(), "tool_call_id": self.tool_call_id}


class AnswerMessage(AnyMessage):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    tool_calls: List[EarlierCall] | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    # fields of our answers that clients send back
    parsed: object = None  # the content, as OpenAI's client has read it
    refusal: None = None
    annotations: Annotated[list[object], Field(max_length=0)] | None = None
    audio: None = None

    @model_validator(mode="after")
    def _says(self) -> AnswerMessage:
        if self.content is None and self.tool_calls is None:
            raise wrong("is missing", "content")
        return self

    def said(self) -> Object:
        """The message as templates read it."""
        calls: Object = {} if self.tool_calls is None else {"tool_calls": [call.said() for call in self.tool_calls]}
        reasoning = self.reasoning_content or self.reasoning
        thought: Object = {} if reasoning is None else reasoned(reasoning)
        return {**super().said(), **calls, **thought}


def reasoned(text: str) -> Object:
    """The reasoning of an earlier answer, by the names that templates have for it: gpt-oss says thinking."""
    return {"reasoning_content": text, "thinking": text}


def _not_reserved(given: Object) -> Object:
    """Refuse arguments of the template that requests have fields for."""
    if reserved := RESERVED & given.keys():
        raise wrong("must not be given there", min(reserved), "unsupported")
    return given


TemplateArguments = Annotated[Object, AfterValidator(_not_reserved)]
Messages = Annotated[
    List[Annotated[Message | ToolMessage | AnswerMessage, Field(discriminator="role")]], Field(min_length=1)
]


class ChatMessages(Body):
    """Fields that hold a conversation and what its template reads."""

    messages: Messages
    tools: List[Tool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Choice | ChosenTool | None = None
    parallel_tool_calls: Flag = True
    reasoning_effort: Text | None = None
    chat_template_kwargs: TemplateArguments = Field(default_factory=dict)

    def dialogue(self) -> Dialogue:
        """The conversation for the model's template."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, ChosenTool) else None
        choice = "required" if isinstance(self.tool_choice, ChosenTool) else self.tool_choice
        shown, tools = chosen([tool.function for tool in self.tools], choice, named, self.parallel_tool_calls)
        said = [message.said() for message in self.messages]
        origins = [f"messages[{n}]" for n in range(len(said))]
        return Dialogue(said, origins, shown, tools, self.reasoning_effort, self.chat_template_kwargs)


class ChatBody(Completed, ChatMessages):
    """A request to /v1/chat/completions."""

    model: Text
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Hint("medium")] = None
    # fields that change no answer at these values
    best_of: One | None = None
    prediction: Object | None = None  # text that the answer may have: a hint for speed alone
    functions: NoItems | None = None
    function_call: Literal["none", "auto"] | None = None
    echo: Off | None = None
    documents: NoItems | None = None
    include_reasoning: On | None = None
    add_generation_prompt: On | None = None
    continue_final_message: Off | None = None
    add_special_tokens: Off | None = None
    logprobs: Flag = False
    top_logprobs: Whole | None = Field(None, ge=0, le=MOST_TOP)
    max_tokens: Whole | None = Field(None, ge=1, le=1 << 31)
    max_completion_tokens: Whole | None = Field(None, ge=1, le=1 << 31)


def chat(given: Object, vocabulary: int, defaults: Sampling = DEFAULTS) -> Request:
    """Parse a request to /v1/chat/completions. An ApiError names the field that is wrong or unsupported."""
    body = read(ChatBody, given)
    if body.top_logprobs and not body.logprobs:
        raise bad("top_logprobs", "needs logprobs: true")
    names = CHAT_NAMES
    limit = body.max_tokens
    if body.max_completion_tokens is not None:
        if limit is not None:
            raise bad("max_completion_tokens", "cannot stand beside max_tokens, its older name: send one of them")
        names = Names(prompt="messages", limit="max_completion_tokens")
        limit = body.max_completion_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    sampling = body.sampling(vocabulary, defaults, top)
    return body.request(sampling, limit, model=body.model, chat=body.dialogue(), names=names)
