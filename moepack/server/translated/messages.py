"""Parse requests of Anthropic's Messages interface."""

from __future__ import annotations

from typing import Any

from moepack.server.errors import bad
from moepack.server.http import parse
from moepack.server.http.fields import Fields
from moepack.server.http.parse import Dialogue, Request
from moepack.server.http.toolbox import Listed, as_object, chosen, few, take_function
from moepack.server.options import Sampling
from moepack.server.tools.parts import Tools

ONLY: dict[str, tuple[Any, ...]] = {"service_tier": ("auto", "standard_only"), "speed": ("standard",)}
CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
CACHE = "cache_control"  # a hint that changes no answer


def messages(fields: Fields, vocabulary: int) -> Request:
    """Parse a request to /v1/messages. An ApiError names the field that is wrong or unsupported."""
    limit = fields.whole("max_tokens", None, 1)
    if limit is None:
        raise bad("max_tokens", "is missing")
    temperature = fields.number("temperature", 1.0, 0.0, 1.0)
    sampling = Sampling(
        temperature=0.0 if temperature < 1e-5 else temperature,
        top_p=fields.number("top_p", 1.0, 0.0, 1.0),
        top_k=fields.whole("top_k", 0, 0) or 0,
    )
    stream = fields.flag("stream")
    return _request(fields, max_tokens=limit, bound=True, sampling=sampling, stops=_stops(fields), stream=stream)


def counted(fields: Fields, vocabulary: int) -> Request:
    """Parse a request to /v1/messages/count_tokens, of which only the prompt matters."""
    return _request(fields, max_tokens=None, sampling=Sampling(), stops=(), stream=False)


def _request(fields: Fields, **own: Any) -> Request:
    """Parse the fields that both share, and refuse the rest."""
    system = fields.take("system")
    messages = [] if system is None else [{"role": "system", "content": _texts("system", system)}]
    messages += _messages(fields.take("messages"))
    listed, tools = _tools(fields)
    for name, allowed in ONLY.items():
        fields.only(name, *allowed)
    fields.record("metadata")
    fields.record(CACHE)
    schema, effort = _output(fields)
    dialogue = Dialogue(messages, listed, tools, effort, thinks=_thinking(fields))
    asked = Request(
        model=fields.text("model"), count=1, ignores_ends=False, usage=True, continuous=False, schema=schema,
        chat=dialogue, **own,
    )  # fmt: skip
    fields.end()
    parse.check_chat(asked, "output_config.format")
    return asked


def _stops(fields: Fields) -> tuple[str, ...]:
    given = fields.take("stop_sequences")
    if given is not None and not isinstance(given, list):
        raise bad("stop_sequences", "must be a list of strings")
    return parse.take_stops(Fields({"stop": given}), "stop_sequences")


def _thinking(fields: Fields) -> bool | None:
    """Parse whether the model is to think first; None leaves it to its template. A budget bounds nothing here."""
    inner = fields.inside("thinking")
    if inner is None:
        return None
    kind = inner.text("type")
    if kind not in ("enabled", "adaptive", "disabled"):
        raise bad("thinking.type", "must be enabled, adaptive or disabled")
    inner.whole("budget_tokens", None, 1)
    inner.only("display", "summarized", "omitted")
    inner.end()
    return kind != "disabled"


def _output(fields: Fields) -> tuple[dict[str, Any] | None, str | None]:
    """Parse the answer's schema, and how much to reason."""
    inner = fields.inside("output_config")
    if inner is None:
        return None, None
    effort, format = inner.text("effort"), inner.inside("format")
    inner.end()
    if format is None:
        return None, effort
    kind, schema = format.text("type"), format.record("schema")
    format.end()
    if kind != "json_schema" or schema is None:
        raise bad("output_config.format", 'must be {"type": "json_schema", "schema": ...}')
    return schema, effort


def _tools(fields: Fields) -> tuple[Listed, Tools]:
    given, choice = fields.take("tools"), fields.inside("tool_choice")
    if not isinstance(given, list | None):
        raise bad("tools", "must be a list")
    few("tools", given or ())
    listed, any_strict = [], False
    for n, tool in enumerate(given or ()):
        if not isinstance(tool, dict) or tool.get("type", "custom") not in (None, "custom"):
            raise bad(f"tools[{n}].type", "only custom tools are supported", "unsupported")
        inner = {name: value for name, value in tool.items() if name not in ("type", CACHE)}
        made, strict = take_function(Fields(inner, f"tools[{n}]."), f"tools[{n}]", "input_schema")
        listed.append(made)
        any_strict |= strict
    if choice is None:
        return chosen(listed, None, None, True, any_strict)
    kind, name = choice.text("type"), choice.text("name")
    several = not choice.flag("disable_parallel_tool_use")
    choice.end()
    if kind not in CHOICES or (kind == "tool") != (name is not None):
        raise bad("tool_choice", "must be auto, any, none, or tool with a name")
    return chosen(listed, CHOICES[kind], name, several, any_strict)


# --- the conversation


def _messages(given: Any) -> list[dict[str, Any]]:
    if not isinstance(given, list) or not given:
        raise bad("messages", "must be a list of messages")
    return [made for n, message in enumerate(given) for made in _message(f"messages[{n}]", message)]


def _message(where: str, given: Any) -> list[dict[str, Any]]:
    """Return a message as those that templates read: results of tools are messages of their own."""
    if not isinstance(given, dict):
        raise bad(where, "must be an object")
    fields = Fields(given, f"{where}.")
    role, content = fields.text("role"), fields.take("content")
    fields.end()
    if role not in ("user", "assistant", "system"):
        raise bad(f"{where}.role", "must be one of user, assistant, system")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not content:
        raise bad(f"{where}.content", "must be a string, or a list of blocks")
    said: dict[str, Any] = {"role": role, "content": ""}
    calls: list[dict[str, Any]] = []
    results: list[dict[str, Any]] = []
    for n, block in enumerate(content):
        at = f"{where}.content[{n}]"
        if not isinstance(block, dict):
            raise bad(at, "must be an object")
        inner = Fields({name: value for name, value in block.items() if name != CACHE}, f"{at}.")
        kind = inner.text("type")
        if kind == "text":
            said["content"] += _text(at, inner)
        elif kind == "thinking" and role == "assistant":
            inner.text("signature")
            said |= parse.reasoned(inner.text("thinking") or "")
        elif kind == "tool_use" and role == "assistant":
            calls.append(_use(at, inner))
        elif kind == "tool_result" and role == "user":
            results.append(_result(at, inner))
        else:
            raise bad(f"{at}.type", f"{str(kind)[:64]!r} is not supported in a message of {role}", "unsupported")
        inner.end()
    if calls:
        said["tool_calls"] = calls
    return [*results, *([said] if said["content"] or calls or not results else [])]


def _text(where: str, fields: Fields) -> str:
    text = fields.text("text")
    if text is None:
        raise bad(f"{where}.text", "is missing")
    fields.only("citations", [])
    return text


def _use(where: str, fields: Fields) -> dict[str, Any]:
    name, call = fields.text("name"), fields.text("id")
    fields.take("caller")  # of our answers, which clients send back
    if name is None or call is None:
        raise bad(where, "needs name and id")
    arguments = as_object(f"{where}.input", fields.take("input"))
    return {"id": call, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(where: str, fields: Fields) -> dict[str, Any]:
    content, call = fields.take("content"), fields.text("tool_use_id")
    text = "" if content is None else _texts(f"{where}.content", content)
    if fields.flag("is_error"):
        text = f"Error: {text}"
    return {"role": "tool", "content": text, "tool_call_id": call or ""}


def _texts(where: str, given: Any) -> str:
    """Join a text's blocks, as paragraphs."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise bad(where, "must be a string, or a list of blocks")
    out = []
    for n, block in enumerate(given):
        at = f"{where}[{n}]"
        if not isinstance(block, dict) or block.get("type") != "text":
            raise bad(f"{at}.type", "only text is supported", "unsupported")
        inner = Fields({name: value for name, value in block.items() if name not in (CACHE, "type")}, f"{at}.")
        out.append(_text(at, inner))
        inner.end()
    return "\n\n".join(out)
