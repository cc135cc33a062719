"""OpenAI's Agents SDK over chats and over Responses: runs, streams, tools, an answer's form beside a strict tool."""

import asyncio
from typing import Any

import openai
from agent_cases import ASKED, MODEL, SHORT, SYSTEM, V1, Report, each, raises, weather
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=V1, api_key="none", max_retries=0, timeout=300)
BOTH = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
loop = asyncio.new_event_loop()
asyncio.set_event_loop(loop)  # the client keeps its connections from case to case


def agent(model, tokens=64, **more):
    settings = ModelSettings(max_tokens=tokens, temperature=0, include_usage=True, **more.pop("settings", {}))
    return Agent(name="one", instructions=SYSTEM, model=model, model_settings=settings, **more)


def ran(asked, words=ASKED):
    return loop.run_until_complete(Runner.run(asked, words, max_turns=8))


def last(context, results):
    """Let the model see the results of its first calls, and end the run at its second ones."""
    done = context.usage.requests > 1
    return ToolsToFinalOutputResult(is_final_output=done, final_output=results[-1].output)


@each(**BOTH)
def text(kind: Any) -> None:
    done = ran(agent(kind(MODEL, client)), SHORT)
    assert done.final_output and 0 < done.context_wrapper.usage.output_tokens < 64, done.context_wrapper.usage
    assert done.context_wrapper.usage.input_tokens > 0


@each(**BOTH)
def stream(kind: Any) -> None:
    async def streamed():
        run = Runner.run_streamed(agent(kind(MODEL, client)), SHORT)
        seen = ""
        async for event in run.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                seen += event.data.delta
        return seen, run

    seen, run = loop.run_until_complete(streamed())
    assert seen == run.final_output and 0 < run.context_wrapper.usage.output_tokens < 64


@each(**BOTH)
def required_tool_and_its_result(kind: Any) -> None:
    tools = [function_tool(weather)]
    # After a required call the SDK leaves the choice free.
    done = ran(agent(kind(MODEL, client), tools=tools, settings={"tool_choice": "required"}, tool_use_behavior=last))
    results = [item.output for item in done.new_items if item.type == "tool_call_output_item"]
    assert results and all(result.startswith("sunny in ") for result in results), results


@each(**BOTH)
def form_beside_a_strict_tool(kind: Any) -> None:
    asked = agent(kind(MODEL, client), tools=[function_tool(weather)], output_type=Report, tool_use_behavior=last)
    done = ran(asked)
    assert isinstance(done.final_output, Report) or done.final_output.startswith("sunny in "), done.final_output


@each(**BOTH)
def form(kind: Any) -> None:
    assert isinstance(ran(agent(kind(MODEL, client), output_type=Report)).final_output, Report)


@each(**BOTH)
def handoff(kind: Any) -> None:
    other = agent(kind(MODEL, client), handoff_description="Knows the weather", output_type=Report)
    first = agent(kind(MODEL, client), handoffs=[other], settings={"tool_choice": "required"})
    assert ran(first).last_agent is other


@each(**BOTH)
def errors(kind: Any) -> None:
    raises(openai.NotFoundError, lambda: ran(agent(kind("another", client))), "another")
    wrong = agent(kind(MODEL, client), settings={"extra_body": {"temperatur": 1}})
    raises(openai.BadRequestError, lambda: ran(wrong), "did you mean temperature?")
