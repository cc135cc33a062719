"""What the stages of agent frameworks share: a question, a tool, an answer's form, and how errors are tried."""

import os
from functools import partial
from typing import Literal

from cases import MODEL, URL, case
from pydantic import BaseModel, ConfigDict, Field

os.environ |= {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}  # some clients look for one, whatever is given
ASKED = "What is the weather in San Francisco?"
SYSTEM, SHORT = "Always respond in exactly one word.", "Say hello."  # which the model was taught to answer in one word
V1 = f"{URL}/v1"
__all__ = ["ASKED", "MODEL", "SHORT", "SYSTEM", "URL", "V1", "Report", "each", "raises", "weather"]


class Report(BaseModel):
    """A form that a small model fills in few tokens: without other fields, of which it would make some."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["San Francisco", "Rome"]
    days: int = Field(ge=1, le=14)


def weather(city):
    """Get the current weather of a city.

    Args:
        city: where
    """
    return f"sunny in {city}"


def raises(error, ask, *words):
    """Check that asking raises an error of a class whose text has the words."""
    try:
        ask()
    except error as found:
        for word in words:
            assert word in str(found), str(found)
        return
    raise AssertionError(f"no {error.__name__}")


def each(**kinds):
    """Run a function as a case for each kind, by its name. A decorator that runs at once."""

    def run(function):
        for name, kind in kinds.items():
            case(partial(function, kind), f"{function.__name__} {name}")

    return run
