"""Parse requests of OpenAI's Responses interface. Nothing is stored: each request brings the whole conversation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from moepack.server.errors import bad
from moepack.server.http import parse
from moepack.server.http.fields import Fields
from moepack.server.http.parse import Dialogue, Request
from moepack.server.http.toolbox import Listed, as_object, chosen, few, take_function
from moepack.server.tools.parts import Tools

ONLY: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "include": ([], ["reasoning.encrypted_content"]),  # reasoning is sent as it is, and may be sent back so
    "top_logprobs": (0,),
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "max_tool_calls": (),
}
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponsesRequest(Request):
    """A request for a response; `repeated` has what the answer repeats of it."""

    repeated: dict[str, Any] = field(default_factory=dict)


def responses(fields: Fields, vocabulary: int) -> ResponsesRequest:
    """Parse a request to /v1/responses. An ApiError names the field that is wrong or unsupported."""
    given, instructions = fields.take("input"), fields.text("instructions")
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    messages += _messages(given)
    listed, tools, repeated = _tools(fields)
    for name, allowed in ONLY.items():
        fields.only(name, *allowed)
    effort, reasoning = _reasoning(fields)
    shape, format = _text(fields)
    metadata, limit = fields.record("metadata") or {}, fields.whole("max_output_tokens", None, 1)
    options = fields.inside("stream_options")
    if options is not None:
        options.only("include_obfuscation", False)
        options.end()
    repeated |= {
        "instructions": instructions, "metadata": metadata, "max_output_tokens": limit, "reasoning": reasoning,
        "text": {"format": format, "verbosity": "medium"},
    }  # fmt: skip
    repeated |= {name: fields.text(name) for name in parse.NEUTRAL}
    dialogue = Dialogue(messages, listed, tools, effort, fields.record("chat_template_kwargs") or {})
    parse.check_template(dialogue)
    asked = ResponsesRequest(
        model=fields.text("model"), sampling=parse.take_sampling(fields, None, vocabulary), max_tokens=limit, count=1,
        stops=parse.take_stops(fields), ignores_ends=fields.flag("ignore_eos"), stream=fields.flag("stream"),
        usage=True, continuous=False, schema=shape, chat=dialogue, repeated=repeated,
    )  # fmt: skip
    fields.end()
    parse.check_chat(asked, "text.format")
    return asked


def _reasoning(fields: Fields) -> tuple[str | None, dict[str, Any]]:
    inner = fields.inside("reasoning")
    if inner is None:
        return None, {"effort": None, "summary": None}
    effort, summary = inner.text("effort"), inner.text("summary")  # reasoning is sent whole: a summary adds nothing
    inner.end()
    return effort, {"effort": effort, "summary": summary}


def _text(fields: Fields) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Parse the answer's schema, None for any text, and how the answer repeats it."""
    inner = fields.inside("text")
    format = None if inner is None else inner.inside("format")
    if inner is not None:
        inner.only("verbosity", "medium")
        inner.end()
    kind = None if format is None else format.text("type")
    if format is None or kind is None or kind == "text":
        if format is not None:
            format.end()
        return None, {"type": "text"}
    if kind == "json_object":
        format.end()
        return {"type": "object"}, {"type": "json_object"}
    if kind != "json_schema":
        raise bad("text.format.type", "must be text, json_object or json_schema", "unsupported")
    name, described, strict = format.text("name"), format.text("description"), format.flag("strict")
    schema = format.record("schema")
    format.end()
    if schema is None:
        raise bad("text.format.schema", "is missing")
    shown = {"type": "json_schema", "name": name or "", "description": described, "schema": schema, "strict": strict}
    return schema, shown


def _tools(fields: Fields) -> tuple[Listed, Tools, dict[str, Any]]:
    """Parse functions, and how the answer repeats them."""
    given, choice, several = fields.take("tools"), fields.take("tool_choice"), fields.flag("parallel_tool_calls", True)
    if not isinstance(given, list | None):
        raise bad("tools", "must be a list")
    few("tools", given or ())
    listed, repeated, any_strict = [], [], False
    for n, tool in enumerate(given or ()):
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise bad(f"tools[{n}].type", "only function is supported", "unsupported")
        inner = {name: value for name, value in tool.items() if name != "type"}
        made, strict = take_function(Fields(inner, f"tools[{n}]."), f"tools[{n}]", "parameters")
        listed.append(made)
        any_strict |= strict
        repeated.append({"type": "function", "description": None, **made["function"], "strict": strict})
    named = None
    if isinstance(choice, dict):
        named = choice.get("name") if choice.get("type") == "function" else None
        if not isinstance(named, str):
            raise bad("tool_choice", 'must be {"type": "function", "name": ...}')
    elif choice not in (None, "auto", "none", "required"):
        raise bad("tool_choice", "must be auto, none, required or a function", "unsupported")
    shown, tools = chosen(listed, choice if named is None else "required", named, several, any_strict)
    return shown, tools, {"tools": repeated, "tool_choice": choice or "auto", "parallel_tool_calls": several}


# --- the conversation


def _messages(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise bad("input", "must be a string, or a list of items")
    out: list[dict[str, Any]] = []
    for n, item in enumerate(given):
        made = _message(f"input[{n}]", item)
        if out and out[-1]["role"] == made["role"] == "assistant":  # reasoning, texts and calls of one answer
            last = out[-1]
            content = "\n\n".join(filter(None, (last["content"], made["content"])))
            calls = [*last.get("tool_calls", ()), *made.get("tool_calls", ())]
            out[-1] = {**last, **made, "content": content, **({"tool_calls": calls} if calls else {})}
        else:
            out.append(made)
    return out


def _message(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise bad(where, "must be an object")
    fields = Fields(given, f"{where}.")
    kind = fields.text("type") or "message"
    fields.text("id"), fields.text("status")  # of our answers, which clients send back
    if kind == "message":
        made = _said(where, fields)
    elif kind == "function_call":
        name, call = fields.text("name"), fields.text("call_id")
        if name is None or call is None:
            raise bad(where, "needs name and call_id")
        given = {"name": name, "arguments": as_object(f"{where}.arguments", fields.take("arguments") or "{}")}
        calls = [{"id": call, "type": "function", "function": given}]
        made = {"role": "assistant", "content": "", "tool_calls": calls}
    elif kind == "function_call_output":
        output = _texts(f"{where}.output", fields.take("output"))
        made = {"role": "tool", "content": output, "tool_call_id": fields.text("call_id") or ""}
    elif kind == "reasoning":
        parts = fields.take("content") or fields.take("summary") or []
        fields.only("summary", [])
        fields.only("encrypted_content")
        made = {"role": "assistant", "content": "", **parse.reasoned(_texts(f"{where}.content", parts))}
    else:
        raise bad(f"{where}.type", f"{kind[:64]!r} is not supported", "unsupported")
    fields.end()
    return made


def _said(where: str, fields: Fields) -> dict[str, Any]:
    role = fields.text("role")
    if role not in ("system", "developer", "user", "assistant"):
        raise bad(f"{where}.role", "must be one of system, developer, user, assistant")
    if role == "assistant":
        fields.only("phase", "commentary", "final_answer")
    content = _texts(f"{where}.content", fields.take("content"))
    return {"role": "system" if role == "developer" else role, "content": content}


def _texts(where: str, given: Any) -> str:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise bad(where, "must be a string, or a list of parts")
    for n, part in enumerate(given):
        if not isinstance(part, dict) or part.get("type") not in TEXTS:
            raise bad(f"{where}[{n}].type", "only text is supported", "unsupported")
        if not isinstance(part.get("text"), str):
            raise bad(f"{where}[{n}].text", "must be a string")
    return "".join(part["text"] for part in given)
