"""Every form of calls: what is read from an answer, however its pieces come, is what its grammar holds an answer to."""

import json
import time
from itertools import product

import pytest
from server_fixtures import NAME

from moepack.server.batching.jobs import JobEvent
from moepack.server.batching.tokens import Tokens
from moepack.server.errors import ApiError
from moepack.server.http import parse
from moepack.server.http.said import Said
from moepack.server.http.templates import manners_of
from moepack.server.tools import forms
from moepack.server.tools.calls import Marked
from moepack.server.tools.delimited import HERMES, KIMI
from moepack.server.tools.forms import Manners
from moepack.server.tools.parts import JsonEnd, Tools
from moepack.server.tools.tagged import DEEPSEEK_V4, DEEPSEEK_V32, GLM, QWEN_CODER

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer"},
        "kind": {"enum": ["sun", "rain"]},
        "note": {"type": ["string", "null"], "maxLength": 3},
        "else": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"weather": WEATHER, "time": {"type": "object", "properties": {}, "additionalProperties": False}}
GIVEN = '{"city": "Köln", "days": 3}'
DS = "<\uff5ctool▁{}\uff5c>".format
OPENS, CLOSES = DS("calls▁begin") + DS("call▁begin"), DS("call▁end") + DS("calls▁end")
MARK = "\uff5cDSML\uff5c"
DSML = (
    'Sure.\n\n<#SECTION>\n<#invoke name="weather">\n<#parameter name="city" string="true">Köln</#parameter>\n'
    '<#parameter name="days" string="false">3</#parameter>\n</#invoke>\n<#invoke name="time">\n\n</#invoke>\n'
    "</#SECTION>"
).replace("#", MARK)
# A text, then two calls, as the models' own templates write earlier answers; gpt-oss has one call, after reasoning.
ANSWERS = {
    "hermes": f'Sure.\n<tool_call>\n{{"name": "weather", "arguments": {GIVEN}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    "deepseek-v3.2": DSML.replace("SECTION", "function_calls"),
    "deepseek-v4": DSML.replace("SECTION", "tool_calls"),
    "deepseek-v3": f"Sure.{OPENS}function{DS('sep')}weather\n```json\n{GIVEN}\n```{DS('call▁end')}\n"
    f"{DS('call▁begin')}function{DS('sep')}time\n```json\n{{}}\n```{CLOSES}",
    "deepseek-v3.1": f"Sure.{OPENS}weather{DS('sep')}{GIVEN}{DS('call▁end')}"
    f"{DS('call▁begin')}time{DS('sep')}{{}}{CLOSES}",
    "kimi": f"Sure.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:3<|tool_call_argument_begin|>"
    f"{GIVEN}<|tool_call_end|><|tool_call_begin|>functions.time:4<|tool_call_argument_begin|>"
    "{}<|tool_call_end|><|tool_calls_section_end|>",
    "glm": "Sure.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln</arg_value>\n<arg_key>days</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>\n<tool_call>time\n</tool_call>",
    "qwen3-coder": "Sure.\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=time>\n</function>\n</tool_call>",
    "gpt-oss": "<|channel|>analysis<|message|>Sure.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    f"<|constrain|>json<|message|>{GIVEN}<|call|>",
}


def named(form):
    return form.name


def manners(form):
    return Manners(f"{form.sign} {' '.join(form.marks)}", {}, ())


def read(reader, text, size=1, unfinished=False):
    """Kinds and texts of an answer's parts, each kind together, from pieces of `size` characters."""
    pieces = [text[n : n + size] for n in range(0, len(text), size)]
    parts = [part for piece in pieces for part in reader.push(piece)] + reader.end(unfinished)
    out = []
    for part in parts:
        assert part.text
        joins = out and out[-1][0] == part.kind != "call"
        out[-1:] = [(part.kind, out[-1][1] + part.text)] if joins else [*out[-1:], (part.kind, part.text)]
    return out


def test_every_form_has_an_answer():
    assert {form.name for form in forms.FORMS} == {*ANSWERS}


@pytest.mark.parametrize("form", forms.FORMS, ids=named)
def test_reading(form):
    mine, text = manners(form), ANSWERS[form.name]
    assert mine.form is form
    first, *calls = read(mine.reader(Tools(FUNCTIONS), ""), text)
    assert first == ("reasoning" if form.name == "gpt-oss" else "content", "Sure.")
    assert calls[:2] == [("call", "weather"), ("arguments", GIVEN)]
    assert calls[2:] == ([] if form.name == "gpt-oss" else [("call", "time"), ("arguments", "{}")])
    for size in (2, 7, len(text)):
        assert read(mine.reader(Tools(FUNCTIONS), ""), text, size) == [first, *calls]
    for at in range(len(text)):  # a cut answer has the calls that it began, and none of their markup
        cut = read(mine.reader(Tools(FUNCTIONS), ""), text[:at], 5, unfinished=True)
        named = [part for part in cut if part[0] == "call"]
        assert named == [part for part in calls if part[0] == "call"][: len(named)]
        assert all("Sure.".startswith(part[1]) for part in cut if part[0] in ("content", "reasoning")), text[:at]


def test_odd_schemas_of_arguments(running):
    """Any value is allowed by `true`; what is no schema is refused, and does not end in the grammar's own text."""
    pytest.importorskip("llguidance")
    mine = manners(QWEN_CODER)

    def made(given):
        functions = {"f": {"type": "object", "properties": {"a": given}}}
        return running.server._grammars.of_calls(functions, lambda: mine.grammar(Tools(functions, required=True), ""))

    assert made(True)().allowed(64).any() and made({"type": "string", "enum": None})().allowed(64).any()
    for wrong in ({"enum": 5}, {"type": "string", "minLength": "0}x"}, {"type": "string", "maxLength": 10**12}):
        with pytest.raises(ApiError, match="cannot be kept to"):
            made(wrong)


@pytest.mark.parametrize("added", ("none", "added", "special"))
@pytest.mark.parametrize("form", forms.FORMS, ids=named)
def test_grammars(form, added, demo_model):
    """Whether marks are texts, added tokens or special ones: calls pass, and another name, type or key does not."""
    llguidance = pytest.importorskip("llguidance")
    from llguidance.hf import from_tokenizer
    from tokenizers import AddedToken
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    if added != "none":
        tokenizer.add_tokens([AddedToken(mark, special=added == "special") for mark in form.marks])
    tokenizer.chat_template = f"{form.sign} {' '.join(form.marks)}"
    mine = manners_of(Tokens(tokenizer))
    assert mine.shows_special is (added == "special")
    made = from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[0])

    def passes(tools, text, schema=None):
        matcher = llguidance.LLMatcher(made, mine.grammar(tools, "", schema), log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())

    whole = ANSWERS[form.name]
    calls = whole.removeprefix("Sure.").lstrip()
    must, strict = Tools(FUNCTIONS, required=True), Tools(FUNCTIONS, strict=True)
    assert passes(must, calls) and passes(strict, whole)
    thought = "<|channel|>final<|message|>" if form.name == "gpt-oss" else ""
    for said, right in ((calls, True), (thought + '{"n": 1}', True), (thought + '{"n": 2}', False), (whole, thought)):
        assert passes(strict, said, {"type": "object", "enum": [{"n": 1}]}) is bool(right), said
    wrong = [("weather", "whether"), ("3", "three"), ("days", "hours"), ("Köln", "Kölnisches")]
    if form in (DEEPSEEK_V32, DEEPSEEK_V4):
        wrong += [('"false"', '"true"'), ('"true"', '"false"'), ("Köln</", "Köln"), ("\n\n</", "\n\n\n</")]
        assert passes(must, calls.replace("\n\n</", "\n</"))
        for key, says, value in product(("note", "else"), ("true", "false"), ("ab", "null", "toolong", "5")):
            more = f'\n<{MARK}parameter name="{key}" string="{says}">{value}</{MARK}parameter>\n</{MARK}invoke>\n<'
            goes = says == "false" if value == "null" else says == "true" and len(value) < 4
            assert passes(must, calls.replace(f"\n</{MARK}invoke>\n<", more, 1)) is goes, (key, says, value)
    for old, new in wrong:
        assert not passes(must, calls.replace(old, new)) and not passes(strict, whole.replace(old, new)), new
    said = "<|channel|>final<|message|>Hello" if form.name == "gpt-oss" else "Hello"
    assert not passes(must, said) and passes(strict, said)
    if form.name != "gpt-oss":
        assert not passes(Tools(FUNCTIONS, required=True, several=False), calls)
        assert not passes(must, whole)


@pytest.mark.parametrize("form", forms.FORMS[1:], ids=named)
def test_text_behind_a_call_without_its_end_is_content(form):
    """The call's own end, but for the mark that a model left out, is none."""
    mine, whole = manners(form), ANSWERS[form.name]
    assert isinstance(form, Marked)
    first = whole[: whole.index(form.close)]
    wanted = [("content", "Sure."), ("call", "weather"), ("arguments", GIVEN)]
    for size in (1, 7, 1000):
        assert read(mine.reader(Tools(FUNCTIONS), ""), first, size) == wanted
        said = read(mine.reader(Tools(FUNCTIONS), ""), first + "\n<b> 1 of {2}.\n", size)
        assert said == [*wanted, ("content", "<b> 1 of {2}.\n")]
    if form is HERMES:
        two = first + "And then\n" + ANSWERS["hermes"].removeprefix("Sure.\n")
        assert read(mine.reader(Tools(FUNCTIONS), ""), two, 3)[3:6] == [("content", "And then"), *wanted[1:]]
        assert read(mine.reader(Tools(FUNCTIONS), ""), first[:-12], 3)[:2] == wanted[:2]  # cut inside the arguments


def test_thinking():
    template = '<tool_call> {"enable_thinking"} </think>'
    mine = Manners(template, {}, ())
    call = ANSWERS["hermes"].removeprefix("Sure.\n")
    wanted = [("reasoning", "Hm, <tool"), ("content", "Sure."), ("call", "weather"), ("arguments", GIVEN)]
    for prompt, text in (("<think>\n", "\nHm, <tool\n</think>\n\nSure.\n"), ("", "<think>Hm, <tool</think>Sure.")):
        for size in (1, 3, 500):
            assert read(mine.reader(Tools(FUNCTIONS), prompt), text + call, size)[:4] == wanted
    assert read(mine.reader(Tools(), "<think>"), "Hm, it goes on") == [("reasoning", "Hm, it goes on")]
    assert read(mine.reader(Tools(), "<think>"), "Hm.</thi", unfinished=True) == [("reasoning", "Hm.")]
    assert read(mine.reader(Tools(), ""), "<thi", unfinished=True) == []
    marked = '{"text": "<tool_call>{}</tool_call>"}'
    assert read(mine.reader(Tools(FUNCTIONS), "", is_json=True), marked) == [("content", marked)]
    assert read(mine.reader(Tools(FUNCTIONS), "", is_json=True), call) == wanted[2:] + read(HERMES.reader({}), call)[2:]
    assert read(mine.reader(Tools(), ""), " <thin") == [("content", " <thin")]
    assert read(mine.reader(Tools(), ""), "a </think> b") == [("content", "a </think> b")]
    assert "lazy" in mine.grammar(Tools(FUNCTIONS, required=True), "<think>")


def test_what_is_no_call_stays_text():
    for text in (
        "<tool_call>\nno JSON\n</tool_call> and more",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"arguments": {"n": 1e999}, "name": "weather"}</tool_call>',
        "<tool_call>",
        "a <too",
    ):
        assert read(HERMES.reader(FUNCTIONS), text) == [("content", text)]
    other = '<tool_call>{"arguments": {"city": "x"}, "name": "weather"}</tool_call>'
    assert read(HERMES.reader(FUNCTIONS), other) == [("call", "weather"), ("arguments", '{"city": "x"}')]
    without = '<tool_call>{"name": "time"}</tool_call>'
    assert read(HERMES.reader(FUNCTIONS), without) == [("call", "time"), ("arguments", "{}")]
    assert read(forms.HARMONY.reader({}), "no channel") == [("content", "no channel")]
    assert read(manners(HERMES).reader(Tools(), ""), "<tool_call>x") == [("content", "<tool_call>x")]


def test_a_model_s_own_identities_are_kept():
    """Kimi's template writes them into the next prompt, where the model has read no others."""
    said = Said(KIMI.reader(FUNCTIONS))
    said.hear(JobEvent(text=ANSWERS["kimi"], finish="stop", generated=9))
    assert [item.call for item in said.calls] == ["functions.weather:3", "functions.time:4"]
    said = Said(KIMI.reader(FUNCTIONS))
    twice = ANSWERS["kimi"].replace("functions.time:4", "functions.weather:3")
    said.hear(JobEvent(text=twice, finish="stop", generated=9))
    first, second = (item.call for item in said.calls)
    assert first == "functions.weather:3" and second.startswith("call_")
    without = read(KIMI.reader(FUNCTIONS), "<|tool_call_begin|> time <|tool_call_argument_begin|> {}<|tool_call_end|>")
    assert without == [("call", "time"), ("arguments", "{}")]


def test_values_by_their_schema():
    """A string that looks like a number stays one; without a schema a value is JSON if it can be."""
    or_null = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    schema = {
        "properties": {
            "zip": {"type": "string"}, "n": {"type": "number"}, "list": {"type": "array"}, "any": True,
            "plz": or_null, "none": or_null, "either": {"type": ["string", "integer"]},
        }
    }  # fmt: skip
    given = {"zip": "00123", "n": "1.5", "list": '["a", {"b": 1}]', "free": "true", "text": '<b>&\n"', "odd": "NaN"}
    given |= {"any": "1", "plz": "50667", "none": "null", "either": "3", "far": "1e999"}
    pairs = "".join(f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in given.items())
    twice = pairs + "<arg_key>zip</arg_key><arg_value>9</arg_value>"
    out = dict(read(GLM.reader({"f": schema}), f"<tool_call>f{twice}</tool_call>"))
    wanted = {"zip": "00123", "n": 1.5, "list": ["a", {"b": 1}], "free": True, "text": '<b>&\n"', "odd": "NaN"}
    wanted |= {"any": 1, "plz": "50667", "none": None, "either": 3, "far": "1e999"}
    assert json.loads(out["arguments"]) == wanted


def test_a_tag_says_whether_its_value_is_text():
    """DeepSeek's tags do, and are believed before the schema; without it the schema decides."""

    def parameter(key, says, value):
        return f'<#parameter name="{key}"{says}>{value}</#parameter>\n'

    def parts(text):
        return read(DEEPSEEK_V4.reader({"f": schema}), text.replace("#", MARK), 3)

    schema = {"properties": {"zip": {"type": "string"}, "n": {"type": "integer"}}}
    true, false = ' string="true"', ' string="false"'
    body = parameter("zip", "", "01") + parameter("n", true, "2") + parameter("m", false, '{"a": [1]}')
    body += parameter("odd", false, "no JSON") + parameter("raw", true, '"q" </parameter>\n<tool_calls>&amp;')
    body += parameter("n", false, "5") + parameter("far", false, "1e999") + parameter("none", false, "null")
    wanted = {"zip": "01", "n": "2", "m": {"a": [1]}, "odd": "no JSON", "raw": '"q" </parameter>\n<tool_calls>&amp;'}
    call = f'<#invoke name="f">\n{body}'
    for end in ("</#invoke></#tool_calls>Bye", "</#invoke>\n\n</#tool_calls>Bye", "</#tool_calls>Bye"):
        name, arguments, said = parts(f"<#tool_calls>{call}{end}")
        assert (name, said) == (("call", "f"), ("content", "Bye"))
        assert json.loads(arguments[1]) == {**wanted, "far": "1e999", "none": None}
    assert parts(f"{call}</#invoke>Bye")[0] == ("call", "f")  # without the section's mark
    for text in ("a <#tool_calls", "<#function_calls>", "<#invoke f>no</#invoke>", "</#tool_calls>"):
        assert parts(text) == [("content", text.replace("#", MARK))]
    for form, block in ((DEEPSEEK_V32, "function_calls"), (DEEPSEEK_V4, "tool_calls")):
        written = f'{{%- set dsml = "{MARK}" -%}}<{{{{ dsml }}}}{block}>{{{{ message.tool_calls }}}}'  # as in templates
        assert Manners(written, {}, ()).form is form


def test_a_long_argument_is_read_once():
    """Not again with every piece: 40,000 letters in pieces of two took 12 seconds."""
    reader, body = QWEN_CODER.reader({"f": {"properties": {"text": {"type": "string"}}}}), "a\n" * 20_000
    began = time.process_time()
    text = f"<tool_call>\n<function=f>\n<parameter=text>\n{body}z\n</parameter>\n</function>\n</tool_call>"
    assert json.loads(dict(read(reader, text, 2))["arguments"]) == {"text": body + "z"}
    assert time.process_time() - began < 8


def test_json_behind_reasoning(running, monkeypatch):
    """A schema of the answer leaves reasoning free, and is not taken for it where the prompt has opened it."""
    pytest.importorskip("llguidance")
    shape = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "enum": [{"n": 1}]}}}
    given = {"model": NAME, "messages": [{"role": "user", "content": "?"}], "response_format": shape}
    ids = running.server.tokens.encode
    monkeypatch.setattr(forms, "_opened", lambda prompt: True)
    harmony = manners(forms.HARMONY)
    for mine, text, wanted in (
        (Manners("</think>", {}, ()), 'Hm, {"n": 2}.</think>\n\n{"n": 1}', [("reasoning", 'Hm, {"n": 2}.')]),
        (harmony, '<|channel|>final<|message|>{"n": 1}', []),
        (harmony, "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>"
         '{"n": 1}', [("reasoning", "Hm.")]),
    ):  # fmt: skip
        monkeypatch.setattr(running.server._template, "manners", mine)
        made = running.server._prepare_chat(parse.chat(given, 10))
        mask = made.grammar()
        for token in ids(text, False, ""):
            assert not mask.is_done and mask.allowed(token + 1)[token]
            mask.take(token)
        assert mask.is_done and read(made.reader(), text, 3) == [*wanted, ("content", '{"n": 1}')]


def test_the_end_of_json():
    text = '{"a": "}\\"]{", "b": [{"c": "\\\\"}]}'
    for size in range(1, 6):
        scan = JsonEnd()
        pieces = [text[n : n + size] for n in range(0, len(text), size)]
        found = [scan.find(piece) for piece in pieces]
        assert found[:-1] == [None] * (len(pieces) - 1) and found[-1] == len(pieces[-1])
    assert JsonEnd().find(text + "} more") == len(text)
