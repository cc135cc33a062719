"""Very many values, schemas that grow, many tools: refused before the costly step, which is counted here."""

import json

import pytest
from server_fixtures import NAME

from moepack.server.batching import grammar, schema_limits
from moepack.server.batching.grammar import Grammars
from moepack.server.batching.schema_limits import check_schemas
from moepack.server.errors import ApiError
from moepack.server.http import app, json_body, models, toolbox
from moepack.server.http.json_body import COMMAS, NESTED, check_values
from moepack.server.http.parse import chat

openai = pytest.importorskip("openai")
SAID = [{"role": "user", "content": "?"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def schema(**fields):
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def nested(levels):
    made = {"type": "integer"}
    for _ in range(levels):
        made = schema(a=made)
    return made


def refused(raw):
    try:
        check_values(raw)
    except ApiError as error:
        assert error.status == 400 and "the body has more than" in error.message
        return True
    return False


def test_bodies_of_many_values():
    """Exactly at the limits, whatever stands in texts; a text may be cut off or end in a backslash."""
    assert not refused(b"[" + b"0," * COMMAS + b"0]") and refused(b"[" + b"0," * (COMMAS + 1) + b"0]")
    assert not refused(b"[" * NESTED) and refused(b"[" * (NESTED + 1))
    assert not refused(b'{"a":' * NESTED) and refused(b'{"a":' * (NESTED + 1))
    text = json.dumps({"prompt": 'f(a, b)[{"\\' * 300_000}).encode()
    assert not refused(text) and not refused(text[:-2]) and not refused(text[: len(text) // 2])
    assert refused(b'{"a": "' + b'\\"' * 400_000 + b'"' + b",[" * COMMAS)
    assert refused(b'"a",' * (COMMAS + 1))


def test_such_a_body_is_not_read_as_json(running, monkeypatch):
    read = []
    monkeypatch.setattr(json_body, "COMMAS", 1000)
    monkeypatch.setattr(app, "parse_json", lambda raw: read.append(len(raw)))
    with pytest.raises(openai.BadRequestError, match=r"the body has more than 1,000 values"):
        running.client().completions.create(model=NAME, prompt=[[5] * 2000])
    assert read == []


@pytest.mark.parametrize(
    ("given", "words"),
    (
        ({"tools": [TOOL] * 100_000}, "tools: takes at most 128 items"),
        ({"tools": [{}] * 100_000}, r"tools\[0\].type: is missing"),
        ({"messages": [{}] * 50_000}, r"messages\[0\].role: is missing"),
        ({"logit_bias": {str(n): "x" for n in range(100_000)}}, "logit_bias.*: must be a number"),
        ({f"f{n}": 1 for n in range(100_000)}, "f0: is not supported"),
    ),
)
def test_one_wrong_value_ends_the_reading(given, words, monkeypatch):
    """Of very many wrong values few make an error each: pydantic takes 20 us for one."""
    seen = []
    real = models._refusal
    monkeypatch.setattr(models, "_refusal", lambda errors, *more: (seen.append(len(errors)), real(errors, *more))[1])
    with pytest.raises(ApiError, match=words):
        chat({"model": NAME, "messages": SAID, **given}, 10)
    assert seen[0] < 4


def doubling(levels):
    defs = {
        f"d{n}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, schema(**{f"k{n}{j}": {}})]} for j in range(3)]}
        for n in range(levels)
    }
    return {**schema(a={"$ref": "#/$defs/d0"}), "$defs": {**defs, f"d{levels}": {"type": "integer"}}}


LARGE = {
    "levels": nested(60),
    "levels beyond Python's own": nested(3000),
    "fields": schema(**{f"p{n}": {"type": "string"} for n in range(schema_limits.FIELDS + 1)}),
    "values": schema(a={"enum": [*range(schema_limits.VALUES + 1)]}),
    "text": schema(a={"const": "x" * (64 << 10)}),
    "choices": schema(a={"allOf": [{"anyOf": [schema(**{f"k{i}{j}": {}}) for j in range(3)]} for i in range(12)]}),
    "doubling": doubling(12),
    "repeats": schema(a={"type": "string", "pattern": "^(a{1000}){1000}$"}),
    "a count of 5,000 digits": schema(a={"type": "string", "pattern": "a{" + "1" * 5000 + "}"}),
    "repeats in a name": {"type": "object", "patternProperties": {"^(a{1000}){1000}$": {}}},
    "a pattern": schema(a={"type": "string", "pattern": "a?" * 300}),
    "a number": schema(a={"type": "integer", "maximum": 10**300}),
    "a reference": schema(a={"$ref": "http://127.0.0.1/"}),
    "a multiple": schema(a={"type": "integer", "multipleOf": 999_999_937}),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_schemas_reach_no_grammar(name, running, monkeypatch):
    made = []
    monkeypatch.setattr(Grammars, "_check", lambda *given: made.append("grammar"))
    grammars = running.server._grammars
    for call in (grammars.of_schema, lambda given: grammars.of_calls({"f": given}, lambda: "start: x")):
        with pytest.raises(ApiError, match="this schema cannot be kept to: it has") as caught:
            call(LARGE[name])
        assert caught.value.status == 400 and len(caught.value.message) < 200
    with pytest.raises(ApiError) as answers:
        grammars.of_calls({}, lambda: "start: x", LARGE[name], "text.format")
    assert answers.value.param == "text.format"
    assert made == []
    assert check_schemas("tools", [nested(20), doubling(2), schema(description={"type": "string"})]) is None
    half = {f"p{n}": {"type": "string"} for n in range(schema_limits.FIELDS // 2 + 1)}
    with pytest.raises(ApiError):
        check_schemas("tools", [schema(**half), schema(**half)])  # together


UUID = "^([0-9a-f]{8}-[0-9a-f]{4}-[1-8][0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}|0{8}-0{4}-0{4}-0{4}-0{12})$"


def test_what_schemas_of_libraries_hold_is_kept_to(running):
    """Zod writes bounds of whole numbers and patterns of identifiers; only counts inside counts multiply."""
    pytest.importorskip("llguidance")
    whole = {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1}
    given = schema(**{f"id{n}": {"type": "string", "pattern": UUID} for n in range(8)}, n=whole)
    assert running.server._grammars.of_schema(given)().allowed(4096).any()
    assert [schema_limits._written(one) for one in ("(ab{3}){2}", "a{2,}b{,3}", r"\{9\}[{9}]", "(a{9}){9}")] == [
        8,
        5,
        4,
        81,
    ]


def test_a_grammar_that_fails_ends_no_answer(running):
    """Where a limit stops it within an answer, half of the JSON is not taken for all of it."""
    pytest.importorskip("llguidance")
    mask = running.server._grammars.of_schema(schema(a={"enum": ["x"]}))()
    assert not mask.is_done
    mask.take(int(mask.allowed(64).logical_not().nonzero()[-1]))  # as if a limit had: the grammar is in error
    for ask in (lambda: mask.is_done, lambda: mask.allowed(64)):
        with pytest.raises(ApiError, match="cannot be kept to"):
            ask()


def test_values_inside_a_text():
    """Arguments of an earlier call are JSON in a text, where the body's values were not counted."""
    with pytest.raises(ApiError, match="the body has more than"):
        toolbox.as_object('{"a": [' + "[]," * NESTED + "0]}")
    assert toolbox.as_object('{"a": [[]]}') == {"a": [[]]}


def test_what_is_left_has_limits(running, monkeypatch):
    """A schema within these sizes is refused where llguidance's own limits stop its grammar; others are answered."""
    pytest.importorskip("llguidance")

    def ask():
        tool = {"type": "function", "function": {"name": "f", "parameters": schema(a={"enum": ["x"]})}}
        more = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 100}
        return running.client().chat.completions.create(model=NAME, messages=SAID, **more)

    assert ask().choices[0].message.tool_calls[0].function.arguments == '{"a": "x"}'
    monkeypatch.setattr(grammar, "FUEL", {**schema_limits.FUEL, "max_grammar_size": 5})
    with pytest.raises(openai.BadRequestError, match=r"tools: this schema cannot be kept to: .*too"):
        ask()
    assert running.client().completions.create(model=NAME, prompt="The", max_tokens=2).choices
