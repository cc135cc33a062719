"""Logits that are not finite: what every interface says, and that requests which do not reach the cause are answered.

An expert of the demo model becomes NaN in memory, as if a version of it had been made so elsewhere.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import urllib.error
from typing import NamedTuple

import numpy as np
import pytest
import torch
from live_models import hurt_expert, hurt_when_loaded
from server_fixtures import NAME, post
from support import cli

import moepack
from moepack.generation import Session
from moepack.pack.errors import NotFiniteError
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.policies.reducers import GATES, RouterOutput
from moepack.runtime.step.counters import Counters
from moepack.server.batching.engine import Engine, StepInput
from moepack.server.batching.sampling import NEVER, NONE, Sampler, draw, likeliest_of, scored
from moepack.server.options import Sampling
from moepack.shared import opening

NAN, INF = float("nan"), float("inf")
LAYER = 1  # so that what a prompt's first token makes of it reaches the last one
LONG = 70  # tokens: a whole chunk of a prompt, and a rest


hurt = functools.partial(hurt_expert, layer=LAYER)


def chosen(model, tokens):
    """The experts of the layer that tokens reach."""
    found = set()
    take = lambda _, args: found.update(args[1].flatten().tolist())  # noqa: E731
    hook = model.model.layers[LAYER].mlp.experts.register_forward_pre_hook(take)
    with torch.inference_mode():
        model(input_ids=torch.tensor([tokens]))
    hook.remove()
    return found


class Cause(NamedTuple):
    """An expert, a prompt that reaches it, and one that does not, as little as its greedy answer does."""

    expert: int
    bad: list[int]
    good: list[int]


@pytest.fixture(scope="module")
def twin(bundle):
    """The model of the server `exact`, which no server runs."""
    model = moepack.load(bundle, policy="static:bf16", dtype=torch.float32)
    yield model
    model.moepack.close()


def cause_in(model):
    random = np.random.default_rng(0)
    bad, *prompts = (random.integers(1, 4000, 3).tolist() for _ in range(20))
    for good in prompts:
        answered = model.generate(torch.tensor([good]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        if more := chosen(model, bad) - chosen(model, answered[0].tolist()):
            return Cause(min(more), bad, good)
    raise AssertionError("every prompt reaches every expert")


@pytest.fixture(scope="module")
def cause(twin):
    return cause_in(twin)


ASKED = {"prompt": None, "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 4}
REQUESTS = {
    "of two answers": ("/v1/completions", {**ASKED, "n": 2, "temperature": 1.0, "seed": 1}),
    "log probabilities": ("/v1/completions", {**ASKED, "logprobs": 2}),
    "a scored prompt": ("/v1/completions", {**ASKED, "max_tokens": 0, "echo": True, "logprobs": 1}),
    "JSON": ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}),
    "a chat": ("/v1/chat/completions", CHAT),
    "a response": ("/v1/responses", {"input": "one", "max_output_tokens": 4}),
    "a message": ("/v1/messages", CHAT),
}


@pytest.mark.parametrize("stream", (False, True), ids=("whole", "streamed"))
@pytest.mark.parametrize("kind", REQUESTS)
def test_a_request_ends_with_an_error_that_says_so(kind, stream, exact, cause):
    """It was an empty answer with status 200, or "the model's answer could not be read". Health stays ok: a prompt that
    reaches a damaged expert is no reason to start the server anew."""
    path, body = REQUESTS[kind]
    body = {"model": NAME, **body, **({"stream": True} if stream else {})}
    if "prompt" in body:
        body["prompt"] = cause.bad
    totals = exact.server.scheduler.totals
    before = totals.not_finite, totals.failed
    with contextlib.ExitStack() as every:
        for expert in (cause.expert,) if "prompt" in body else range(16):
            every.enter_context(hurt(exact.model, expert))
        if stream:
            status, answer = 200, post(exact.url + path, body).decode()
            assert "error" in answer.strip().splitlines()[-1], "the last event"
        else:
            with pytest.raises(urllib.error.HTTPError) as error:
                post(exact.url + path, body)
            status, answer = error.value.code, error.value.read().decode()
    assert "logits that are NaN or infinite" in answer and status == (200 if stream else 500)
    exact.idle()
    health = json.loads(post(f"{exact.url}/health", None))
    assert health["status"] == "ok" and health["answers"]["not_finite"] == totals.not_finite
    assert totals.not_finite > before[0] and totals.failed - before[1] == totals.not_finite - before[0]
    if not stream:
        found = json.loads(answer)["error"]
        assert found["type"] in ("server_error", "api_error")
        assert found.get("code", "logits_not_finite") == "logits_not_finite"


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize("version", ("bf16", "w4", "w2"))
def test_others_of_a_pass_and_later_ones_are_as_they_were(version, dtype, bundle):
    """To the bit: beside a NaN, of weights or of scales, and in memory that a NaN has left."""
    model = moepack.load(bundle, policy=f"static:{version}", dtype=dtype)
    expert, bad, good = cause_in(model)
    engine = Engine(model, 256)

    def answered(*prompts):
        """The logits of a pass over the prompts, and of one of a token each."""
        slots = [engine.add(8) for _ in prompts]
        out = engine.run([StepInput(s, p) for s, p in zip(slots, prompts, strict=True)])
        more = engine.run([StepInput(s, [7]) for s in slots])
        for slot in slots:
            engine.remove(slot)
        return [torch.cat(pair) for pair in zip(out, more, strict=True)]

    fine, alone = answered(bad, good, bad), answered(good)
    with hurt(model, expert):
        got = answered(bad, good, bad)
        assert got[0][0].isnan().any() and got[2][0].isnan().any() and torch.equal(got[1], fine[1])
        assert torch.equal(answered(good)[0], alone[0])
    assert all(map(torch.equal, answered(bad, good, bad), fine))
    model.moepack.close()


def test_what_a_failed_prompt_left_is_not_kept(exact, twin):
    """Its keys and values were kept before its logits were looked at: a good version of the expert did not help."""
    random = np.random.default_rng(1)
    prompt = random.integers(1, 4000, LONG).tolist()
    body = {"model": NAME, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    url, engine = f"{exact.url}/v1/completions", exact.server.engine
    first = min(chosen(twin, prompt))
    exact.idle()
    before = engine.kept_tokens()  # of other prompts
    with hurt(exact.model, first), pytest.raises(urllib.error.HTTPError):
        post(url, body)
    exact.idle()
    assert engine.kept_tokens() == before
    answers = [json.loads(post(url, body))["choices"][0]["text"] for _ in range(2)]
    assert answers[0] == answers[1] and engine.kept_tokens() > before


@pytest.mark.parametrize("row", ([NAN, 1.0, 2.0], [INF, 1.0, 2.0], [-INF, -INF, -INF]))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_every_way_to_choose_refuses_a_row(row, dtype):
    """And none takes the numbers of another row; negative infinity may rule a token out."""
    logits = torch.tensor(row, dtype=dtype)
    device = torch.device("cpu")
    mask = torch.tensor([-INF, 1.0, 2.0], dtype=dtype)
    greedy = {"temperature": 0.0}
    changed = {**greedy, "bias": {0: -100.0}, "frequency": 1.0}
    for how in ({}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, greedy, {**greedy, "top_logprobs": 1}, changed):
        sampler = Sampler(Sampling(**how), [1], device)
        with pytest.raises(NotFiniteError, match=r"^the model gives logits that are NaN or infinite"):
            sampler.choose(logits)
        assert sampler.choose(mask).token in (1, 2)
    with pytest.raises(NotFiniteError):
        scored(logits, 1, 0)
    assert scored(mask, 0, 1).logprob == NEVER
    assert int(draw(logits, Sampling(), torch.Generator())) == NONE
    sampler = Sampler(Sampling(**greedy), [1], device)
    assert likeliest_of([sampler, sampler], [mask[None], logits[None]]) == [2, NONE]
    with pytest.raises(NotFiniteError):
        sampler.choose(logits, NONE)


def test_a_policys_sums_of_gates_stay_numbers():
    """One token's NaN would have stayed in the scores of its experts."""
    counters = Counters((3,), (GATES,), torch.device("cpu"))
    counters.mask = torch.tensor([1, 0])
    counters.add(0, RouterOutput(torch.tensor([[0, 1], [1, 2]]), torch.tensor([[0.5, NAN], [NAN, 0.5]])))
    counts, sums = counters.take()
    assert counts[0].tolist() == [1, 1, 0] and sums[GATES][0].tolist() == [0.5, 0.0, 0.0]
    assert counters.layer(0)[1][GATES].tolist() == [0.5, 0.0, 0.0]


def test_text_and_chats_end_with_it(bundle, cause):
    """A session that failed answers later, from none of what it has read."""
    with Session(bundle, LoadOptions(policy="static:bf16", dtype="float32")) as session:
        session.load(128, 64)
        told = []
        with hurt(session.model, cause.expert):
            assert session.go_on(cause.good, 4)
            with pytest.raises(NotFiniteError, match=f"^{re.escape(str(bundle))}: the model gives logits"):
                session.go_on(cause.bad, 4, tell=told.append)
        again = session.go_on(cause.bad, 4)
        session._cache = None
        assert not told and again and session.go_on(cause.bad, 4) == again


@pytest.mark.parametrize("how", ({}, {"do_sample": True}, {"num_beams": 2}, {"assistant_model": None}), ids=str)
def test_transformers_own_generate_raises(how, twin, cause):
    """It returned the token whose number a NaN's place is; assisted decoding looks at several positions at once."""
    given = {"max_new_tokens": 4, "pad_token_id": 0, **how}
    if "assistant_model" in how:
        given["assistant_model"] = twin
    with hurt(twin, cause.expert):
        with pytest.raises(NotFiniteError, match=r"^the model gives logits"):
            twin.generate(torch.tensor([cause.bad]), **given)
        twin.generate(torch.tensor([cause.good]), **given | {"do_sample": False, "num_beams": 1})


def test_eval_names_window_and_policy(bundle, evaluation, monkeypatch):
    """A perplexity of NaN was printed as a result."""
    hurt_when_loaded(monkeypatch, opening)
    code, out, err = cli(
        "eval", bundle, "--data", evaluation, "--samples", "2", "--length", "64", "--policy", "static:bf16"
    )
    assert code == 2 and not out.strip(), err
    assert re.search(r"evaluation.jsonl: window \d+, token \d+ has a likelihood of nan under policy static", err), err
