"""The Messages interface: messages, the order of a stream's events, tools, errors. `make conformance` has a client."""

import json
import urllib.error
import urllib.request

import pytest
from server_fixtures import EVENTS, NAME, chunks_of, post, reply_of

from moepack.server.batching.jobs import JobEvent
from moepack.server.errors import ApiError
from moepack.server.http.front import Front
from moepack.server.http.guard import Json
from moepack.server.options import Options
from moepack.server.tools.delimited import HERMES
from moepack.server.translated.message_reply import MessageReply
from moepack.server.translated.messages import messages

SAID = [{"role": "user", "content": "Tell me a story"}]
SCHEMA = {"type": "object", "properties": {"zone": {"enum": ["utc"]}}, "required": ["zone"]}
TIME = {"name": "time", "description": "It.", "input_schema": SCHEMA}
ASKED = {"model": NAME, "max_tokens": 8, "messages": SAID, "temperature": 0.0}


def ask(running, **given):
    return dict(json.loads(post(f"{running.url}/v1/messages", {**ASKED, **given})))


def events(running, **given):
    """The events of a stream, whose names stand inside as well."""
    raw = post(f"{running.url}/v1/messages", {**ASKED, "stream": True, **given}).decode()
    assert raw.endswith("\n\n") and "[DONE]" not in raw
    pairs = [block.split("\n") for block in raw.strip().split("\n\n")]
    out = [json.loads(data.removeprefix("data: ")) for _, data in pairs]
    assert [name.removeprefix("event: ") for name, _ in pairs] == [one["type"] for one in out]
    return out


def test_a_message_is_what_a_chat_says(exact):
    said = [{"role": "system", "content": "Be brief"}, *SAID]
    chat = exact.client().chat.completions.create(model=NAME, messages=said, temperature=0, max_tokens=8)
    out = ask(exact, system=[{"type": "text", "text": "Be brief", "cache_control": {"type": "ephemeral"}}])
    assert out["content"] == [{"type": "text", "text": chat.choices[0].message.content, "citations": []}]
    assert (out["type"], out["role"], out["stop_reason"], out["stop_sequence"]) == (
        "message",
        "assistant",
        "max_tokens",
        None,
    )
    assert (out["usage"]["input_tokens"], out["usage"]["output_tokens"]) == (chat.usage.prompt_tokens, 8)
    assert out["id"].startswith("msg_")
    counted = post(f"{exact.url}/v1/messages/count_tokens", {"model": NAME, "messages": SAID, "system": "Be brief"})
    assert json.loads(counted) == {"input_tokens": chat.usage.prompt_tokens}
    text = out["content"][0]["text"]
    stopped = ask(exact, system="Be brief", stop_sequences=["never there", text[3:6]])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", text[3:6])
    assert stopped["content"][0]["text"] == text[: text.index(text[3:6])]


def test_an_answer_that_is_begun_goes_on(exact):
    """It is not closed as a turn: agents begin JSON for the model."""
    begun = [*SAID, {"role": "assistant", "content": "Once upon"}]
    asked = {"messages": begun, "add_generation_prompt": False, "continue_final_message": True}
    ids = json.loads(post(f"{exact.url}/tokenize", asked))["tokens"]
    wanted = exact.client().completions.create(model=NAME, prompt=ids, temperature=0, max_tokens=8).choices[0].text
    found = ask(exact, messages=begun)
    assert found["content"][0]["text"] == wanted and found["usage"]["input_tokens"] == len(ids)


def test_more_than_fits_ends_where_the_room_does(exact, monkeypatch):
    """A client of this interface must name a bound, and most name a large one; a prompt without room is refused."""
    monkeypatch.setattr(exact.server.scheduler, "most_answer", lambda prompt: 5)
    out = ask(exact, max_tokens=32_000)
    assert (out["stop_reason"], out["usage"]["output_tokens"]) == ("model_context_window_exceeded", 5)
    assert events(exact, max_tokens=6)[-2]["delta"]["stop_reason"] == "model_context_window_exceeded"
    assert ask(exact, max_tokens=5)["stop_reason"] == "max_tokens"
    monkeypatch.undo()
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask(exact, max_tokens=32_000, messages=[{"role": "user", "content": "no room" * 4000}])


def test_tools(exact):
    pytest.importorskip("llguidance")
    one = {"type": "any", "disable_parallel_tool_use": True}
    out = ask(exact, tools=[TIME], tool_choice=one, max_tokens=200)
    (call,) = out["content"]
    assert out["stop_reason"] == "tool_use" and call["type"] == "tool_use" and call["input"] == {"zone": "utc"}
    named = ask(exact, tools=[TIME], tool_choice={"type": "tool", "name": "time"}, max_tokens=200)
    assert [block["name"] for block in named["content"]] == ["time"]
    found = events(exact, tools=[TIME], tool_choice=one, max_tokens=200)
    assert found[2]["content_block"] | {"id": ""} == {**call, "id": "", "input": {}}
    parts = [e["delta"]["partial_json"] for e in found if e["type"] == "content_block_delta"]
    assert len(parts) > 2 and json.loads("".join(parts)) == {"zone": "utc"}
    assert found[-2]["delta"]["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "noon"}]}
    turn = [
        *SAID,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result, {"type": "text", "text": "?"}]},
    ]
    assert ask(exact, messages=turn, tools=[TIME])["content"]


def test_blocks_become_messages():
    content = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "text", "text": "So."},
        {"type": "tool_use", "id": "1", "name": "time", "input": {"zone": "utc"}},
    ]
    failed = {"type": "tool_result", "tool_use_id": "1", "content": "late", "is_error": True}
    said = [*SAID, {"role": "assistant", "content": content}, {"role": "user", "content": [failed]}]
    asked = messages({**ASKED, "messages": said, "thinking": {"type": "disabled"}}, 10)
    assert asked.chat is not None and asked.chat.thinks is False
    user, answer, result = asked.chat.messages
    assert user == SAID[0] and result == {"role": "tool", "content": "Error: late", "tool_call_id": "1"}
    assert (answer["content"], answer["reasoning_content"]) == ("So.", "Hm.")
    assert answer["tool_calls"][0]["function"] == {"name": "time", "arguments": {"zone": "utc"}}


def test_thinking_text_and_calls_are_blocks():
    made = reply_of(MessageReply, messages({**ASKED, "stream": True}, 10))
    found = chunks_of(made, EVENTS)
    starts = [one["content_block"]["type"] for one in found if one["type"] == "content_block_start"]
    assert starts == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [(one["index"], one["delta"]["type"]) for one in found if one["type"] == "content_block_delta"]
    wanted = [*[(0, "thinking_delta")] * 2, (1, "text_delta"), *[(2, "input_json_delta")] * 2, (3, "input_json_delta")]
    assert deltas == wanted and found[0]["message"]["content"] == []
    kinds = [one["type"] for one in found if one["type"] != "content_block_delta"]
    blocks = ["content_block_start", "content_block_stop"] * 4
    assert kinds == ["message_start", "ping", *blocks, "message_delta", "message_stop"]
    thinking, text, call, _ = made.whole()["content"]
    assert (thinking["thinking"], text["text"], call["input"]) == ("Let me see.", "I ask.", {"zone": "utc"})
    assert made.failure(ApiError(500, "it broke")) == {
        "type": "error", "error": {"type": "api_error", "message": "it broke"},
    }  # fmt: skip


def test_input_that_is_no_json_is_left_out():
    """Numbers beyond every number made the whole answer fail; half a surrogate pair is sent as in streams."""
    for written, wanted in (('{"n": 1e999}', {}), ('{"n": NaN}', {}), ('{"n": "\\ud800"}', {"n": "?"})):
        made = MessageReply(messages(ASKED, 10), [[1]], None, NAME, lambda: HERMES.reader({}))
        text = f'<tool_call>{{"name": "time", "arguments": {written}}}</tool_call>'
        made.hear(0, JobEvent(text, finish="stop", generated=9))
        (call,) = json.loads(bytes(Json(made.whole()).body))["content"]
        assert (call["name"], call["input"]) == ("time", wanted)


def test_counting_makes_no_grammar(running, monkeypatch):
    monkeypatch.setattr(running.server, "_grammars", None)
    given = {"model": NAME, "messages": SAID, "tools": [TIME], "tool_choice": {"type": "any"}}
    assert json.loads(post(f"{running.url}/v1/messages/count_tokens", given))["input_tokens"] > 0


def test_every_refusal_has_the_shape(running):
    """Also of a method, and while the model loads."""
    from starlette.testclient import TestClient

    loading = Front(Options(NAME), lambda *given: None, lambda: None)
    for app, method, status in ((running.server.app, "GET", 405), (loading.app, "POST", 503)):
        found = TestClient(app, "http://localhost").request(method, "/v1/messages")
        assert (found.status_code, found.json()["type"]) == (status, "error")
    assert found.headers["retry-after"] == "5"


EPHEMERAL = {"cache_control": {"type": "ephemeral"}}
# The first request of Claude Code 2.1 as recorded, with shortened texts and two of its 24 tools.
CLAUDE_CODE = {
    "model": NAME,
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>\nToday's date is 2026-11-28.\n</system-reminder>"},
            {"type": "text", "text": "hello", **EPHEMERAL},
        ]},
        {"role": "system", "content": "Available agent types for the Agent tool:\n- claude: Catch-all"},
    ],
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.fa0; cc_entrypoint=sdk-cli;"},
        {"type": "text", "text": "You are a Claude agent, built on Anthropic's Claude Agent SDK.", **EPHEMERAL},
        {"type": "text", "text": "\nYou are an interactive agent.\n", **EPHEMERAL},
    ],
    "tools": [
        {"name": name, "description": "It.", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
            "properties": {"command": {"description": "The command", "type": "string"}, "timeout": {"type": "number"}},
            "required": ["command"], "additionalProperties": False,
        }} for name in ("Agent", "Bash")
    ],
    "metadata": {"user_id": '{"device_id":"7e","account_uuid":"","session_id":"11"}'},
    "max_tokens": 32000,
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}  # fmt: skip


def test_the_first_requests_of_claude_code(exact, monkeypatch):
    monkeypatch.setattr(exact.server.scheduler, "most_answer", lambda prompt: 5)
    with urllib.request.urlopen(urllib.request.Request(exact.url, method="HEAD")) as answer:
        assert answer.status == 200
    head = {"anthropic_beta": "claude-code-20250219,mid-conversation-system-2026-04-07", "x_api_key": "none"}
    raw = post(f"{exact.url}/v1/messages?beta=true", CLAUDE_CODE, anthropic_version="2023-06-01", **head).decode()
    assert "event: message_stop" in raw and '"stop_reason":"model_context_window_exceeded"' in raw
    counted = {name: CLAUDE_CODE[name] for name in ("model", "messages", "system", "tools", "thinking")}
    found = json.loads(post(f"{exact.url}/v1/messages/count_tokens?beta=true", counted, **head))
    start = json.loads(raw.split("data: ")[1].split("\n")[0])["message"]
    usage = start["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == found["input_tokens"] and not start["content"]
