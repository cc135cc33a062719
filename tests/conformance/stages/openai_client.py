"""OpenAI's Python client: chats, streams, tools, completions, Responses, and what the server does not have."""

import json
from concurrent.futures import ThreadPoolExecutor

import openai
from cases import MODEL, URL, case, say
from openai import OpenAI

CALLS = 200
client = OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
SAID = [{"role": "user", "content": "The history of"}]
ON = {"ignore_eos": True}  # the model may end an answer at any token
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"type": "string", "maxLength": 12}}, "required": ["zone"]}
FUNCTIONS = {"weather": WEATHER, "time": {**TIME, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": {"name": n, "parameters": p}} for n, p in FUNCTIONS.items()]
FLAT = [{"type": "function", "name": n, "parameters": p, "strict": True} for n, p in FUNCTIONS.items()]


def holds(name, text):
    """Check the arguments of a call against its function's schema."""
    given = json.loads(text)
    if name == "time":
        assert list(given) == ["zone"] and len(given["zone"]) <= 12, given
    else:
        assert name == "weather" and set(given) == {"city", "days", "unit"}, (name, given)
        assert type(given["days"]) is int and 1 <= given["days"] <= 14 and len(given["city"]) <= 24, given
        assert given["unit"] in ("celsius", "fahrenheit"), given


@case
def models() -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL


@case
def chat() -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=SAID, max_tokens=16, n=2, logprobs=True, top_logprobs=3, extra_body=ON
    )
    assert len(made.choices) == 2 and all(c.message.role == "assistant" for c in made.choices)
    assert all(len(c.logprobs.content) == 16 and len(c.logprobs.content[0].top_logprobs) == 3 for c in made.choices)
    assert made.usage.completion_tokens == 32 and made.usage.total_tokens == made.usage.prompt_tokens + 32


@case
def chat_streamed_with_usage() -> None:
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 16, "temperature": 0, "extra_body": ON}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text and [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == 16
    assert all(c.usage is None for c in chunks[:-1])


@case
def chat_stream_helper() -> None:
    # The helper raises where an answer ends by its length.
    with client.chat.completions.stream(model=MODEL, messages=SAID, max_tokens=99, stop=["e"]) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion()
    assert events[-1] == "content.done" and final.choices[0].finish_reason == "stop", events


@case
def stop_and_seed() -> None:
    asked = {"model": MODEL, "messages": SAID, "max_tokens": 48, "seed": 7, "temperature": 0, "stop": [" the", "e"]}
    made = client.chat.completions.create(**asked)
    assert made.choices[0].finish_reason == "stop" and "e" not in made.choices[0].message.content
    assert made.choices[0].message.content == "Th", "the answer that was taught begins: The history"


@case
def schema_parsed() -> None:
    given = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    made = client.chat.completions.create(model=MODEL, messages=SAID, max_tokens=200, response_format=given)
    holds("weather", made.choices[0].message.content)


@case
def tools_auto() -> None:
    made = client.chat.completions.create(model=MODEL, messages=SAID, tools=TOOLS, max_tokens=32)
    assert made.choices[0].message.content or made.choices[0].message.tool_calls


@case
def tools_none() -> None:
    made = client.chat.completions.create(model=MODEL, messages=SAID, tools=TOOLS, tool_choice="none", max_tokens=16)
    assert made.choices[0].message.tool_calls is None


@case
def tools_named() -> None:
    named = {"type": "function", "function": {"name": "time"}}
    made = client.chat.completions.create(model=MODEL, messages=SAID, tools=TOOLS, tool_choice=named, max_tokens=400)
    called = [c.function for c in made.choices[0].message.tool_calls]
    assert called and all(f.name == "time" for f in called)
    holds("time", called[0].arguments)


@case
def tools_streamed() -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    found = {}
    for chunk in client.chat.completions.create(model=MODEL, messages=SAID, stream=True, **asked):
        for call in chunk.choices[0].delta.tool_calls or []:
            found.setdefault(call.index, []).append(call.function.name or "")
            found[call.index].append(call.function.arguments or "")
    assert len(found) == 1
    holds(found[0][0], "".join(found[0][1:]))


@case
def tool_results_go_back() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": '{"zone": "UTC"}'}}
    told = [*SAID, {"role": "assistant", "content": None, "tool_calls": [call]}]
    told.append({"role": "tool", "tool_call_id": "call_1", "content": "noon"})
    asked = client.chat.completions.create(model=MODEL, messages=SAID, tools=TOOLS, max_tokens=1)
    made = client.chat.completions.create(model=MODEL, messages=told, tools=TOOLS, max_tokens=16)
    # What it says may be a call that max_tokens cuts, of which nothing is shown.
    assert made.usage.prompt_tokens > asked.usage.prompt_tokens and made.usage.completion_tokens


def required(seed):
    """Ask for a call that is required; "" if it is valid, else what is wrong."""
    asked = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 200}
    try:
        made = client.chat.completions.create(model=MODEL, messages=SAID, seed=seed, **asked)
        (call,) = made.choices[0].message.tool_calls
        assert made.choices[0].finish_reason == "tool_calls", made.choices[0].finish_reason
        holds(call.function.name, call.function.arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


with ThreadPoolExecutor(8) as pool:
    wrong = [why for why in pool.map(required, range(CALLS)) if why]
say(f"{CALLS} required calls", not wrong, f"{len(wrong)} are wrong, the first: {(wrong or [''])[0]}")


@case
def completion() -> None:
    made = client.completions.create(model=MODEL, prompt=["The", "A"], max_tokens=8, logprobs=2, echo=True)
    assert len(made.choices) == 2 and made.choices[0].text.startswith("The")
    streamed = client.completions.create(model=MODEL, prompt="The", stream=True, extra_body=ON)
    text = "".join(c.choices[0].text for c in streamed)
    assert text


@case
def responses() -> None:
    asked = {"model": MODEL, "input": "The history of", "max_output_tokens": 16, "store": False, "extra_body": ON}
    made = client.responses.create(**asked)
    assert made.output_text and made.usage.output_tokens == 16 and made.status == "incomplete"


@case
def responses_streamed() -> None:
    asked = {"model": MODEL, "input": "The history of", "max_output_tokens": 16, "store": False}
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created" and kinds[-1] in ("response.completed", "response.incomplete"), kinds
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert [e.sequence_number for e in events] == list(range(len(events)))


@case
def responses_tools() -> None:
    asked = {"tools": FLAT, "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 200}
    made = client.responses.create(model=MODEL, input="The history of", store=False, **asked)
    (call,) = [item for item in made.output if item.type == "function_call"]
    holds(call.name, call.arguments)


@case
def embeddings_are_refused() -> None:
    try:
        client.embeddings.create(model=MODEL, input="The")
    except openai.NotFoundError as error:
        assert error.body, "the refusal has no body that the client reads"
    else:
        raise AssertionError("embeddings were answered")


@case
def errors_name_the_field() -> None:
    try:
        client.chat.completions.create(model=MODEL, messages=SAID, temperature=-1)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error.param
    else:
        raise AssertionError("a temperature of -1 was answered")
    try:
        client.chat.completions.create(model="another", messages=SAID)
    except openai.NotFoundError as error:
        assert error.code == "model_not_found", error.code
    else:
        raise AssertionError("another model was answered")
