"""The base of requests: models of pydantic, whose one declaration parses a body, describes it and refuses it."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    FailFast,
    GetJsonSchemaHandler,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    ValidationError,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from moepack.server.errors import ApiError, bad

Item = TypeVar("Item")
Kind = TypeVar("Kind", bound="Body")
Path = list[str | int]


class _First(FailFast):
    """Stop at a list's first wrong item. Hashable, which a part of a union must be."""

    __hash__ = object.__hash__


# A JSON type is never taken for another.
Flag = StrictBool
Number = StrictFloat
Text = StrictStr
Whole = StrictInt
Object = dict[str, Any]
List = Annotated[list[Item], _First()]


class Body(BaseModel):
    """A JSON object. A null counts as absent, and a field that is not declared is refused."""

    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _present(cls, given: object) -> object:
        """Leave out nulls, and all undeclared fields but the first: one is enough to refuse an object of many."""
        if not isinstance(given, dict):
            return given
        present = {name: value for name, value in given.items() if value is not None}
        if cls.model_config["extra"] == "forbid":
            known = {field.alias or name for name, field in cls.model_fields.items()}
            for name in sorted(present.keys() - known)[1:]:
                del present[name]
        return present

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
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False, include_input=False), given) from None


def wrong(message: str, at: str | None = None, code: str = "invalid") -> PydanticCustomError:
    """Make the error that a validator raises for its value, or for the value's field `at`."""
    return PydanticCustomError(code, "{message}", {"message": message, "at": at})


def _refusal(errors: list[ErrorDetails], given: Object) -> ApiError:
    """Name the first wrong field; of a value of several forms, that of the form which fits the furthest.

    Of an object it is the type, where that is wrong: other errors follow from it.
    """
    paths = [_path(error, given) for error in errors]
    in_field = [path for path in paths if path[:1] == paths[0][:1]]
    path = max(in_field, key=lambda path: (len(path), path[-1:] == ["type"]))
    found = [error for error, own in zip(errors, paths, strict=True) if own == path]
    words = [_words(error) for error in found]
    forms = dict.fromkeys(word.removeprefix("must be ") for word in words)
    said = ("must be " if words[0].startswith("must be ") else "") + " or ".join(forms)
    name = "".join(f"[{step}]" if isinstance(step, int) else _named(step) for step in path).removeprefix(".")
    return bad(name, said, "unsupported" if found[0]["type"] in _UNSUPPORTED else None)


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
    return error["msg"].replace("Input should", "must") if own is None else own.format(**error.get("ctx", {}))
