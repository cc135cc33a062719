"""The Responses interface: answers, the order of a stream's events, calls, earlier turns; by OpenAI's client."""

import json

import pytest
from server_fixtures import EVENTS, NAME, chunks_of, reply_of

from moepack.server.batching.jobs import JobEvent
from moepack.server.errors import ApiError
from moepack.server.translated.response_reply import ResponseReply
from moepack.server.translated.responses import responses

openai = pytest.importorskip("openai")
TIME = {
    "type": "function",
    "name": "time",
    "parameters": {
        "type": "object",
        "properties": {"zone": {"enum": ["utc"]}},
        "required": ["zone"],
        "additionalProperties": False,
    },
}


def respond(client, **given):
    more = {"model": NAME, "input": "Tell me a story", "temperature": 0, "max_output_tokens": 8, **given}
    return client.responses.create(**more)


def test_a_response_is_what_a_chat_says(client):
    said = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Tell me a story"}]
    chat = client.chat.completions.create(model=NAME, messages=said, temperature=0, max_tokens=8)
    out = respond(client, instructions="Be brief", metadata={"a": "b"})
    assert out.output_text == chat.choices[0].message.content
    assert out.id.startswith("resp_") and out.object == "response" and out.metadata == {"a": "b"}
    assert out.status == "incomplete" and out.incomplete_details.reason == "max_output_tokens"
    assert (out.usage.input_tokens, out.usage.output_tokens) == (chat.usage.prompt_tokens, 8)
    assert [(o.type, o.role, o.status) for o in out.output] == [("message", "assistant", "incomplete")]
    parts = [
        {"role": "developer", "content": "Be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "Tell me a story"}]},
    ]
    assert respond(client, input=parts).output_text == out.output_text


def test_functions(client):
    pytest.importorskip("llguidance")
    given = {"tools": [TIME], "tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    given["max_output_tokens"] = 200
    (call,) = respond(client, **given).output
    assert call.type == "function_call" and json.loads(call.arguments) == {"zone": "utc"} and call.name == "time"
    events = list(respond(client, **given, stream=True))
    assert "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta") == call.arguments
    done = next(e for e in events if e.type == "response.function_call_arguments.done")
    assert done.arguments == call.arguments and events[-1].response.output[0].name == "time"
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "noon"}
    turn = [{"role": "user", "content": "?"}, call.model_dump(), result]
    assert respond(client, input=turn, tools=[TIME]).output_text
    with client.responses.stream(model=NAME, input="Hi", **given) as stream:  # the client follows every event
        assert stream.get_final_response().output[0].name == "time"
    named = respond(client, **{**given, "tool_choice": {"type": "function", "name": "time"}})
    assert [one.name for one in named.output] == ["time"]


def test_an_earlier_answer_is_one_message():
    """Reasoning, a text and two calls in a row are one turn of the model; results follow it."""
    items = [
        {"role": "user", "content": "?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {
            "type": "message",
            "role": "assistant",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "So."}],
        },
        {
            "type": "function_call",
            "call_id": "1",
            "name": "time",
            "arguments": '{"zone": "utc"}',
            "status": "completed",
        },
        {"type": "function_call", "call_id": "2", "name": "time", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "noon"}]},
    ]
    asked = responses({"model": NAME, "input": items}, 10)
    user, answer, result = asked.chat.messages
    assert user == {"role": "user", "content": "?"} and result["content"] == "noon" and result["tool_call_id"] == "1"
    assert (answer["content"], answer["reasoning_content"]) == ("So.", "Hm.")
    calls = [(call["id"], call["function"]["arguments"]) for call in answer["tool_calls"]]
    assert calls == [("1", {"zone": "utc"}), ("2", {})]


def reply(**given):
    asked = responses({"model": NAME, "input": "?", **given}, 10)
    return reply_of(ResponseReply, asked)


def test_reasoning_text_and_calls_are_items():
    made = reply(stream=True)
    events = chunks_of(made, EVENTS)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", *["reasoning_text.delta"] * 2, "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", *["function_call_arguments.delta"] * 2, "function_call_arguments.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    output = events[-1]["response"]["output"]
    reasoning, message, call, _ = output
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me see."}] and reasoning["summary"] == []
    assert message["content"][0]["text"] == "I ask."
    assert (call["name"], call["arguments"], call["status"]) == ("time", '{"zone": "utc"}', "completed")
    ends = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"] for event in ends] == output
    assert [event["output_index"] for event in ends] == [0, 1, 2, 3]
    assert events[-1]["response"]["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert made.event(events[0]).startswith(b"event: response.created\ndata: {")
    failed = made.failure(ApiError(500, "the model failed"))
    assert failed["type"] == "response.failed" and failed["response"]["error"]["message"] == "the model failed"


def test_only_the_last_item_is_cut_off():
    """Also where one event ends reasoning and the whole answer; the end of an item says what the response does."""
    made = reply(stream=True)
    events = [*made._events(JobEvent("Hm.</think>I a", finish="length", generated=8)), *made._last()]
    ends = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["type"] == "response.incomplete"
    assert [item["status"] for item in ends] == ["completed", "incomplete"] and ends == events[-1]["response"]["output"]
