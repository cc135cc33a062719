"""The base of requests: models of pydantic, whose one declaration parses a body, describes it and refuses it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from moepack.server.errors import ApiError, bad

Item = TypeVar("Item")
Kind = TypeVar("Kind", bound="Body")
Path = list[str | int]
LONGEST_NAME = 64  # letters of an undeclared field for which a declared one is proposed
SAME = (  # what interfaces and other servers call by different names, the first that an interface has is proposed
    ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length", "n_predict"),
    ("stop", "stop_sequences"),
    ("prompt", "messages", "input"),
    ("response_format", "text", "output_config", "output_format", "format", "guided_json", "json_schema"),
    ("reasoning_effort", "reasoning", "thinking", "think", "enable_thinking"),
    ("repetition_penalty", "repeat_penalty"),
    ("seed", "random_seed"),
)


class _First(FailFast):
    """Stop at a list's first wrong item. Hashable, which a part of a union must be."""

    __hash__ = object.__hash__


def _number(given: object) -> object:
    """Refuse a boolean, which a literal number would take for 0 or 1."""
    if isinstance(given, bool):
        raise PydanticCustomError("int_type", "Input should be a number")
    return given


def _boolean(given: object) -> object:
    """Refuse a number, which a literal boolean would take for false or true."""
    if not isinstance(given, bool):
        raise PydanticCustomError("bool_type", "Input should be true or false")
    return given


# A JSON type is never taken for another.
Flag = StrictBool
Number = StrictFloat
Text = StrictStr
Whole = StrictInt
Object = dict[str, Any]
List = Annotated[list[Item], _First()]
# The one value of a field, or an empty one, that changes no answer.
Zero = Annotated[Literal[0], BeforeValidator(_number)]
One = Annotated[Literal[1], BeforeValidator(_number)]
Off = Annotated[Literal[False], BeforeValidator(_boolean)]
On = Annotated[Literal[True], BeforeValidator(_boolean)]
NoItems = Annotated[list[Any], Field(max_length=0)]
NoFields = Annotated[Object, Field(max_length=0)]
Known = dict[str, set[str]]  # undeclared field -> those that its object may have


class Hint:
    """Marks a field that asks for what no answer here follows, at other values than `met`."""

    def __init__(self, *met: object) -> None:
        self.met = met


class Body(BaseModel):
    """A JSON object. A null counts as absent, and a field that is not declared is refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _present(cls, given: object, info: ValidationInfo) -> object:
        """Leave out nulls, and all undeclared fields but the first: one is enough to refuse an object of many.

        The validation's context, a `Known`, receives that one.
        """
        if not isinstance(given, dict):
            return given
        present = {name: value for name, value in given.items() if value is not None}
        if cls.model_config["extra"] == "forbid":
            known = {field.alias or name for name, field in cls.model_fields.items()}
            undeclared = sorted(present.keys() - known)
            for name in undeclared[1:]:
                del present[name]
            if undeclared and info.context is not None:
                info.context[undeclared[0]] = known
        return present

    def unfollowed(self) -> Iterator[str]:
        """Yield the names of fields, also in objects but not in lists, that are hints no answer here follows."""
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if isinstance(value, Body):
                yield from (f"{name}.{inner}" for inner in value.unfollowed())
            hints = [one for one in field.metadata if isinstance(one, Hint)]
            if value is not None and any(value not in hint.met for hint in hints):
                yield name

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        """Describe that every field that may be left out may be null."""
        made = handler(schema)
        whole = handler.resolve_ref_schema(made)
        for name, field in whole.get("properties", {}).items():
            field.pop("title", None)
            if name not in whole.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                whole["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        return made


class OpenBody(Body):
    """A JSON object whose undeclared fields say nothing here, and are not looked at."""

    model_config = ConfigDict(extra="ignore")


def by_type(absent: str) -> Discriminator:
    """Choose the tagged form of a union by the field `type`; without one it is the form `absent`."""

    def _type(given: object) -> str:
        found = given.get("type") if isinstance(given, dict) else None
        return absent if found is None else str(found)[:64]

    return Discriminator(_type)


def read(kind: type[Kind], given: Object) -> Kind:
    """Parse a body. An ApiError names the field that is wrong or unsupported."""
    known: Known = {}
    try:
        return kind.model_validate(given, context=known)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), given, known) from None


def wrong(message: str, at: str | None = None, code: str = "invalid") -> PydanticCustomError:
    """Make the error that a validator raises for its value, or for the value's field `at`."""
    return PydanticCustomError(code, "{message}", {"message": message, "at": at})


def _refusal(errors: list[ErrorDetails], given: Object, known: Mapping[str, set[str]]) -> ApiError:
    """Name the first wrong field; of a value of several forms, that of the form which fits the furthest.

    Of an object it is the type, where that is wrong: other errors follow from it. For an undeclared field, which
    `known` has, propose the one that was probably meant.
    """
    paths = [_path(error, given) for error in errors]
    in_field = [path for path in paths if path[:1] == paths[0][:1]]
    path = max(in_field, key=lambda path: (len(path), path[-1:] == ["type"]))
    found = [error for error, own in zip(errors, paths, strict=True) if own == path]
    # Of a union, the form whose type the value has says what is wrong.
    found = [error for error in found if not error["type"].endswith(("_type", "literal_error"))] or found
    words = [_words(error) for error in found]
    forms = dict.fromkeys(word.removeprefix("must be ") for word in words)
    said = ("must be " if words[0].startswith("must be ") else "") + " or ".join(forms)
    name = "".join(f"[{step}]" if isinstance(step, int) else _named(step) for step in path).removeprefix(".")
    if found[0]["type"] == "extra_forbidden":
        said += _meant(str(path[-1]), known)
    return bad(name, said, "unsupported" if found[0]["type"] in _UNSUPPORTED else None)


def _meant(name: str, known: Mapping[str, set[str]]) -> str:
    fields = known.get(name, set())
    near = [one for names in SAME if name in names for one in names if one in fields]
    if not near and len(name) <= LONGEST_NAME and name not in _declared(Body):  # else it is right in another interface
        near = difflib.get_close_matches(name.lower(), sorted(fields), 1, cutoff=0.75)
    return f": did you mean {near[0]}?" if near else ""


def _declared(kind: type[Body]) -> set[str]:
    """Return the names of the fields of a model and of all models derived from it."""
    names = {field.alias or name for name, field in kind.model_fields.items()}
    return names.union(*(_declared(made) for made in kind.__subclasses__()))


def _named(step: str) -> str:
    return f".{step}" if step.isidentifier() else f"[{step!r}]"


def _path(error: ErrorDetails, given: Object) -> Path:
    """Return the names and numbers that lead to a wrong value. Between them pydantic names the forms of unions."""
    at: Any = given
    path: Path = []
    steps, known = error["loc"], error.get("ctx", {})
    for left, step in zip(range(len(steps) - 1, -1, -1), steps, strict=True):
        inside = (isinstance(at, dict) and step in at) or (isinstance(at, list) and isinstance(step, int))
        if inside and left and isinstance(at, dict) and step == at.get("type") and isinstance(at[step], str):
            continue  # {"type": "text", "text": "..."}: its form is called as its field
        if inside:
            at = at[step]
        if inside or (error["type"] == "missing" and not left):
            path.append(step)
    if "discriminator" in known:
        path.append(known["discriminator"].strip("'_()"))
    if known.get("at") is not None:
        path.append(known["at"])
    return path


_WORDS = {  # where pydantic's own are of Python or of unions
    "missing": "is missing",
    "union_tag_not_found": "is missing",
    "extra_forbidden": "is not supported",
    "none_required": "is not supported",
    "union_tag_invalid": "must be one of {expected_tags}",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "dict_type": "must be an object",
    "too_long": "takes at most {max_length} items",
    "too_short": "must not be empty",
}
_UNSUPPORTED = ("extra_forbidden", "literal_error", "none_required", "union_tag_invalid", "unsupported")


def _words(error: ErrorDetails) -> str:
    own = _WORDS.get(error["type"])
    if error["type"] == "too_long" and error["ctx"]["max_length"] == 0:
        own = "must be empty"
    if own is None:
        own = re.sub(r"^\w+ should", "must", error["msg"])
        return own.replace("True", "true").replace("False", "false") if error["type"] == "literal_error" else own
    return own.format(**error.get("ctx", {}))
