"""instructor's modes over chats, Responses and Messages: an object by a tool, by a schema, in parts, several, usage."""

from collections.abc import Iterable

import anthropic
import instructor
import openai
from agent_cases import ASKED, MODEL, URL, V1, Report, each, raises
from cases import case
from instructor import Mode

ours = openai.OpenAI(base_url=V1, api_key="none", max_retries=0, timeout=300)
theirs = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=300)
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)
GIVEN = {"model": MODEL, "messages": [{"role": "user", "content": ASKED}], "max_retries": 1}


def client(mode):
    if mode.name.startswith("ANTHROPIC"):
        return instructor.from_anthropic(theirs, mode=mode)
    return instructor.from_openai(ours, mode=mode)


def limited(mode):
    return {"max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens": 100, **GIVEN}


@each(**{mode.name.lower(): mode for mode in (*MODES, Mode.ANTHROPIC_TOOLS)})
def form(mode: Mode) -> None:
    assert isinstance(client(mode).create(response_model=Report, **limited(mode)), Report)


@each(**{mode.name.lower(): mode for mode in (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.ANTHROPIC_TOOLS)})
def form_in_parts(mode: Mode) -> None:
    *_, last = client(mode).create_partial(response_model=Report, **limited(mode))
    assert last.city in ("San Francisco", "Rome") and 1 <= last.days <= 14, last


@each(**{mode.name.lower(): mode for mode in (Mode.TOOLS, Mode.ANTHROPIC_TOOLS)})
def usage(mode: Mode) -> None:
    _, raw = client(mode).create_with_completion(response_model=Report, **limited(mode))
    counted = raw.usage
    assert (counted.completion_tokens if mode is Mode.TOOLS else counted.output_tokens) > 0, counted


@case
def several() -> None:
    found = client(Mode.PARALLEL_TOOLS).create(response_model=Iterable[Report], **limited(Mode.PARALLEL_TOOLS))
    assert all(isinstance(one, Report) for one in found)


@case
def errors() -> None:
    given = {**limited(Mode.TOOLS), "model": "another"}
    raises(Exception, lambda: client(Mode.TOOLS).create(response_model=Report, **given), "404", "another")
