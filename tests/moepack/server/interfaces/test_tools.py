"""Tools over HTTP, as OpenAI's client sees them: calls are required, named, several, streamed, and keep to a schema."""

import json

import pytest
from server_fixtures import EVENTS, NAME, reply_of

from moepack.server.http import parse
from moepack.server.http.replies import ChatReply
from moepack.server.tools import calls
from moepack.server.translated.messages import messages
from moepack.server.translated.responses import responses

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")

SAID = [{"role": "user", "content": "What is the weather?"}]


def tool(name, **properties):
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": "It.", "parameters": schema}}


WEATHER = tool(
    "weather", city={"type": "string", "maxLength": 12}, days={"type": "integer", "minimum": 1, "maximum": 9}
)
TIME = tool("time", zone={"enum": ["utc", "local"]})


def ask(client, choice, **given):
    more = {"max_tokens": 200, "temperature": 1.0, "seed": 1, "tools": [WEATHER, TIME], **given}
    return client.chat.completions.create(model=NAME, messages=SAID, tool_choice=choice, **more)


def check(name, arguments):
    given = json.loads(arguments)
    if name == "weather":
        assert {*given} == {"city", "days"} and len(given["city"]) <= 12 and 1 <= given["days"] <= 9
    else:
        assert name == "time" and given in ({"zone": "utc"}, {"zone": "local"})


def test_required_calls_are_valid(client):
    out = ask(client, "required", n=24, parallel_tool_calls=False)
    for choice in out.choices:
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        (call,) = choice.message.tool_calls
        assert call.type == "function" and call.id.startswith("call_")
        check(call.function.name, call.function.arguments)
    assert {c.message.tool_calls[0].function.name for c in out.choices} == {"weather", "time"}
    assert len({c.message.tool_calls[0].id for c in out.choices}) == 24


def test_a_named_function_is_called(client):
    for name in ("time", "weather"):
        out = ask(client, {"type": "function", "function": {"name": name}}, n=3).choices
        assert [[c.function.name for c in o.message.tool_calls] for o in out] == [[name]] * 3


def test_several_calls_and_their_stream(client, monkeypatch):
    """A stream has the same calls; each begins with its name, and its arguments come in pieces."""
    monkeypatch.setattr(calls, "MOST_CALLS", 2)
    whole = ask(client, "required", tools=[TIME]).choices[0]
    assert len(whole.message.tool_calls) == 2
    pieces = [p.choices[0] for p in ask(client, "required", tools=[TIME], stream=True)]
    deltas = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    names, arguments = [], {}
    for delta in deltas:
        if delta.id is not None:
            assert delta.index == len(names) and delta.type == "function" and delta.function.arguments == ""
            names.append(delta.function.name)
        else:
            assert delta.index == len(names) - 1 and delta.function.name is None
            arguments[delta.index] = arguments.get(delta.index, "") + delta.function.arguments
    wanted = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
    assert [*zip(names, arguments.values(), strict=True)] == wanted and len(deltas) > 3 * len(names)
    assert [p.finish_reason for p in pieces][-1] == "tool_calls" == whole.finish_reason
    assert not any(p.delta.content for p in pieces)


SHAPE = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}


CALL = '<tool_call>\n{"name": "time", "arguments": {"zone": "utc"}}\n</tool_call>'


@pytest.mark.parametrize("strict", (False, True))
def test_calls_or_a_schema_of_the_answer(running, strict):
    """One grammar allows both and nothing else, in every interface, and both are read. A required call leaves no other
    answer. Without a schema strict functions alone have a grammar."""
    own = {"name": "time", "strict": strict}
    schema = TIME["function"]["parameters"]
    form = {"type": "json_schema", "schema": SHAPE}
    shared = {"model": NAME, "messages": SAID, "parallel_tool_calls": False}
    chat = {**shared, "tools": [{"type": "function", "function": {**own, "parameters": schema}}]}
    chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": SHAPE}}
    response = {**shared, "input": "?", "tools": [{"type": "function", **own, "parameters": schema}]}
    response["text"] = {"format": {**form, "name": "n"}}
    del response["messages"]
    message = {"model": NAME, "messages": SAID, "max_tokens": 9, "tools": [{**own, "input_schema": schema}]}
    message |= {"output_config": {"format": form}, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}

    def passes(asked, text):
        made = running.server._prepare_chat(asked)
        mask = made.grammar()
        assert made.reader().push(text)[0].kind == ("call" if text.startswith("<") else "content")
        for token in running.server.tokens.encode(text, False, ""):
            if mask.is_done or not mask.allowed(token + 1)[token]:
                return False
            mask.take(token)
        return mask.is_done

    for asked in (parse.chat(chat, 10), responses(response, 10), messages(message, 10)):
        assert passes(asked, CALL) and passes(asked, '{"n": 1}')
        for wrong in ('{"n": 3}', "Hello", CALL.replace("utc", "x"), "Sure. " + CALL):
            assert not passes(asked, wrong), wrong
    must = parse.chat({**chat, "tool_choice": "required"}, 10)
    assert passes(must, CALL) and not passes(must, '{"n": 1}')
    free = running.server._prepare_chat(parse.chat({**chat, "response_format": None}, 10))
    assert (free.grammar is not None) is strict


def reply(**given):
    return reply_of(ChatReply, parse.chat({"model": NAME, "messages": SAID, **given}, 10))


def whole(**given):
    made = reply(**given)
    for event in EVENTS:
        made.hear(0, event)
    return made.whole()


def test_reasoning_and_calls_in_a_whole_answer():
    out = whole()
    message = out["choices"][0]["message"]
    assert message["reasoning_content"] == "Let me see." and message["content"] == "I ask."
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "time", "arguments": '{"zone": "utc"}'},
        {"name": "time", "arguments": "{}"},
    ]
    assert out["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}
    assert out["choices"][0]["finish_reason"] == "tool_calls"
    (only,) = whole(parallel_tool_calls=False)["choices"][0]["message"]["tool_calls"]
    assert only["function"]["arguments"] == '{"zone": "utc"}'


def test_reasoning_and_calls_in_a_stream():
    made = reply(stream=True)
    pieces = [piece for event in EVENTS for piece in made._pieces(0, made.choices[0], event)]
    assert pieces[0]["delta"] == {"role": "assistant", "content": ""}  # with the first token
    deltas = [p["delta"] for p in pieces[1:]]
    assert [d for d in deltas if "tool_calls" not in d] == [
        {"reasoning_content": "Let me"}, {"reasoning_content": " see."}, {"content": "I ask."}, {},
    ]  # fmt: skip
    calls = [d["tool_calls"][0] for d in deltas if "tool_calls" in d]
    assert [(c["index"], c["function"].get("name"), c["function"]["arguments"]) for c in calls] == [
        (0, "time", ""), (0, None, '{"zone"'), (0, None, ': "utc"}'), (1, "time", ""), (1, None, "{}"),
    ]  # fmt: skip
    assert pieces[-1]["finish_reason"] == "tool_calls"
