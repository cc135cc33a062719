"""What other programs ask: tokens, load, the schema, request ids, origins, usage in every chunk, vLLM's metrics."""

import json
import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from server_fixtures import NAME, post

from moepack.server.errors import ApiError
from moepack.server.http import guard, parse
from moepack.server.http.toolbox import NO_ARGUMENTS
from moepack.server.translated.messages import MessagesBody, messages
from moepack.server.translated.responses import ResponsesBody, responses

SAID = [{"role": "user", "content": "Tell me a story"}]


def asked(running, path, body=None, **headers):
    return json.loads(post(running.url + path, body, **headers))


def refusal(running, path, body):
    """The field that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(running.url + path, body)
    error = json.load(caught.value)["error"]
    assert caught.value.code == 400 and error["type"] == "invalid_request_error"
    return error.get("param") or error["message"].partition(":")[0]  # Anthropic's has no `param`


def events(running, path, body):
    """The JSON of a stream's events, without [DONE]."""
    lines = post(running.url + path, {**body, "stream": True}).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize(
    ("path", "body"),
    (
        ("/v1/completions", {"prompt": "The history of", "max_tokens": 6}),
        ("/v1/chat/completions", {"messages": SAID, "max_completion_tokens": 6, "stop": None}),
    ),
)
def test_usage_in_every_chunk(running, path, body):
    """As guidellm asks. vLLM, too, has it only beside include_usage."""
    both = {"include_usage": True, "continuous_usage_stats": True}
    given = {**body, "model": NAME, "temperature": 0, "ignore_eos": True}
    found = [c["usage"] for c in events(running, path, {**given, "stream_options": both})]
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == sorted(counts) and counts[-1] == 6 and counts[0] < 6
    assert all(u["total_tokens"] == u["prompt_tokens"] + u["completion_tokens"] for u in found)
    assert len({u["prompt_tokens"] for u in found}) == 1
    one = events(running, path, {**given, "stream_options": {"include_usage": True}})
    assert [c["usage"] for c in one[:-1]] == [None] * (len(one) - 1) and one[-1]["usage"] == found[-1]
    assert all(
        "usage" not in c for c in events(running, path, {**given, "stream_options": {**both, "include_usage": False}})
    )


EXTRAS = {
    "metadata": {"a": "b"},
    "priority": 3,
    "prompt_cache_retention": "24h",
    "request_id": "r",
    "stop_token_ids": [],
    "min_tokens": 0,
    "skip_special_tokens": True,
    "use_beam_search": False,
    "length_penalty": 0.5,
    "store": False,
    "service_tier": "auto",
    "keep_alive": "5m",
    "cache_prompt": True,
    "typical_p": 1.0,
    "repeat_penalty": 1,
    "mirostat": 0,
}
TEXT = {"prompt": "The history of", "max_tokens": 6}
TALK = {"model": NAME, "messages": SAID, "max_tokens": 6}
ITEMS = {"model": NAME, "input": "Tell me a story", "max_output_tokens": 6}
CHAT_EXTRAS = {"best_of": 1, "functions": [], "function_call": "none", "top_logprobs": 0, "verbosity": "medium"}
KEEPS_ALL = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}


@pytest.mark.parametrize(
    ("path", "body", "more", "ignored"),
    (
        ("/v1/completions", TEXT, {**EXTRAS, "best_of": 1, "suffix": ""}, None),
        ("/v1/chat/completions", TALK, {**EXTRAS, **CHAT_EXTRAS, "prediction": {"type": "content"}}, None),
        ("/v1/responses", ITEMS, {**EXTRAS, "max_tool_calls": 3, "context_management": [], "n": 1}, None),
        ("/v1/messages", TALK, {"metadata": {"user_id": "u"}, "context_management": KEEPS_ALL, "speed": "standard"},
         None),
        ("/v1/completions", TEXT, {"service_tier": "flex", "store": True}, "store, service_tier"),
        ("/v1/chat/completions", TALK, {"reasoning_effort": "low", "verbosity": "low"}, "verbosity, reasoning_effort"),
        ("/v1/chat/completions", TALK, {"reasoning_effort": "none"}, None),
        ("/v1/responses", ITEMS, {"reasoning": {"effort": "low"}, "text": {"verbosity": "high"}, "truncation": "auto"},
         "text.verbosity, truncation, reasoning.effort"),
        ("/v1/messages?beta=true", TALK, {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
         "thinking, output_config.effort"),
        ("/v1/messages", TALK, {"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, None),
        ("/v1/messages", TALK, {"thinking": {"type": "enabled", "budget_tokens": 1024}, "speed": "fast"},
         "thinking.budget_tokens, speed, thinking"),
    ),
)  # fmt: skip
@pytest.mark.parametrize("stream", (False, True))
def test_fields_without_effect(exact, path, body, more, ignored, stream):
    """Accepted, with the same answer as without; hints that no answer follows are named in a header."""

    def said(given):
        raw = json.dumps({**given, "temperature": 0, "stream": stream}).encode()
        request = urllib.request.Request(exact.url + path, raw, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            texts = re.findall(rb'"(?:text|content|delta)": ?"((?:[^"\\]|\\.)*)"', answer.read())
            return [text.decode() for text in texts], answer.headers["x-moepack-ignored"]

    plain = said(body)
    assert "".join(plain[0]) and plain[1] is None
    assert said({**body, **more}) == (plain[0], ignored)


def test_tokens_and_back(running, tokenizer):
    found = asked(running, "/tokenize", {"model": NAME, "prompt": "The history of", "return_token_strs": True})
    ids = tokenizer("The history of").input_ids
    assert found["tokens"] == ids and found["count"] == 3 and found["token_strs"] == ["The", "Ġhistory", "Ġof"]
    most = running.server.scheduler.most_answer(1) + 1  # what the budget holds, which is less than the model's context
    assert found["max_model_len"] == most < running.server.scheduler.limits.context
    (model,) = asked(running, "/v1/models")["data"]
    assert model["max_model_len"] == most and model["root"] == NAME  # vLLM's load generator reads it
    assert asked(running, "/detokenize", {"tokens": ids}) == {"prompt": "The history of"}
    assert asked(running, "/detokenize", {"tokens": [0, ids[0]]})["prompt"] == "<|endoftext|>The"
    chat = asked(running, "/tokenize", {"messages": SAID})
    assert tokenizer.decode(chat["tokens"]) == "user: Tell me a story\nassistant:" and chat["token_strs"] is None
    part = asked(running, "/tokenize", {"messages": SAID, "add_generation_prompt": False})
    assert tokenizer.decode(part["tokens"]) == "user: Tell me a story\n"
    assert refusal(running, "/tokenize", {"messages": SAID, "prompt": "x"}) == "messages"
    assert refusal(running, "/tokenize", {}) == "messages"
    assert refusal(running, "/detokenize", {"tokens": [1 << 30]}) == "tokens"


def test_load(running):
    running.idle()
    found = asked(running, "/load")
    assert found == {"server_load": 0, "running": 0, "waiting": 0, "max_sequences": 8, "max_waiting": 300}


def test_the_schema_has_every_route(running):
    described = asked(running, "/openapi.json")
    paths = {path.replace("{name}", "{name:path}"): [*methods] for path, methods in described["paths"].items()}
    routes = running.server.app._app.__closure__  # the application behind the count of requests
    inner = next(cell.cell_contents for cell in routes if hasattr(cell.cell_contents, "routes"))
    assert paths == {r.path: ["post" if "POST" in r.methods else "get"] for r in inner.routes}
    assert described["openapi"] == "3.1.0"


CHAT = {"model": NAME, "messages": SAID}
LEAST = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"model": NAME, "input": "Hello"},
    "/v1/messages": {**CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": CHAT,
    "/tokenize": {"messages": SAID},
    "/detokenize": {"tokens": [1]},
}


@pytest.mark.parametrize("path", LEAST)
def test_the_schema_is_what_is_taken(path, running):
    """Every field that it lists is refused by its own name where its value is wrong, and null counts as absent."""
    described = asked(running, "/openapi.json")
    assert LEAST.keys() == {path for path, methods in described["paths"].items() if "post" in methods}
    (body,) = described["paths"][path]["post"]["requestBody"]["content"].values()
    name = body["schema"].get("$ref", "/DialogueBody").rpartition("/")[2]
    schema, least = described["components"]["schemas"][name], LEAST[path]
    assert schema["additionalProperties"] is False and set(schema.get("required", ())) == {*least}
    for field, one in schema["properties"].items():
        wrong = refusal(running, path, {**least, field: [[["wrong"]]]})
        assert re.match(rf"{field}\b", wrong), field
        assert ({"type": "null"} in one.get("anyOf", ())) is (field not in least and field != "model"), field
    assert schema["properties"]["model"] == {"enum": [NAME]}
    assert refusal(running, path, {**least, "beam_width": 4, "zoo": None}) == "beam_width"


def function(**given):
    return {"type": "function", "function": {"name": "x", **given}}


def schema(**given):
    return {"type": "json_schema", **given}


NOTHING = {"type": "nothing"}  # no schema
REFUSED = {
    "/v1/completions": (
        ({"temperature": -1}, "temperature"),
        ({"logprobs": 99}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": [""]}, "stop[0]"),
        ({"best_of": 4}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias['99999999']"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [99999999]}, "prompt"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"min_tokens": 4}, "min_tokens"),
        ({"stop_token_ids": [1]}, "stop_token_ids"),
    ),
    "/v1/chat/completions": (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages"),  # the template's own refusal
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"max_completion_tokens": 1 << 20}, "max_completion_tokens"),
        ({"response_format": schema(json_schema={"schema": NOTHING}), "tools": [function()]}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [function()], "tool_choice": function(name="y")}, "tool_choice"),
        ({"tools": [function()], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tools": [{"type": "magic"}]}, "tools[0].type"),
        ({"tools": [function(), function()]}, "tools"),
        ({"tools": [function(name="two words")]}, "tools[0].function.name"),
        ({"tools": [function(mood=1)]}, "tools[0].function.mood"),
        ({"tools": [function(parameters={"type": "array"})]}, "tools[0].function.parameters"),
        ({"tools": [function(parameters={"properties": {"a": 1}})]}, "tools[0].function.parameters.properties"),
        ({"tools": [function(parameters={"required": [{}]})]}, "tools[0].function.parameters.required"),
        ({"tools": [function(parameters={"properties": {"a": NOTHING}})], "tool_choice": "required"}, "tools"),
    ),
    "/v1/responses": (
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "x", "mood": 1}]}, "input[0].mood"),
        ({"text": {"format": schema(name="n", schema=NOTHING)}}, "text.format"),
        ({"max_output_tokens": 1 << 20}, "max_output_tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ),
    "/v1/messages": (
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"name": "x", "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0].keep"),
        ({"output_config": {"format": schema(schema=NOTHING)}}, "output_config.format"),
        ({"output_config": {"format": schema(schema={})}, "output_format": schema(schema={})}, "output_format"),
    ),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_is_not_served_is_refused_by_name(running, path):
    for given, field in REFUSED[path]:
        assert refusal(running, path, {**LEAST[path], **given}) == field, given


@pytest.mark.parametrize(
    ("parsed", "given", "wrong"),
    (
        (parse.completion, {"prompt": "x"}, {"min_tokens": False, "best_of": True, "use_beam_search": 0}),
        (parse.chat, {"messages": SAID}, {"best_of": True, "skip_special_tokens": 1, "echo": 0}),
        (responses, {"input": "x"}, {"background": 0, "top_logprobs": False}),
        (messages, {"messages": SAID, "max_tokens": 1}, {"tools": [{"name": "f", "defer_loading": 0}]}),
    ),
)
def test_a_boolean_is_no_number(parsed, given, wrong):
    """Python takes false for 0 and true for 1: a field that is accepted at one value takes no other type's."""
    for name, value in wrong.items():
        with pytest.raises(ApiError, match=rf"^{name}\S*: must be"):
            parsed({"model": "m", **given, name: value}, 10)


@pytest.mark.parametrize(
    ("parsed", "least", "name", "proposed"),
    (
        (parse.chat, {"messages": SAID}, "speed", None),  # a field of Messages, and no misspelt seed
        (parse.chat, {"messages": SAID}, "speeed", "seed"),
        (messages, {"messages": SAID, "max_tokens": 1}, "min_tokens", None),
        (messages, {"messages": SAID, "max_tokens": 1}, "stop", "stop_sequences"),  # the same by another name
        (responses, {"input": "x"}, "max_tokens", "max_output_tokens"),
        (responses, {"input": "x"}, "response_format", "text"),
        (parse.chat, {"messages": SAID}, "enable_thinking", "reasoning_effort"),
    ),
)
def test_a_field_of_another_interface(parsed, least, name, proposed):
    with pytest.raises(ApiError) as caught:
        parsed({"model": "m", **least, name: 1}, 10)
    assert f"{name}: is not supported" in str(caught.value), caught.value
    assert str(caught.value).partition("did you mean ")[2] == (f"{proposed}?" if proposed else "")


@pytest.mark.parametrize(
    ("path", "said"),
    (
        ("/chat/completions", "did you mean /v1/chat/completions?"),  # an address without /v1, or with two of them
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("/api/tags", "see /openapi.json"),
    ),
)
def test_a_path_that_is_not_there(path, said, running):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(running.url + path)
    with caught.value as error:
        assert error.code == 404 and said in error.read().decode()


def test_what_clients_add_to_a_conversation():
    """OpenAI's client sends back what it parsed, and marks of a cache may stand in every part."""
    mark = {"cache_control": {"type": "ephemeral"}}
    answer = {"role": "assistant", "content": '{"a": 1}', "parsed": {"a": 1}}
    thought = {"role": "assistant", "content": "Sun.", "reasoning_content": "Hm."}
    tool = {"type": "function", "function": {"name": "f", **mark}}
    asked = parse.chat({"model": NAME, "messages": [*SAID, answer, *SAID, thought], "tools": [tool]}, 10)
    assert asked.chat.messages[1] == {"role": "assistant", "content": '{"a": 1}'}
    assert asked.chat.messages[3]["reasoning_content"] == asked.chat.messages[3]["thinking"] == "Hm."
    assert asked.chat.shown == [{"type": "function", "function": {"name": "f", "parameters": NO_ARGUMENTS}}]


@pytest.mark.parametrize("given", ('{"a": 1', "[1]", "null"))
def test_a_call_that_was_cut_comes_back(given):
    """Clients send it with their own error as its result; the model sees both."""
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": given}}
    said = [*SAID, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "cut"}]
    item = {"type": "function_call", "name": "f", "call_id": "1", "arguments": given}
    for asked in (parse.chat({"model": "m", "messages": said}, 10), responses({"model": "m", "input": [item]}, 10)):
        (found,) = (call for message in asked.chat.messages for call in message.get("tool_calls", ()))
        assert found["function"]["arguments"] == {"INVALID_JSON": given}


@pytest.mark.parametrize("kind", (parse.CompletionBody, parse.ChatBody, ResponsesBody, MessagesBody))
def test_the_page_names_every_field(kind):
    page = (Path(__file__).resolve().parents[4] / "docs/server.md").read_text()
    missing = [name for name in kind.model_fields if not re.search(rf"`{name}\b", page)]
    assert not missing


def test_request_ids(running):
    def named(path, given):
        request = urllib.request.Request(running.url + path, headers={"X-Request-Id": given} if given else {})
        try:
            with urllib.request.urlopen(request) as answer:
                found = answer.headers.get_all("x-request-id")
        except urllib.error.HTTPError as error:
            found = error.headers.get_all("x-request-id")
        assert len(found) == 1
        return str(found[0])

    assert named("/health", "job-7:a.b") == named("/nowhere", "job-7:a.b") == "job-7:a.b"
    for given in (None, "x" * 129, "two words", '"><script>'):
        assert re.fullmatch("[0-9a-f]{32}", named("/health", given))
    assert named("/health", None) != named("/health", None)


def test_origins(running):
    """None is permitted by default (test_hostile.py); one that is named may read answers and send JSON."""
    from starlette.testclient import TestClient

    with TestClient(guard.shared(running.server.app, ["https://a.example"]), "http://localhost") as pages:
        ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type, authorization"}
        found = pages.options("/v1/completions", headers={"Origin": "https://a.example", **ask})
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == "https://a.example"
        read = pages.get("/health", headers={"Origin": "https://a.example"})
        assert read.headers["access-control-allow-origin"] == "https://a.example"
        other = pages.get("/health", headers={"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_metrics(running):
    """By our names and by vLLM's."""

    def numbers():
        with urllib.request.urlopen(f"{running.url}/metrics") as answer:
            assert answer.headers["content-type"].startswith("text/plain")
            text = answer.read().decode()
        return {name: float(value) for name, value in re.findall(r"^(\w[^ ]*) (\S+)$", text, re.M)}

    def more(name, labels=f'engine="0",model_name="{NAME}"'):
        key = f"{name}{{{labels}}}" if labels else name
        return after[key] - before.get(key, 0)

    running.idle()
    before = numbers()
    asked(running, "/v1/completions", {"prompt": "The history of", "max_tokens": 5, "ignore_eos": True})
    running.idle()
    after = numbers()
    assert more("vllm:prompt_tokens_total") == 3 and more("vllm:generation_tokens_total") == 5
    assert more("vllm:num_requests_running") == more("vllm:num_requests_waiting") == 0
    assert more("vllm:num_preemptions_total") == 0
    for name in ("time_to_first_token", "request_time_per_output_token", "e2e_request_latency"):
        assert more(f"vllm:{name}_seconds_count") == 1
    assert more("vllm:request_prompt_tokens_sum") == 3 and more("vllm:request_generation_tokens_sum") == 5
    assert more("vllm:request_success_total", f'engine="0",finished_reason="length",model_name="{NAME}"') == 1
    assert more("moepack_time_to_first_token_seconds_count", "") == 1
    assert more("moepack_requests_total", 'path="/v1/completions",status="200"') == 1
    totals, serving = running.server.scheduler.totals, running.model.moepack
    for name, value in (
        ("moepack_generated_tokens_total", totals.generated_tokens),
        ("moepack_sequences_finished_total", totals.finished),
        ("moepack_sequences_not_finite_total", totals.not_finite),
        ("moepack_prefix_hits_total", totals.prefix_hits),
        ("moepack_prefix_queries_total", totals.prefix_queries),
        ("moepack_prefix_bytes", running.server.engine.kept_bytes),
        (f'vllm:prefix_cache_hits_total{{engine="0",model_name="{NAME}"}}', totals.prefix_hits),
        (f'vllm:prefix_cache_queries_total{{engine="0",model_name="{NAME}"}}', totals.prefix_queries),
        ("moepack_budget_bytes", serving.budget_bytes),
        ("moepack_forward_waits_total", 0),
    ):
        assert after[name] == value, name
    assert after["moepack_promotions_total"] <= serving.counters()["promotions"]
    assert sum(value for name, value in after.items() if name.startswith("moepack_experts{")) == 4 * 16
