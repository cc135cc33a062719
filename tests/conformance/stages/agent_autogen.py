"""AutoGen's client of OpenAI's chats: texts, streams, a tool's round trip, a form beside a strict tool."""

import asyncio
import json

import openai
from agent_cases import ASKED, MODEL, SHORT, SYSTEM, V1, Report, raises, weather
from autogen_agentchat.agents import AssistantAgent
from autogen_core import CancellationToken
from autogen_core.models import (
    AssistantMessage,
    FunctionExecutionResult,
    FunctionExecutionResultMessage,
    ModelFamily,
    SystemMessage,
    UserMessage,
)
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from cases import case

loop = asyncio.new_event_loop()
ABLE = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
INFO = {**ABLE, "family": ModelFamily.UNKNOWN, "multiple_system_messages": True}


def client(model=MODEL, **more):
    given = {"base_url": V1, "api_key": "none", "max_retries": 0, "model_info": INFO, "temperature": 0}
    return OpenAIChatCompletionClient(model=model, **given, **more)


def asked(words):
    return [SystemMessage(content=SYSTEM), UserMessage(content=words, source="user")]


def made(words, *more, tokens=64, **options):
    return loop.run_until_complete(client(max_tokens=tokens).create([*asked(words), *more], **options))


TOOL = FunctionTool(weather, description="Get the current weather of a city.", strict=True)


@case
def text() -> None:
    done = made(SHORT)
    assert done.content and done.finish_reason == "stop" and 0 < done.usage.completion_tokens < 64, done


@case
def stream() -> None:
    async def streamed():
        return [piece async for piece in client(max_tokens=64).create_stream(asked(SHORT), include_usage=True)]

    *pieces, last = loop.run_until_complete(streamed())
    assert "".join(pieces) == last.content and last.usage.completion_tokens > 0, last


@case
def required_tool_and_its_result() -> None:
    (call, *_) = (done := made(ASKED, tools=[TOOL], tool_choice="required")).content
    assert done.finish_reason == "function_calls" and call.name == "weather", done
    result = loop.run_until_complete(TOOL.run_json(json.loads(call.arguments), CancellationToken()))
    answered = FunctionExecutionResult(content=result, call_id=call.id, is_error=False, name="weather")
    back = AssistantMessage(content=done.content[:1], source="assistant")
    again = made(ASKED, back, FunctionExecutionResultMessage(content=[answered]), tools=[TOOL], tool_choice="none")
    assert again.content and again.usage.prompt_tokens > 0


@case
def form() -> None:
    Report.model_validate_json(made(ASKED, json_output=Report).content)


@case
def form_beside_a_strict_tool() -> None:
    done = made(ASKED, tools=[TOOL], json_output=Report)
    if isinstance(done.content, str):
        Report.model_validate_json(done.content)
    else:
        assert done.content[0].name == "weather", done


@case
def json_mode() -> None:
    assert made(ASKED, json_output=True, tokens=16).content.lstrip().startswith("{")


@case
def agent() -> None:
    one = AssistantAgent("one", client(max_tokens=64), tools=[TOOL], system_message=SYSTEM, reflect_on_tool_use=True)
    assert loop.run_until_complete(one.run(task=ASKED)).messages[-1].content


@case
def errors() -> None:
    wrong = client("another")
    raises(openai.NotFoundError, lambda: loop.run_until_complete(wrong.create(asked(SHORT))), "another")
