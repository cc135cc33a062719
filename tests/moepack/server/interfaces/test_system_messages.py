"""Several system messages: where they go, by what the chat template shows of them."""

import pytest

from moepack.server.batching.tokens import Tokens
from moepack.server.errors import ApiError
from moepack.server.http import parse
from moepack.server.http.templates import ChatTemplate
from moepack.server.translated.messages import messages
from moepack.server.translated.responses import responses

LOOP = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"
ANYWHERE = LOOP
FIRST = LOOP.replace(
    "{{ m.role", "{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}{% endif %}{{ m.role"
)
SILENT = LOOP.replace("%}{{", "%}{% if m.role != 'system' or loop.first %}{{").replace(
    "{% endfor", "{% endif %}{% endfor"
)
NEVER = LOOP.replace("{{ m.role", "{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ m.role")


def chat(*said):
    """A request of messages like `s:text`, by the first letters of their roles."""
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return {"model": "m", "messages": [{"role": roles[one[0]], "content": one[2:]} for one in said]}


def rendered(tokenizer, template, asked, way="join"):
    tokenizer.chat_template = template
    assert asked.chat is not None
    return ChatTemplate(Tokens(tokenizer), way).render(asked.chat)[0]


@pytest.fixture
def tokens(bundle):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(bundle)


@pytest.mark.parametrize(
    ("template", "said", "wanted"),
    (
        (ANYWHERE, ("s:A", "d:B", "u:x"), "s:A\n\nB|u:x|"),
        (ANYWHERE, ("s:A", "u:x", "a:y", "s:B", "u:z"), "s:A|u:x|a:y|s:B|u:z|"),
        (FIRST, ("s:A", "s:B", "u:x", "a:y", "s:C", "u:z"), "s:A\n\nB|u:x|a:y|u:C\n\nz|"),
        (SILENT, ("s:A", "u:x", "s:C", "a:y", "d:D"), "s:A|u:x\n\nC|a:y|u:D|"),
        (SILENT, ("u:x", "a:y", "s:C", "s:D", "a:z"), "u:x|a:y|u:C\n\nD|a:z|"),
        (NEVER, ("s:A", "s:B", "u:x"), "u:A\n\nB\n\nx|"),
    ),
)
def test_joined(tokens, template, said, wanted):
    assert rendered(tokens, template, parse.chat(chat(*said), 10)) == wanted


@pytest.mark.parametrize(
    ("said", "wanted"),
    (
        (("u:x", "s:A", "u:y"), "u:x|a:|t:1|t:2|u:A\n\nB\n\ny|"),
        (("u:x", "s:A", "a:y"), "u:x|a:|t:1|t:2|u:A\n\nB|a:y|"),
        (("u:x", "s:A"), "u:x|a:|t:1|t:2|u:A\n\nB|"),
    ),
)
def test_results_stay_behind_their_calls(tokens, said, wanted):
    body = chat(*said)
    first, between, *then = body["messages"]
    names = ("1", "2")
    calls = [{"id": n, "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in names]
    results = [{"role": "tool", "tool_call_id": n, "content": n} for n in names]
    again = {"role": "system", "content": "B"}
    asked = {"role": "assistant", "tool_calls": calls}
    body["messages"] = [first, asked, between, results[0], again, results[1], *then]
    assert rendered(tokens, FIRST, parse.chat(body, 10)) == wanted


def test_instructions_are_the_first(tokens):
    items = [{"role": "developer", "content": "B"}, {"role": "user", "content": "x"}]
    asked = responses({"model": "m", "instructions": "A", "input": items}, 10)
    assert rendered(tokens, FIRST, asked) == "s:A\n\nB|u:x|"


def test_kept(tokens):
    asked = parse.chat(chat("s:A", "s:B", "u:x"), 10)
    assert rendered(tokens, ANYWHERE, asked, "keep") == "s:A|s:B|u:x|"
    with pytest.raises(ApiError, match="messages: the chat template refuses them: no"):
        rendered(tokens, FIRST, asked, "keep")


@pytest.mark.parametrize(
    ("asked", "field"),
    (
        (parse.chat(chat("s:A", "u:x", "s:B"), 10), "messages[2]"),
        (responses({"model": "m", "instructions": "A", "input": [{"role": "developer", "content": "B"}]}, 10),
         "input[0]"),
        (messages({**chat("u:x", "s:B"), "system": "A", "max_tokens": 1}, 10), "messages[1]"),
    ),
)  # fmt: skip
def test_refused(tokens, asked, field):
    with pytest.raises(ApiError) as caught:
        rendered(tokens, ANYWHERE, asked, "refuse")
    assert caught.value.param == field
    assert rendered(tokens, ANYWHERE, parse.chat(chat("s:A", "u:x"), 10), "refuse") == "s:A|u:x|"
