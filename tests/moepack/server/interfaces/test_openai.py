"""The OpenAI interface as its official client sees it."""

import json
import re
import runpy
import sys
import urllib.error
from pathlib import Path

import pytest
import torch
from server_fixtures import NAME, post
from support import at_once

openai = pytest.importorskip("openai")

ROOT = Path(__file__).resolve().parents[4]
PROMPT = "The history of"
GREEDY = {"model": NAME, "temperature": 0}
WORDS = ["The", "history", "of", "the", "world", "is", "long", "and", "has", "many", "people", "in", "it"]
SAID = [{"role": "user", "content": "Tell me a story"}]


def complete(client, **given):
    return client.completions.create(**{**GREEDY, "prompt": PROMPT, "max_tokens": 12, **given})


def chat(client, **given):
    return client.chat.completions.create(**{**GREEDY, "messages": SAID, "max_tokens": 2, **given})


def test_greedy_is_what_the_model_says(exact, plain, tokenizer):
    out = complete(exact.client(), logprobs=1)
    assert out.object == "text_completion" and out.id.startswith("cmpl-") and out.model == NAME
    assert out.choices[0].finish_reason == "length"
    assert out.usage.prompt_tokens == 3 and out.usage.completion_tokens == 12 and out.usage.total_tokens == 15
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    wanted = plain.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    assert out.choices[0].text == tokenizer.decode(wanted[0, 3:])
    with torch.inference_mode():
        logs = torch.log_softmax(plain(wanted).logits[0, 2:-1], -1)
    best = logs.gather(1, wanted[0, 3:, None])[:, 0]
    assert out.choices[0].logprobs.token_logprobs == pytest.approx(best.tolist(), abs=1e-4)


def test_beside_others_an_answer_is_what_it_is_alone(exact, plain, tokenizer):
    """Greedy tokens in float32 equal those of plain transformers, also for prompts longer than a step."""
    prompts = [" ".join((WORDS * 12)[n : n + 1 + 9 * n]) for n in range(12)]
    found = {}
    client = exact.client()

    def one(n):
        found[n] = complete(client, prompt=prompts[n], max_tokens=30, extra_body={"ignore_eos": True}).choices[0].text

    steps = exact.server.scheduler.totals.steps
    at_once(one, 12)
    assert exact.server.scheduler.totals.steps - steps < 12 * 30 / 3  # they did share passes
    for n, prompt in enumerate(prompts):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        wanted = plain.generate(
            ids, max_new_tokens=30, min_new_tokens=30, do_sample=False, pad_token_id=0, eos_token_id=None
        )
        assert found[n] == tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True), prompt


def test_a_stream_says_the_same(client):
    whole = complete(client)
    pieces = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].text for p in pieces if p.choices) == whole.choices[0].text
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == "length"
    assert sum(p.usage is not None for p in pieces) == 1 and pieces[-1].choices == []
    assert pieces[-1].usage == whole.usage and len({p.id for p in pieces}) == 1
    assert all(p.usage is None for p in complete(client, stream=True))


def test_chat(client):
    out = client.chat.completions.create(**GREEDY, messages=SAID, max_completion_tokens=8)
    assert out.object == "chat.completion" and out.choices[0].message.role == "assistant"
    assert out.choices[0].finish_reason == "length" and out.usage.completion_tokens == 8
    rendered = complete(
        client, prompt="user: Tell me a story\nassistant:", max_tokens=8, extra_body={"add_special_tokens": False}
    )
    assert rendered.choices[0].text == out.choices[0].message.content
    pieces = list(chat(client, max_tokens=8, stream=True))
    assert pieces[0].choices[0].delta.role == "assistant" and pieces[-1].choices[0].finish_reason == "length"
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == out.choices[0].message.content
    assert {p.object for p in pieces} == {"chat.completion.chunk"}
    parts = [{"role": "user", "content": [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "a story"}]}]
    again = chat(client, messages=parts, max_tokens=8)
    assert again.choices[0].message.content == out.choices[0].message.content


@pytest.mark.parametrize("stream", (False, True))
def test_stop_strings_are_never_shown(client, stream):
    """A stop string may begin in one token and end in another, anywhere in the answer."""
    text = complete(client, max_tokens=24).choices[0].text
    for at in range(2, len(text) - 4, 9):
        stop = text[at : at + 4]
        cut = text[: text.index(stop)]
        out = complete(client, max_tokens=24, stop=["never there", stop], stream=stream)
        pieces = list(out) if stream else [out]
        assert "".join(p.choices[0].text for p in pieces) == cut
        assert pieces[-1].choices[0].finish_reason == "stop"
    late = complete(client, max_tokens=24, stop=text[-3:] + "and more, which does not come")
    assert late.choices[0].text == text and late.choices[0].finish_reason == "length"


def test_seeds(client):
    def say(seed, **more):
        return str(complete(client, temperature=1.0, seed=seed, max_tokens=16, **more).choices[0].text)

    assert say(7) == say(7)
    assert len({say(n) for n in range(3)}) > 1 and len({say(None) for _ in range(3)}) > 1
    assert say(7, top_p=0.0) == say(8, extra_body={"top_k": 1}) == say(9, extra_body={"min_p": 1.0})
    assert say(7, top_p=0.0) == complete(client, max_tokens=16).choices[0].text


def test_several_answers(client):
    out = complete(client, n=3, temperature=1.0, seed=5, prompt=[PROMPT, "def f("], max_tokens=10)
    assert [c.index for c in out.choices] == [0, 1, 2, 3, 4, 5]
    assert len({c.text for c in out.choices}) > 3
    assert out.usage.prompt_tokens < 20 and out.usage.completion_tokens <= 60
    pieces = list(complete(client, n=3, temperature=1.0, seed=5, max_tokens=10, stream=True))
    texts = ["".join(p.choices[0].text for p in pieces if p.choices[0].index == n) for n in range(3)]
    assert texts == [c.text for c in out.choices[:3]]
    chats = chat(client, temperature=1, n=2, seed=1, max_tokens=10)
    assert len(chats.choices) == 2 and chats.choices[0].message.content != chats.choices[1].message.content


def test_prompts_of_every_kind(client, tokenizer):
    ids = tokenizer(PROMPT).input_ids
    for prompt in (ids, [ids], [PROMPT]):
        assert complete(client, prompt=prompt).choices[0].text == complete(client).choices[0].text
    assert len(complete(client, prompt=[ids, ids[:1]]).choices) == 2


def test_logprobs(client, tokenizer):
    out = complete(client, logprobs=3, max_tokens=6).choices[0]
    found = out.logprobs
    assert "".join(found.tokens) == out.text and len(found.token_logprobs) == 6
    each = zip(found.top_logprobs, found.token_logprobs, strict=True)
    assert all(len(top) == 3 and max(top.values()) == one for top, one in each)
    assert [out.text[a:][: len(t)] for a, t in zip(found.text_offset, found.tokens, strict=True)] == found.tokens
    said = chat(client, max_tokens=5, logprobs=True, top_logprobs=2)
    content = said.choices[0].logprobs.content
    assert "".join(c.token for c in content) == said.choices[0].message.content
    assert all(bytes(c.bytes).decode() == c.token and len(c.top_logprobs) == 2 for c in content)
    pieces = list(chat(client, max_tokens=5, logprobs=True, stream=True))
    streamed = [c for p in pieces if p.choices[0].logprobs for c in p.choices[0].logprobs.content]
    assert [c.token for c in streamed] == [c.token for c in content]


def test_echo_scores_the_prompt(exact, plain, tokenizer):
    """As lm-eval asks: each prompt token's probability given those before it, for a prompt longer than a step."""
    client = exact.client()
    text = " ".join(["The history of the world is a story of people and of places."] * 12)
    ids = tokenizer(text).input_ids
    assert len(ids) > 2 * 64
    out = complete(client, prompt=text, echo=True, logprobs=1, max_tokens=1).choices[0]
    found = out.logprobs
    assert out.text.startswith(text) and len(found.tokens) == len(ids) + 1
    assert found.token_logprobs[0] is None and found.top_logprobs[0] is None
    with torch.inference_mode():
        logs = torch.log_softmax(plain(torch.tensor([ids])).logits[0], -1)
    wanted = [float(logs[n, token]) for n, token in enumerate(ids[1:])]
    assert found.token_logprobs[1:-1] == pytest.approx(wanted, abs=1e-4)
    best = logs.argmax(-1).tolist()[:-1]
    scored = zip(found.top_logprobs[1:-1], found.token_logprobs[1:-1], strict=True)
    assert [max(t.values()) == s for t, s in scored] == [b == i for b, i in zip(best, ids[1:], strict=True)]
    alone = complete(client, prompt=text, echo=True, logprobs=1, max_tokens=0).choices[0]
    assert alone.text == text and len(alone.logprobs.tokens) == len(ids)
    assert complete(client, echo=True, max_tokens=2).choices[0].text.startswith(PROMPT)


def test_penalties_and_bias(client, tokenizer):
    plain = complete(client, max_tokens=40).choices[0].text

    def repeats(text):
        ids = tokenizer(text).input_ids
        return len(ids) - len(set(ids))

    for more in ({"presence_penalty": 2.0, "frequency_penalty": 2.0}, {"extra_body": {"repetition_penalty": 5.0}}):
        assert repeats(complete(client, max_tokens=40, **more).choices[0].text) < repeats(plain)
    token = tokenizer(" the").input_ids[0]
    assert complete(client, max_tokens=4, logit_bias={token: 100}).choices[0].text == " the the the the"
    assert " the" not in complete(client, max_tokens=40, logit_bias={token: -100}).choices[0].text


def test_json_answers(client):
    pytest.importorskip("llguidance")
    age = {"type": "integer", "minimum": 0, "maximum": 99}
    properties = {"name": {"type": "string", "maxLength": 8}, "age": age}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    schema["x-guidance"] = {"whitespace_pattern": "\\n*"}  # a client's own word of it has no effect
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    for seed in range(3):
        out = chat(client, temperature=1, seed=seed, max_tokens=100, response_format=wanted)
        found = json.loads(out.choices[0].message.content)
        assert out.choices[0].finish_reason == "stop" and set(found) == {"name", "age"} and 0 <= found["age"] <= 99
        assert re.sub(r'"(\\.|[^"])*"', '""', out.choices[0].message.content) == f'{{"": "", "": {found["age"]}}}'
    out = chat(client, max_tokens=200, response_format={"type": "json_object"})
    assert out.choices[0].message.content.startswith("{")
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
    with pytest.raises(openai.BadRequestError, match="response_format: this schema cannot be kept to"):
        chat(client, response_format=bad)


def test_tools_go_through_the_template(client):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
    without = chat(client)
    out = chat(client, tools=[tool])
    assert out.usage.prompt_tokens > without.usage.prompt_tokens
    none = chat(client, tools=[tool], tool_choice="none")
    assert none.usage.prompt_tokens == without.usage.prompt_tokens
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = [
        *SAID,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sun"},
    ]
    assert chat(client, messages=said, tools=[tool]).choices


def test_the_example(running, monkeypatch, capsys):
    example = str(ROOT / "examples" / "client.py")
    monkeypatch.setattr(sys, "argv", [example, running.url, NAME])
    runpy.run_path(example, run_name="__main__")
    out = capsys.readouterr().out
    assert "models: mini" in out and "\n0 (" in out and "\n2 (" in out and "'The': -\n" in out


def test_models_and_errors(running):
    client = running.client()
    assert [m.id for m in client.models.list()] == [NAME] and client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="'other' is not here: 'mini' is"):
        complete(client, model="other")
    with pytest.raises(openai.NotFoundError, match=f"'{'o' * 128}' is not here"):
        client.models.retrieve("o" * 4000)
    context = running.server.scheduler.limits.context
    with pytest.raises(openai.BadRequestError, match=f"maximum context length is {context} tokens") as caught:
        complete(client, prompt=[5] * context)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match=r"context length is \d+ tokens, which leaves \d+"):
        complete(client, max_tokens=context)
    most = running.server.scheduler.most_answer(3)
    assert 3 + most < context, "the budget is the limit here"
    with pytest.raises(openai.BadRequestError, match=f"{most + 3} tokens, which the memory budget holds now"):
        complete(client, prompt=[5] * (most + 4))


@pytest.mark.parametrize("given", ({}, {"model": None}))
def test_without_a_name_the_served_model_answers(running, given):
    """Chats have to name it, as OpenAI's do."""
    found = json.loads(
        post(f"{running.url}/v1/completions", {**given, "prompt": PROMPT, "max_tokens": 3, "temperature": 0})
    )
    assert found["model"] == NAME and found["usage"]["completion_tokens"] == 3
    with pytest.raises(urllib.error.HTTPError) as caught:
        post(f"{running.url}/v1/chat/completions", {**given, "messages": SAID})
    assert caught.value.code == 400 and json.load(caught.value)["error"]["param"] == "model"


def test_a_client_that_vanishes_frees_its_slot(running):
    running.idle()
    totals, long = running.server.scheduler.totals, {"max_tokens": 400, "extra_body": {"ignore_eos": True}}
    before = totals.cancelled
    stream = complete(running.client(), stream=True, **long)
    next(iter(stream))
    assert running.server.scheduler.running == 1
    stream.close()
    running.idle()
    assert totals.cancelled == before + 1
