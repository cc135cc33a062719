"""pydantic-ai over chats, Responses and Messages: texts, streams, tools, forms by tools and by schemas."""

import asyncio
from typing import Any

from agent_cases import ASKED, MODEL, SHORT, SYSTEM, URL, V1, Report, each, raises
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, ToolOutput, UsageLimits
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)


def chat(name):
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=V1, api_key="none"))


def responses(name):
    return OpenAIResponsesModel(name, provider=OpenAIProvider(base_url=V1, api_key="none"))


def messages(name):
    return AnthropicModel(name, provider=AnthropicProvider(base_url=URL, api_key="none"))


ALL = {"chat": chat, "responses": responses, "messages": messages}


def agent(model, tokens=100, **more):
    return Agent(model, instructions=SYSTEM, model_settings={"max_tokens": tokens, "temperature": 0}, **more)


@each(**ALL)
def text(kind: Any) -> None:
    done = agent(kind(MODEL)).run_sync(SHORT)
    assert done.output and 0 < done.usage.output_tokens < 100 and done.usage.input_tokens > 0, done.usage


@each(**ALL)
def stream(kind: Any) -> None:
    async def streamed():
        async with agent(kind(MODEL)).run_stream(SHORT) as run:
            seen = "".join([piece async for piece in run.stream_text(delta=True)])
            return seen, run.usage.output_tokens

    seen, tokens = loop.run_until_complete(streamed())
    assert seen and 0 < tokens < 100, (seen, tokens)


def formed_beside_a_strict_tool(asked: Any) -> None:
    """Run an agent that also has a strict tool: it ends in the form, or it has called the tool."""
    seen = []

    @asked.tool_plain(strict=True)
    def get_weather(city: str) -> str:
        """Get the weather."""
        seen.append(city)
        return "sunny"

    try:
        assert isinstance(asked.run_sync(ASKED, usage_limits=UsageLimits(request_limit=3)).output, Report)
    except Exception as error:  # a small model may ask for the weather without end, or until its text ends
        assert seen, error


@each(**ALL)
def form_by_a_tool(kind: Any) -> None:
    done = agent(kind(MODEL), output_type=ToolOutput(Report)).run_sync(ASKED)
    assert isinstance(done.output, Report)


@each(**ALL)
def form_by_a_strict_tool_beside_another(kind: Any) -> None:
    formed_beside_a_strict_tool(agent(kind(MODEL), output_type=ToolOutput(Report, strict=True)))


@each(chat=chat, responses=responses)
def form_by_a_schema_beside_a_strict_tool(kind: Any) -> None:
    formed_beside_a_strict_tool(agent(kind(MODEL), output_type=NativeOutput(Report, strict=True)))


@each(chat=chat, responses=responses)
def form_by_a_schema(kind: Any) -> None:
    assert isinstance(agent(kind(MODEL), output_type=NativeOutput(Report)).run_sync(ASKED).output, Report)


@each(**ALL)
def errors(kind: Any) -> None:
    raises(ModelHTTPError, lambda: agent(kind("another")).run_sync(ASKED), "404", "another")
