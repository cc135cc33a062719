"""What an answer may call, and earlier calls of a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError

from moepack.server.errors import ApiError, bad
from moepack.server.tools.parts import Tools

from .json_body import check_values, parse_json
from .models import Body, Flag, Object, OpenBody, Text, wrong

MOST_TOOLS = 128
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
Listed = list[Object]  # functions in the shape that templates read
Choice = Literal["auto", "none", "required"]


def _of_object(given: Object) -> Object:
    """Complete the schema of a function's arguments. Its fields keep their order, which templates show."""
    schema = {"type": "object", **{name: value for name, value in given.items() if value is not None}}
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if schema["type"] != "object":
        raise wrong("must be the schema of an object")
    if not isinstance(properties, dict) or not all(isinstance(one, dict | bool) for one in properties.values()):
        raise wrong("must be an object of schemas", "properties")
    if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
        raise wrong("must be a list of names", "required")
    return schema


def as_object(arguments: object) -> Object:
    """Read a call's arguments, which clients send as JSON or as an object. Raises ApiError or ValueError."""
    if isinstance(arguments, str):
        raw = (arguments or "{}").encode(errors="replace")
        check_values(raw)  # which were not counted inside a text of the body
        try:
            arguments = parse_json(raw)
        except ApiError:
            raise wrong("must be a JSON object") from None
    if not isinstance(arguments, dict):
        raise wrong("must be a JSON object")
    return arguments


def _earlier(arguments: object) -> Object:
    """Read an earlier call's arguments. A text that is no JSON object becomes the field `INVALID_JSON` of one.

    Clients send back a call that `max_tokens` cut, with its error, and the model has to see both.
    """
    try:
        return as_object(arguments)
    except PydanticCustomError:
        if isinstance(arguments, str):
            return {"INVALID_JSON": arguments}
        raise


Parameters = Annotated[Object, AfterValidator(_of_object)]
Arguments = Annotated[Object, BeforeValidator(_earlier, json_schema_input_type=Text | Object)]


class Function(Body):
    """A function as OpenAI's interfaces say it."""

    name: Annotated[Text, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: Text | None = None
    strict: Flag = False
    cache_control: Object | None = None  # of Anthropic's clients: it changes no answer
    parameters: Parameters | None = None  # other interfaces have another name for it

    @property
    def listed(self) -> Object:
        """The function as templates read it."""
        described: Object = {} if self.description is None else {"description": self.description}
        parameters = NO_ARGUMENTS if self.parameters is None else self.parameters
        return {"type": "function", "function": {"name": self.name, **described, "parameters": parameters}}


class Tool(OpenBody):
    """A tool of a chat completion."""

    type: Literal["function"]
    function: Function


class OfName(OpenBody):
    """A function's name."""

    name: Text


class ChosenTool(OpenBody):
    """The one function that must be called."""

    type: Literal["function"]
    function: OfName


class CalledFunction(OpenBody):
    """A function with arguments."""

    name: Text
    arguments: Arguments = Field(default_factory=dict)


class EarlierCall(OpenBody):
    """A call in an earlier answer."""

    id: Text = ""
    function: CalledFunction

    def said(self) -> Object:
        """The call as templates read it."""
        return said_call(self.id, self.function.name, self.function.arguments)


def said_call(call: str, name: str, arguments: Object | str) -> Object:
    """A call as clients read it, with its arguments as JSON; or as templates do, which need them as an object."""
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def chosen(given: Sequence[Function], choice: str | None, named: str | None, several: bool) -> tuple[Listed, Tools]:
    """Return the functions for the template, and what an answer may call.

    Args:
        given: all functions.
        choice: "auto", "none" or "required"; None is "auto".
        named: the one function that must be called.
        several: whether an answer may have several calls.
    """
    listed = [one.listed for one in given]
    functions = {one["function"]["name"]: one["function"]["parameters"] for one in listed}
    if len(functions) < len(listed):
        raise bad("tools", "two have the same name")
    if choice == "none":
        return [], Tools()
    if choice == "required" and not functions:
        raise bad("tool_choice", "needs tools")
    if named is not None:
        if named not in functions:
            raise bad("tool_choice", f"no tool is called {named[:128]!r}")
        functions = {named: functions[named]}
    return listed, Tools(functions, choice == "required", several and named is None, any(one.strict for one in given))
