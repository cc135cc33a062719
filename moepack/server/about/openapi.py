"""/openapi.json: what the server accepts, read from the parsers themselves.

Each parser runs once on an example with fields that record how they are taken. So a field is listed if and only if the
parser takes it, with the parser's own bounds; any other field is refused, which the schemas say too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moepack.server.http import parse
from moepack.server.http.fields import Fields
from moepack.server.http.tokenizing import DetokenizeRequest, TokenizeRequest
from moepack.server.http.toolbox import MOST_TOOLS
from moepack.server.translated.messages import counted, messages
from moepack.server.translated.responses import responses
from moepack.shared.version import __version__

Schema = dict[str, Any]
VOCABULARY = 1 << 20  # stands for a model's own, whose size no schema says


class Recorder(Fields):
    """Fields that note how each is taken."""

    def __init__(self, given: dict[str, Any], where: str = "") -> None:
        super().__init__(given, where)
        self._schemas: dict[str, Schema] = {}
        self._nested: dict[str, Recorder] = {}
        self.shapes: dict[str, Schema] = {}  # of fields that are taken unchecked

    def schema(self, *required: str) -> Schema:
        """The JSON schema of the object, of which these fields may not be left out; null counts as left out."""
        found = {**self._schemas, **{name: inner.schema() for name, inner in self._nested.items()}}
        optional = {name: schema if name in required else _or_null(schema) for name, schema in found.items()}
        made = {"type": "object", "properties": optional, "additionalProperties": False}
        return {**made, "required": list(required)} if required else made

    def _note(self, name: str, schema: Schema) -> None:
        self._schemas.setdefault(name, schema)

    def take(self, name: str) -> Any:
        """Take a field unchecked; its schema stands in `shapes`."""
        self._note(name, self.shapes.get(name, {}))
        return super().take(name)

    def inside(self, name: str) -> Fields | None:
        """Take an object as fields of its own."""
        inner = super().inside(name)
        if isinstance(inner, Recorder):
            self._nested[name] = inner
        return inner

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Take a number."""
        self._note(name, {"type": "number", "minimum": least, "maximum": most, "default": default})
        return super().number(name, default, least, most)

    def whole(self, name: str, default: int | None, least: int, most: int = 1 << 31) -> int | None:
        """Take an integer."""
        schema: Schema = {"type": "integer", "minimum": least, "maximum": most}
        self._note(name, schema if default is None else {**schema, "default": default})
        return super().whole(name, default, least, most)

    def flag(self, name: str, default: bool = False) -> bool:
        """Take a boolean."""
        self._note(name, {"type": "boolean", "default": default})
        return super().flag(name, default)

    def text(self, name: str) -> str | None:
        """Take a string."""
        self._note(name, _TYPES if self._where.endswith("format.") and name == "type" else _TEXT)
        return super().text(name)

    def record(self, name: str) -> dict[str, Any] | None:
        """Take an object."""
        self._note(name, {"type": "object"})
        return super().record(name)

    def only(self, name: str, *allowed: Any) -> None:
        """Take a field that has few values."""
        self._note(name, {"enum": list(allowed)})
        super().only(name, *allowed)


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]} if schema else schema


_TEXT: Schema = {"type": "string"}
_TYPES: Schema = {"enum": ["text", "json_object", "json_schema"]}
_TOKENS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,128}$"},
        "description": _TEXT,
        "parameters": {"type": "object"},
        "strict": {"type": "boolean"},
    },
    "additionalProperties": False,
}
_NAMED: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
    },
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": list(parse.ROLES)},
        "content": {
            "anyOf": [
                _TEXT,
                {"type": "null"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "required": ["type", "text"],
                        "properties": {"type": {"const": "text"}, "text": _TEXT},
                    },
                },
            ]
        },
        "tool_calls": {"type": "array"},
        "tool_call_id": _TEXT,
        "name": _TEXT,
        "reasoning_content": _TEXT,
    },
}
# Schemas of fields that several parsers check by hand.
UNCHECKED: dict[str, Schema] = {
    "messages": {"type": "array", "minItems": 1, "items": _MESSAGE},
    "prompt": {"anyOf": [_TEXT, _TOKENS, {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT, _TOKENS]}}]},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": parse.MOST_STOPS}]},
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    "tools": {
        "type": "array",
        "maxItems": MOST_TOOLS,
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        },
    },
    "tool_choice": {"anyOf": [{"enum": ["auto", "none", "required"]}, _NAMED]},
}
_PARTS: Schema = {"anyOf": [_TEXT, {"type": "array", "items": {"type": "object", "required": ["type"]}}]}
_ROLE: Schema = {"enum": ["user", "assistant"]}
_RESPONSES: dict[str, Schema] = {
    "input": {"anyOf": [_TEXT, {"type": "array", "minItems": 1, "items": {"type": "object"}}]},
    "tools": {
        "type": "array",
        "maxItems": MOST_TOOLS,
        "items": {
            **_FUNCTION,
            "required": ["type", "name"],
            "properties": {"type": {"const": "function"}, **_FUNCTION["properties"]},
        },
    },
    "tool_choice": {
        "anyOf": [
            {"enum": ["auto", "none", "required"]},
            {"type": "object", "required": ["type", "name"], "properties": {"type": {"const": "function"}}},
        ]
    },
}
_MESSAGES: dict[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": _ROLE, "content": _PARTS},
            "additionalProperties": False,
        },
    },
    "system": _PARTS,
    "stop_sequences": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": parse.MOST_STOPS},
    "tools": {
        "type": "array",
        "maxItems": MOST_TOOLS,
        "items": {"type": "object", "required": ["name"], "properties": {"input_schema": {"type": "object"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Posted:
    """A path that takes JSON."""

    summary: str
    parser: Callable[[Fields, int], Any]
    example: dict[str, Any]  # reaches every field
    required: tuple[str, ...]  # fields that may not be left out
    shapes: dict[str, Schema] = field(default_factory=dict)  # of fields that this parser checks by hand
    streams: bool = False


_SAID = [{"role": "user", "content": "Hello"}]
_SCHEMA = {"type": "json_schema", "schema": {"type": "object"}}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
_SHARED = {"stream": True, "stream_options": {"include_usage": True}, "response_format": _FORMAT}
_RESPOND = {
    "model": "x", "input": "Hello", "text": {"format": _SCHEMA}, "reasoning": {"effort": "low"}, "stream_options": {},
}  # fmt: skip
_ASK = {
    "model": "x", "messages": _SAID, "thinking": {"type": "enabled"}, "tool_choice": {"type": "auto"},
    "output_config": {"format": _SCHEMA},
}  # fmt: skip
POSTS = {
    "/v1/chat/completions": Posted(
        "Answer a chat", parse.chat, {"model": "x", "messages": _SAID, **_SHARED}, ("model", "messages"), streams=True
    ),
    "/v1/completions": Posted(
        "Continue texts", parse.completion, {"prompt": "Hello", **_SHARED}, ("prompt",), streams=True
    ),
    "/v1/responses": Posted(
        "Answer a chat, as OpenAI's Responses", responses, _RESPOND, ("model", "input"), _RESPONSES, True
    ),
    "/v1/messages": Posted(
        "Answer a chat, as Anthropic's Messages", messages, {**_ASK, "max_tokens": 1},
        ("model", "messages", "max_tokens"), _MESSAGES, True,
    ),
    "/v1/messages/count_tokens": Posted(
        "Count the tokens of such a chat", counted, _ASK, ("model", "messages"), _MESSAGES
    ),
    "/tokenize": Posted("Turn a text or a chat into tokens", TokenizeRequest, {"messages": _SAID}, ()),
    "/detokenize": Posted("Turn tokens into a text", DetokenizeRequest, {"tokens": [1]}, ("tokens",)),
}  # fmt: skip
GETS = {
    "/": "The page",
    "/health": "Whether the server works",
    "/load": "How busy the server is",
    "/live": "The page's JSON",
    "/metrics": "Metrics for Prometheus",
    "/openapi.json": "This description",
    "/v1/models": "The served model, in a list",
    "/v1/models/{name}": "The served model",
}
OTHER = {"/": "text/html", "/metrics": "text/plain"}


def accepted(path: str) -> Schema:
    """The JSON schema of the bodies that a path accepts."""
    posted = POSTS[path]
    recorder = Recorder(posted.example)
    recorder.shapes = {**UNCHECKED, **posted.shapes}
    posted.parser(recorder, VOCABULARY)
    return recorder.schema(*posted.required)


@functools.cache
def described(model: str) -> dict[str, Any]:
    """The server of a model in OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for path, summary in GETS.items():
        kind = OTHER.get(path, "application/json")
        paths[path] = {"get": {"summary": summary, "responses": {"200": _response(kind), **_REFUSALS}}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"enum": [model]}}
    ]
    for path, posted in POSTS.items():
        schema = accepted(path)
        schema["properties"]["model"] = {"enum": [model]}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        kinds = ("application/json", "text/event-stream") if posted.streams else ("application/json",)
        responses = {"200": _response(*kinds), **_REFUSALS}
        paths[path] = {"post": {"summary": posted.summary, "requestBody": body, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "moepack", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


def _response(*kinds: str) -> dict[str, Any]:
    return {"description": "The answer", "content": {kind: {} for kind in kinds}}


_REFUSALS = {
    "4XX": {"description": "A refusal", "content": {"application/json": {}}},
    "503": {"description": "Loading, stopping or failing", "content": {"application/json": {}}},
}
