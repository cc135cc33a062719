"""Haystack's generators over chats and Responses, and its agent: texts, streams, a tool's round trip, forms."""

import json
from typing import Any

import openai
from agent_cases import ASKED, MODEL, SHORT, SYSTEM, V1, Report, each, raises, weather
from cases import case
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import create_tool_from_function

TOOL = create_tool_from_function(weather)
LIMIT = {OpenAIChatGenerator: "max_completion_tokens", OpenAIResponsesChatGenerator: "max_output_tokens"}
BOTH = {"chat": OpenAIChatGenerator, "responses": OpenAIResponsesChatGenerator}


def generator(kind, model=MODEL, **more):
    given = {LIMIT[kind]: 64, "temperature": 0, **more.pop("asked", {})}
    return kind(model=model, api_base_url=V1, max_retries=0, timeout=300, generation_kwargs=given, **more)


def said(words):
    return [ChatMessage.from_system(SYSTEM), ChatMessage.from_user(words)]


@each(**BOTH)
def text(kind: Any) -> None:
    (reply,) = generator(kind).run(said(SHORT))["replies"]
    assert reply.text and reply.meta["usage"], reply


@each(**BOTH)
def stream(kind: Any) -> None:
    seen = []
    counted = {"stream_options": {"include_usage": True}} if kind is OpenAIChatGenerator else {}
    (reply,) = generator(kind, streaming_callback=seen.append, asked=counted).run(said(SHORT))["replies"]
    assert reply.text and "".join(chunk.content for chunk in seen) == reply.text, reply
    assert reply.meta["usage"], reply.meta


@each(**BOTH)
def required_tool_and_its_result(kind: Any) -> None:
    (reply,) = generator(kind, tools=[TOOL], tools_strict=True, asked={"tool_choice": "required"}).run(said(ASKED))[
        "replies"
    ]
    call = reply.tool_call
    assert call.tool_name == "weather", reply
    result = ChatMessage.from_tool(TOOL.invoke(**call.arguments), origin=call)
    one = ChatMessage.from_assistant(tool_calls=[call])
    (again,) = generator(kind, tools=[TOOL]).run([*said(ASKED), one, result])["replies"]
    assert again.text or again.tool_calls


@each(**BOTH)
def form_beside_a_strict_tool(kind: Any) -> None:
    form = {"response_format" if kind is OpenAIChatGenerator else "text_format": Report}
    (reply,) = generator(kind, tools=[TOOL], tools_strict=True, asked=form).run(said(ASKED))["replies"]
    if reply.tool_calls:
        assert reply.tool_call.tool_name == "weather", reply
    else:
        Report.model_validate(json.loads(reply.text))


@case
def agent() -> None:
    one = Agent(chat_generator=generator(OpenAIChatGenerator), tools=[TOOL], system_prompt=SYSTEM, max_agent_steps=3)
    assert one.run([ChatMessage.from_user(ASKED)])["messages"]


@each(**BOTH)
def errors(kind: Any) -> None:
    raises(openai.NotFoundError, lambda: generator(kind, "another").run(said(SHORT)), "another")
