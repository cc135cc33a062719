"""Parse what an answer may call, and earlier calls of a conversation."""

from __future__ import annotations

import re
from typing import Any

from moepack.server.errors import ApiError, bad
from moepack.server.tools.parts import Tools

from .fields import Fields, check_values, parse_json

MOST_TOOLS = 128
NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
Listed = list[dict[str, Any]]  # functions in the shape that templates read


def take_tools(fields: Fields) -> tuple[Listed, Tools]:
    """Take the fields about tools, in the shape of chat completions. An ApiError names what is wrong."""
    given, choice = fields.take("tools"), fields.take("tool_choice")
    several = fields.flag("parallel_tool_calls", True)
    if not isinstance(given, list | None):
        raise bad("tools", "must be a list")
    few("tools", given or ())
    listed, strict = [], False
    for n, tool in enumerate(given or ()):
        function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"tools[{n}]", 'must be {"type": "function", "function": {"name": ...}}')
        inner = Fields(function, f"tools[{n}].function.")
        made, is_strict = take_function(inner, f"tools[{n}].function", "parameters")
        strict |= is_strict
        listed.append(made)
    named = None
    if isinstance(choice, dict):
        one = choice.get("function")
        named = one.get("name") if choice.get("type") == "function" and isinstance(one, dict) else None
        if not isinstance(named, str):
            raise bad("tool_choice", 'must be {"type": "function", "function": {"name": ...}}')
    elif choice not in (None, "auto", "none", "required"):
        raise bad("tool_choice", "must be auto, none, required or a function", "unsupported")
    return chosen(listed, choice if named is None else "required", named, several, strict)


def few(where: str, tools: Any) -> None:
    """Refuse too many tools before any is looked at."""
    if len(tools) > MOST_TOOLS:
        raise bad(where, f"takes at most {MOST_TOOLS} tools, not {len(tools):,}")


def take_function(fields: Fields, where: str, parameters: str) -> tuple[dict[str, Any], bool]:
    """Take a function's fields, with its schema in the field `parameters`; return it for templates, and `strict`."""
    name, description, strict = fields.text("name"), fields.text("description"), fields.flag("strict")
    schema = fields.record(parameters)
    fields.end()
    if name is None or not _NAME.fullmatch(name):
        raise bad(f"{where}.name", "must have 1 to 128 letters, digits, dots, dashes and underscores")
    given = NO_ARGUMENTS if schema is None else {key: one for key, one in schema.items() if one is not None}
    schema = {"type": "object", **given}
    if schema["type"] != "object":
        raise bad(f"{where}.{parameters}", "must be the schema of an object")
    inner, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(inner, dict) or not all(isinstance(one, dict | bool) for one in inner.values()):
        raise bad(f"{where}.{parameters}.properties", "must be an object of schemas")
    if not isinstance(needed, list) or not all(isinstance(one, str) for one in needed):
        raise bad(f"{where}.{parameters}.required", "must be a list of names")
    made = {"name": name, **({} if description is None else {"description": description}), "parameters": schema}
    return {"type": "function", "function": made}, strict


def chosen(listed: Listed, choice: str | None, named: str | None, several: bool, strict: bool) -> tuple[Listed, Tools]:
    """Return the functions for the template, and what an answer may call.

    Args:
        choice: "auto", "none" or "required"; None is "auto".
        named: the one function that must be called.
    """
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
    return listed, Tools(functions, choice == "required", several and named is None, strict)


def earlier_calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """Parse the tool calls of an earlier answer; templates need the arguments of calls as objects."""
    out = []
    for n, call in enumerate(calls if isinstance(calls, list) else [None]):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad(f"{where}[{n}]", "must be a call of a function")
        arguments = as_object(f"{where}[{n}].function.arguments", function.get("arguments", "{}"))
        made = {"name": function["name"], "arguments": arguments}
        out.append({"id": str(call.get("id", "")), "type": "function", "function": made})
    return out


def as_object(where: str, arguments: Any) -> dict[str, Any]:
    """Read a call's arguments, which clients send as JSON or as an object."""
    if isinstance(arguments, str):
        raw = (arguments or "{}").encode(errors="replace")
        check_values(raw)  # which were not counted inside a text of the body
        try:
            arguments = parse_json(raw)
        except ApiError:
            raise bad(where, "must be a JSON object") from None
    if not isinstance(arguments, dict):
        raise bad(where, "must be a JSON object")
    return arguments
