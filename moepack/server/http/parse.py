"""Parse requests of the OpenAI interface. Unknown and unsupported fields are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moepack.server.errors import bad
from moepack.server.options import Sampling
from moepack.server.tools.parts import Tools

from .fields import Fields
from .toolbox import Listed, earlier_calls, take_tools

MOST_STOPS, MOST_CHOICES, MOST_TOP = 16, 128, 20
# OpenAI's fields that do not change an answer here.
NEUTRAL = ("user", "safety_identifier", "prompt_cache_key")
ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "modalities": (["text"],),
}


NO_MODEL = "is missing: /v1/models has its name"


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A conversation for the model's template."""

    messages: list[dict[str, Any]]  # in the shape that templates read
    shown: Listed = field(default_factory=list)  # functions, in the shape that templates read
    tools: Tools = field(default_factory=Tools)  # those that the model may or must call
    effort: str | None = None  # how much to reason, in the words of the model's template
    template: dict[str, Any] = field(default_factory=dict)  # further arguments of the model's template
    thinks: bool | None = None  # whether to reason, where the template leaves a choice; None leaves it to it
    special: bool = False  # whether to add the tokens that begin or end a text, beside those that the template writes


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request for completions of `prompts`, or for the next message of a chat."""

    model: str | None  # the name of the model; None, in completions alone, for the served model
    sampling: Sampling
    max_tokens: int | None  # the most tokens of the answer; None allows all that fit
    count: int  # answers to each prompt
    stops: tuple[str, ...]  # strings that end an answer
    ignores_ends: bool  # whether the answer continues after a token that ends answers
    stream: bool  # whether to stream the answer
    usage: bool  # whether a stream ends with its token counts
    continuous: bool  # whether every chunk of it has them
    schema: dict[str, Any] | None  # the schema of a JSON answer; None allows any text
    prompts: tuple[str | list[int], ...] = ()  # texts or token ids
    echo: bool = False  # whether the answer begins with the prompt
    special: bool = True  # whether to add the tokens that begin or end a text
    chat: Dialogue | None = None  # the chat; None for completions
    bound: bool = False  # whether max_tokens may exceed what fits: the answer then ends where its room does


def completion(fields: Fields, vocabulary: int) -> Request:
    """Parse a request to /v1/completions. An ApiError names the field that is wrong or unsupported."""
    prompts = _prompts(fields.take("prompt"), vocabulary)
    echo, special = fields.flag("echo"), fields.flag("add_special_tokens", True)
    top, count = fields.whole("logprobs", None, 0, MOST_TOP), fields.whole("n", 1, 1, MOST_CHOICES) or 1
    fields.only("best_of", 1, count)
    fields.only("suffix", "")
    limit = fields.whole("max_tokens", 16, 0)
    asked = _request(fields, top, count, limit, vocabulary, prompts=prompts, echo=echo, special=special)
    if not limit and not echo:
        raise bad("max_tokens", "must be at least 1, or 0 with echo")
    return asked


def chat(fields: Fields, vocabulary: int) -> Request:
    """Parse a request to /v1/chat/completions. An ApiError names the field that is wrong or unsupported."""
    chat = conversation(fields)
    wanted, top = fields.flag("logprobs"), fields.whole("top_logprobs", None, 0, MOST_TOP)
    if top is not None and not wanted:
        raise bad("top_logprobs", "needs logprobs: true")
    count = fields.whole("n", 1, 1, MOST_CHOICES) or 1
    old, new = fields.whole("max_tokens", None, 1), fields.whole("max_completion_tokens", None, 1)
    if None not in (old, new) and old != new:
        raise bad("max_completion_tokens", "differs from max_tokens")
    top, limit = (top or 0) if wanted else None, new if old is None else old
    asked = _request(fields, top, count, limit, vocabulary, chat=chat)
    check_chat(asked, "response_format")
    return asked


def check_chat(asked: Request, shape: str) -> None:
    """Refuse what a chat lacks, and what does not go together; `shape` is where the answer's schema stands."""
    if asked.model is None:
        raise bad("model", NO_MODEL)
    if asked.schema is not None and asked.chat is not None and asked.chat.tools.binding:
        raise bad(shape, "a schema of the answer cannot stand beside calls that keep to theirs", "unsupported")


def _request(fields: Fields, top: int | None, count: int, limit: int | None, vocabulary: int, **own: Any) -> Request:
    """Parse the fields that both kinds share, and refuse the rest; `own` holds fields of one kind alone."""
    model = fields.text("model")
    for name in NEUTRAL:
        fields.text(name)
    for name, allowed in ONLY.items():
        fields.only(name, *allowed)
    sampling, stream = take_sampling(fields, top, vocabulary), fields.flag("stream")
    usage, continuous = _usage(fields, stream)
    asked = Request(
        model=model, sampling=sampling, max_tokens=limit, count=count, stream=stream, usage=usage,
        continuous=continuous, stops=take_stops(fields), ignores_ends=fields.flag("ignore_eos"),
        schema=_schema(fields), **own,
    )  # fmt: skip
    fields.end()
    return asked


def take_sampling(fields: Fields, top: int | None, vocabulary: int) -> Sampling:
    """Take the fields that say how tokens are chosen; `top` alternatives are reported with each."""
    temperature = fields.number("temperature", 1.0, 0.0, 100.0)
    return Sampling(
        temperature=0.0 if temperature < 1e-5 else temperature,
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        top_k=max(0, fields.whole("top_k", 0, -1) or 0),
        min_p=fields.number("min_p", 0.0, 0.0, 1.0),
        seed=fields.whole("seed", None, -(1 << 63), (1 << 63) - 1),
        presence=fields.number("presence_penalty", 0.0, -2.0, 2.0),
        frequency=fields.number("frequency_penalty", 0.0, -2.0, 2.0),
        repetition=fields.number("repetition_penalty", 1.0, 0.01, 100.0),
        bias=_bias(fields, vocabulary),
        top_logprobs=top,
    )


def _bias(fields: Fields, vocabulary: int) -> dict[int, float]:
    out = {}
    for name, value in (fields.record("logit_bias") or {}).items():
        where = f"logit_bias[{name!r}]"
        if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= vocabulary:
            raise bad(where, f"is not a token: tokens go from 0 to {vocabulary - 1}")
        out[int(name)] = Fields({where: value}).number(where, 0.0, -100.0, 100.0)
    return out


def _usage(fields: Fields, stream: bool) -> tuple[bool, bool]:
    """Parse whether a stream ends with its token counts, and whether every chunk of it has them, as vLLM says it."""
    inner = fields.inside("stream_options")
    if inner is None:
        return False, False
    if not stream:
        raise bad("stream_options", "needs stream: true")
    usage, continuous = inner.flag("include_usage"), inner.flag("continuous_usage_stats")
    inner.only("include_obfuscation", False)
    inner.end()
    return usage, usage and continuous


def take_stops(fields: Fields, name: str = "stop") -> tuple[str, ...]:
    """Take the strings that end an answer, which errors call `name`."""
    stop = fields.take("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise bad(name, "must be a string, or a list of strings, none of them empty")
    if len(stops) > MOST_STOPS or any(len(s) > 1000 for s in stops):
        raise bad(name, f"takes at most {MOST_STOPS} strings of 1000 characters each")
    return tuple(stops)


def _schema(fields: Fields) -> dict[str, Any] | None:
    """Parse the answer's JSON schema: {"type": "object"} allows any object, None allows any text."""
    inner = fields.inside("response_format")
    if inner is None:
        return None
    kind, named = inner.text("type"), inner.inside("json_schema")
    inner.end()
    if kind == "text" and named is None:
        return None
    if kind == "json_object" and named is None:
        return {"type": "object"}
    if kind != "json_schema" or named is None:
        raise bad("response_format.type", "must be text, json_object or json_schema", "unsupported")
    for name in ("name", "description"):
        named.text(name)
    named.flag("strict")
    schema = named.record("schema")
    named.end()
    if schema is None:
        raise bad("response_format.json_schema.schema", "is missing")
    return schema


def _is_tokens(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(t) is int for t in value)


def _prompts(given: Any, vocabulary: int) -> tuple[str | list[int], ...]:
    """Parse prompts: a text, a list of texts, a list of tokens, or a list of lists of tokens."""
    if given is None:
        raise bad("prompt", "is missing")
    prompts = [given] if isinstance(given, str) or _is_tokens(given) else given
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) or _is_tokens(p) for p in prompts):
        raise bad("prompt", "must be a string, a list of strings, or one or more lists of tokens")
    if len(prompts) > MOST_CHOICES:
        raise bad("prompt", f"takes at most {MOST_CHOICES} prompts")
    for prompt in prompts:
        if not isinstance(prompt, str) and not all(0 <= t < vocabulary for t in prompt):
            raise bad("prompt", f"has an invalid token: tokens go from 0 to {vocabulary - 1}")
    return tuple(prompts)


# --- chats

RESERVED = frozenset({"messages", "conversation", "tools", "tokenize", "chat_template", "documents"})
ROLES = ("system", "developer", "user", "assistant", "tool")


def conversation(fields: Fields) -> Dialogue:
    """Parse the fields that hold a conversation and what its template reads."""
    messages, (shown, tools) = _messages(fields.take("messages")), take_tools(fields)
    template = fields.record("chat_template_kwargs") or {}
    made = Dialogue(messages, shown, tools, fields.text("reasoning_effort"), template)
    check_template(made)
    return made


def check_template(dialogue: Dialogue) -> None:
    """Refuse arguments of the template that requests have fields for."""
    if reserved := RESERVED & dialogue.template.keys():
        raise bad(f"chat_template_kwargs.{min(reserved)}", "must not be given there", "unsupported")


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise bad("messages", "must be a list of messages")
    return [_message(f"messages[{n}]", message) for n, message in enumerate(given)]


def _message(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise bad(where, "must be an object")
    fields = Fields(given, f"{where}.")
    role = fields.text("role")
    if role not in ROLES:
        raise bad(f"{where}.role", f"must be one of {', '.join(ROLES)}")
    out: dict[str, Any] = {"role": "system" if role == "developer" else role}
    content = _content(f"{where}.content", fields.take("content"))
    calls = fields.take("tool_calls") if role == "assistant" else None
    if content is None and calls is None:
        raise bad(f"{where}.content", "is missing")
    out["content"] = content or ""
    if calls is not None:
        out["tool_calls"] = earlier_calls(f"{where}.tool_calls", calls)
    if role == "tool":
        out["tool_call_id"] = fields.text("tool_call_id") or ""
    if (name := fields.text("name")) is not None:
        out["name"] = name
    if role == "assistant":
        reasoning = fields.text("reasoning_content") or fields.text("reasoning")
        if reasoning is not None:
            out |= reasoned(reasoning)
        # fields of our answers that clients send back
        fields.only("refusal")
        fields.only("annotations", [])
        fields.only("audio")
    fields.end()
    return out


def reasoned(text: str) -> dict[str, str]:
    """The reasoning of an earlier answer, by the names that templates have for it: gpt-oss says thinking."""
    return {"reasoning_content": text, "thinking": text}


def _content(where: str, given: Any) -> str | None:
    if given is None or isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise bad(where, "must be a string, or a list of parts")
    texts = []
    for n, part in enumerate(given):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise bad(f"{where}[{n}].type", "only text is supported", "unsupported")
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}[{n}].text", "must be a string")
        texts.append(part["text"])
    return "".join(texts)
