"""A model's own sampling defaults: which values apply, in the server's interfaces and in commands."""

from types import SimpleNamespace

import pytest

from moepack.pack.errors import InputError
from moepack.server.http import parse
from moepack.server.options import DEFAULTS, Sampling
from moepack.server.own_sampling import SamplingFlags, defaults_of, described, own_sampling
from moepack.server.translated.messages import messages
from moepack.server.translated.responses import responses

FILE = SimpleNamespace(temperature=0.6, top_k=20, top_p=0.95, min_p=None, repetition_penalty=1.1, do_sample=True)
OWN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition": 1.1}
SAID = [{"role": "user", "content": "x"}]


def test_what_the_file_names():
    assert own_sampling(FILE) == OWN and own_sampling(None) == own_sampling(SimpleNamespace()) == {}
    top = own_sampling(SimpleNamespace(top_k=20.0))["top_k"]  # as some programs write whole numbers
    assert top == 20 and type(top) is int
    shown = "temperature 0.6, top_p 0.95, top_k 20, repetition_penalty 1.1"
    assert described(OWN) == f"sampling by generation_config.json: {shown}" and described({}) == ""


@pytest.mark.parametrize(
    "given", ({"temperature": -1}, {"top_p": 1.5}, {"top_k": 2.5}, {"min_p": "x"}, {"repetition_penalty": True})
)
def test_a_wrong_value_is_named(given):
    with pytest.raises(InputError, match=rf"generation_config\.json: {next(iter(given))} must be a"):
        own_sampling(SimpleNamespace(**given))


@pytest.mark.parametrize(
    ("parsed", "least"),
    (
        (parse.chat, {"messages": SAID}),
        (parse.completion, {"prompt": "x"}),
        (responses, {"input": "x"}),
        (messages, {"messages": SAID, "max_tokens": 1}),
    ),
)
def test_a_request_without_values_has_the_models(parsed, least):
    asked = {"model": "m", **least}
    assert parsed(asked, 10, defaults_of(OWN)).sampling == Sampling(**OWN)
    assert parsed(asked, 10).sampling == parsed(asked, 10, defaults_of({})).sampling == DEFAULTS
    given = parsed({**asked, "temperature": 0, "top_k": 0, "top_p": 1}, 10, defaults_of(OWN)).sampling
    assert (given.temperature, given.top_k, given.top_p, given.repetition) == (0, 0, 1, 1.1)


def test_flags_go_before_the_file():
    flags = SamplingFlags(0.7, top_k=5, seed=3)
    own = flags.own(FILE)
    assert own == {name: value for name, value in OWN.items() if name != "top_k"}
    assert flags.over(own) == Sampling(**{**OWN, "top_k": 5}, seed=3)
    without = SamplingFlags(0.7, generation_config="none")
    assert without.own(FILE) == {} and without.over({}) == Sampling(temperature=0.7, seed=0)
    with pytest.raises(InputError, match="generation_config x is unknown"):
        SamplingFlags(0.7, generation_config="x")
