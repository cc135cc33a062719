"""/openapi.json: the paths, and the models that parse their requests."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import TypeAdapter

from moepack.server.http.models import Object
from moepack.server.http.parse import ChatBody, CompletionBody
from moepack.server.http.tokenizing import DetokenizeBody, DialogueBody, TextBody
from moepack.server.translated.messages import CountBody, MessagesBody
from moepack.server.translated.responses import ResponsesBody
from moepack.shared.version import __version__


@dataclass(frozen=True, slots=True)
class Posted:
    """A path that takes JSON."""

    summary: str
    body: Any  # the model of its requests, or a union of several
    streams: bool = False


POSTS = {
    "/v1/chat/completions": Posted("Answer a chat", ChatBody, True),
    "/v1/completions": Posted("Continue texts", CompletionBody, True),
    "/v1/responses": Posted("Answer a chat, as OpenAI's Responses", ResponsesBody, True),
    "/v1/messages": Posted("Answer a chat, as Anthropic's Messages", MessagesBody, True),
    "/v1/messages/count_tokens": Posted("Count the tokens of such a chat", CountBody),
    "/tokenize": Posted("Turn a text or a chat into tokens", TextBody | DialogueBody),
    "/detokenize": Posted("Turn tokens into a text", DetokenizeBody),
}
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


@functools.cache
def described(model: str) -> Object:
    """The server of a model in OpenAPI 3.1."""
    adapters: list[tuple[str, Literal["validation"], TypeAdapter[Any]]]
    adapters = [(path, "validation", TypeAdapter(posted.body)) for path, posted in POSTS.items()]
    bodies, shared = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    for schema in shared["$defs"].values():
        if "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": [model]}
    paths: Object = {}
    for path, summary in GETS.items():
        kind = OTHER.get(path, "application/json")
        paths[path] = {"get": {"summary": summary, "responses": {"200": _response(kind), **_REFUSALS}}}
    paths["/v1/models/{name}"]["get"]["parameters"] = [
        {"name": "name", "in": "path", "required": True, "schema": {"enum": [model]}}
    ]
    for path, posted in POSTS.items():
        body = {"required": True, "content": {"application/json": {"schema": bodies[path, "validation"]}}}
        kinds = ("application/json", "text/event-stream") if posted.streams else ("application/json",)
        responses = {"200": _response(*kinds), **_REFUSALS}
        paths[path] = {"post": {"summary": posted.summary, "requestBody": body, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "moepack", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": shared["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _response(*kinds: str) -> Object:
    return {"description": "The answer", "content": {kind: {} for kind in kinds}}


_REFUSALS = {
    "4XX": {"description": "A refusal", "content": {"application/json": {}}},
    "503": {"description": "Loading, stopping or failing", "content": {"application/json": {}}},
}
