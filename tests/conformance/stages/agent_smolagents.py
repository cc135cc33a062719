"""smolagents' model of OpenAI's chats, and its agents: texts, streams, required calls, code held to a schema."""

import json

import openai
from agent_cases import ASKED, MODEL, SHORT, SYSTEM, V1, Report, raises
from cases import case
from smolagents import CodeAgent, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole


@tool
def weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: where
    """
    return f"sunny in {city}"


def model(name=MODEL, **more):
    given = {"max_tokens": 64, "temperature": 0, "client_kwargs": {"max_retries": 0}}
    return OpenAIModel(name, api_base=V1, api_key="none", **{**given, **more})


def said(words):
    return [ChatMessage(MessageRole.SYSTEM, SYSTEM), ChatMessage(MessageRole.USER, words)]


@case
def text() -> None:
    done = model().generate(said(SHORT))
    assert done.content and 0 < done.token_usage.output_tokens < 64, done


@case
def stream() -> None:
    pieces = list(model().generate_stream(said(SHORT)))
    assert "".join(piece.content or "" for piece in pieces)
    assert any(piece.token_usage and piece.token_usage.output_tokens for piece in pieces)


@case
def required_tool() -> None:
    done = model().generate(said(ASKED), tools_to_call_from=[weather])
    assert done.tool_calls[0].function.name == "weather", done


@case
def form() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "r", "schema": Report.model_json_schema(), "strict": True}}
    Report.model_validate_json(model().generate(said(ASKED), response_format=schema).content)


@case
def agent_that_calls() -> None:
    # It asks for a call at each of its steps, and for an answer after the last.
    one = ToolCallingAgent([weather], model(), max_steps=2)
    assert one.run(ASKED) and any(step.tool_calls for step in one.memory.steps[1:]), one.memory.steps


@case
def agent_that_writes_code() -> None:
    one = CodeAgent([weather], model(), max_steps=1, use_structured_outputs_internally=True)
    assert one.run(ASKED) is not None
    (step,) = one.memory.steps[1:2]
    assert step.token_usage.output_tokens > 0 and "model_output" in json.dumps(step.dict(), default=str), step


@case
def errors() -> None:
    raises(openai.NotFoundError, lambda: model("another").generate(said(SHORT)), "another")
