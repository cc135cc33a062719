"""Anthropic's Python client: Messages, streams, tools, counting tokens, errors."""

import anthropic
from cases import MODEL, URL, case

client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
SAID = [{"role": "user", "content": "The history of"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 24}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"name": "weather", "description": "The weather of a city", "input_schema": SCHEMA}]
ONE = {"type": "any", "disable_parallel_tool_use": True}


@case
def message() -> None:
    made = client.messages.create(model=MODEL, max_tokens=16, messages=SAID, system="Be brief.")
    assert made.role == "assistant"
    assert (made.stop_reason == "max_tokens") is (made.usage.output_tokens == 16)
    assert made.content[0].type == "text" and made.content[0].text


@case
def stop_sequence() -> None:
    made = client.messages.create(model=MODEL, max_tokens=48, messages=SAID, stop_sequences=["e"])
    assert made.stop_reason == "stop_sequence" and made.stop_sequence == "e"


@case
def events_in_order() -> None:
    kinds = [e.type for e in client.messages.create(model=MODEL, max_tokens=16, messages=SAID, stream=True)]
    kinds = [kind for kind in kinds if kind != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"], kinds
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"], kinds
    assert set(kinds[2:-3]) == {"content_block_delta"}, kinds


@case
def stream_helper() -> None:
    with client.messages.stream(model=MODEL, max_tokens=16, messages=SAID) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text
    assert (final.stop_reason == "max_tokens") is (final.usage.output_tokens == 16), final


@case
def tool_use() -> None:
    made = client.messages.create(model=MODEL, max_tokens=200, messages=SAID, tools=TOOLS, tool_choice=ONE)
    (block,) = [b for b in made.content if b.type == "tool_use"]
    assert made.stop_reason == "tool_use" and block.name == "weather"
    assert set(block.input) == {"city", "days"} and block.input["days"] in (1, 2, 3), block.input


@case
def tool_use_streamed() -> None:
    asked = {"max_tokens": 200, "messages": SAID, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}
    with client.messages.stream(model=MODEL, **asked) as stream:
        final = stream.get_final_message()
    assert final.content[0].type == "tool_use" and set(final.content[0].input) == {"city", "days"}


@case
def tool_results_go_back() -> None:
    used = {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Rome", "days": 1}}
    told = [*SAID, {"role": "assistant", "content": [used]}]
    told.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "sunny"}]})
    made = client.messages.create(model=MODEL, max_tokens=16, messages=told, tools=TOOLS)
    assert made.usage.output_tokens > 0


@case
def tokens_are_counted() -> None:
    made = client.messages.create(model=MODEL, max_tokens=1, messages=SAID)
    read = made.usage.input_tokens + (made.usage.cache_read_input_tokens or 0)
    assert client.messages.count_tokens(model=MODEL, messages=SAID).input_tokens == read


@case
def models() -> None:
    assert [m.id for m in client.models.list()] == [MODEL]


def refused(error, model, **more):
    try:
        client.messages.create(model=model, max_tokens=1, messages=SAID, extra_body=more)
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


@case
def errors_have_their_class() -> None:
    refused(anthropic.BadRequestError, MODEL, temperature=9)
    refused(anthropic.NotFoundError, "another")
