"""Parse requests of OpenAI's Responses interface. Nothing is stored: each request brings the whole conversation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag, model_validator

from moepack.server.http import parse
from moepack.server.http.models import (
    Body,
    Flag,
    Hint,
    List,
    NoItems,
    Object,
    Off,
    One,
    OpenBody,
    Text,
    Whole,
    Zero,
    by_type,
    read,
    wrong,
)
from moepack.server.http.parse import Dialogue, Names, Request
from moepack.server.http.toolbox import MOST_TOOLS, Arguments, Choice, Function, chosen, said_call
from moepack.server.options import DEFAULTS, Sampling

NAMES = Names(prompt="input", limit="max_output_tokens", schema="text.format", effort="reasoning.effort")


# --- the conversation


class InputPart(OpenBody):
    """A part of a text."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text


Parts = Text | List[InputPart]


class InputItem(Body):
    """Optional fields of every item: our answers contain them, and clients send them back."""

    id: Text | None = None
    status: Text | None = None


class MessageItem(InputItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    phase: Literal["commentary", "final_answer"] | None = None
    content: Parts

    def said(self) -> Object:
        """The item as a message that templates read."""
        return {"role": "system" if self.role == "developer" else self.role, "content": parse.joined(self.content)}


class FunctionCall(InputItem):
    """An earlier call."""

    type: Literal["function_call"]
    name: Text
    call_id: Text
    arguments: Arguments = Field(default_factory=dict)

    def said(self) -> Object:
        """The item as a message that templates read."""
        call = said_call(self.call_id, self.name, self.arguments)
        return {"role": "assistant", "content": "", "tool_calls": [call]}


class FunctionOutput(InputItem):
    """The result of a call."""

    type: Literal["function_call_output"]
    call_id: Text = ""
    output: Parts

    def said(self) -> Object:
        """The item as a message that templates read."""
        return {"role": "tool", "content": parse.joined(self.output), "tool_call_id": self.call_id}


class Reasoning(InputItem):
    """Earlier reasoning."""

    type: Literal["reasoning"]
    content: Parts = ""
    summary: Parts = ""
    encrypted_content: None = None

    @model_validator(mode="after")
    def _once(self) -> Reasoning:
        if self.content and self.summary:
            raise wrong("is not supported beside content", "summary", "unsupported")
        return self

    def said(self) -> Object:
        """The item as a message that templates read."""
        return {"role": "assistant", "content": "", **parse.reasoned(parse.joined(self.content or self.summary))}


AnyItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionOutput, Tag("function_call_output")]
    | Annotated[Reasoning, Tag("reasoning")],
    by_type("message"),
]


def _messages(given: str | list[AnyItem]) -> tuple[list[Object], list[str]]:
    """Return the messages of an input, and the item that each begins with."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}], ["input"]
    out: list[Object] = []
    origins: list[str] = []
    for n, item in enumerate(given):
        made = item.said()
        if out and out[-1]["role"] == made["role"] == "assistant":  # reasoning, texts and calls of one answer
            last = out[-1]
            content = "\n\n".join(filter(None, (last["content"], made["content"])))
            calls = [*last.get("tool_calls", ()), *made.get("tool_calls", ())]
            out[-1] = {**last, **made, "content": content, **({"tool_calls": calls} if calls else {})}
        else:
            out.append(made)
            origins.append(f"input[{n}]")
    return out, origins


# --- the other fields


class ReasoningOptions(Body):
    """How much to reason. Reasoning is sent whole: a summary adds nothing."""

    effort: Text | None = None
    summary: Text | None = None
    generate_summary: Text | None = None  # the older name


class TextFormat(Body):
    """The answer's form: any text, any JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Text = ""
    description: Text | None = None
    strict: Flag = False
    schema_: Object | None = Field(None, alias="schema")

    @model_validator(mode="after")
    def _whole(self) -> TextFormat:
        parse.check_schema(self.type, self.schema_, "schema")
        return self

    def repeated(self) -> Object:
        """Return this item as the answer repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        named = {"name": self.name, "description": self.description}
        return {"type": self.type, **named, "schema": self.schema_, "strict": self.strict}


class TextOptions(Body):
    """The answer's form."""

    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: Annotated[Literal["low", "medium", "high"] | None, Hint("medium")] = None


class ResponsesTool(Function):
    """A function that an answer may call."""

    type: Literal["function"]
    defer_loading: Off | None = None

    def repeated(self) -> Object:
        """Return this item as the answer repeats it."""
        return {"type": "function", "description": None, **self.listed["function"], "strict": self.strict}


class ChosenFunction(OpenBody):
    """The one function that must be called."""

    type: Literal["function"]
    name: Text


# What may be in an answer beside its text. Reasoning is always sent as it is; no other of these ever exists here.
Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponsesBody(parse.Sampled):
    """A request to /v1/responses."""

    model: Text
    input: Text | Annotated[List[AnyItem], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Whole | None = Field(None, ge=1, le=1 << 31)
    tools: List[ResponsesTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: Choice | ChosenFunction | None = None
    parallel_tool_calls: Flag = True
    text: TextOptions = Field(default_factory=TextOptions)
    reasoning: ReasoningOptions = Field(default_factory=ReasoningOptions)
    metadata: Object = Field(default_factory=dict)
    client_metadata: Object | None = None
    chat_template_kwargs: parse.TemplateArguments = Field(default_factory=dict)
    stream_options: parse.UsageOptions | None = None  # the usage is always there
    n: One | None = None
    background: Off | None = None
    truncation: Annotated[Literal["auto", "disabled"] | None, Hint("disabled")] = None
    include: Annotated[List[Included], Field(max_length=16)] | None = None
    top_logprobs: Zero | None = None
    max_tool_calls: Whole | None = Field(None, ge=1)  # of tools that OpenAI runs: there is none here
    context_management: NoItems | None = None

    def request(self, vocabulary: int, defaults: Sampling) -> Request:
        """Make the request."""
        named = self.tool_choice.name if isinstance(self.tool_choice, ChosenFunction) else None
        choice = self.tool_choice if isinstance(self.tool_choice, str) else None
        shown, tools = chosen(self.tools, choice if named is None else "required", named, self.parallel_tool_calls)
        system: list[Object] = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        said, origins = _messages(self.input)
        chat = Dialogue(
            [*system, *said],
            ["instructions"] * len(system) + origins,
            shown,
            tools,
            self.reasoning.effort,
            self.chat_template_kwargs,
            names=NAMES,
        )
        return Request(
            model=self.model,
            sampling=self.sampling(vocabulary, defaults, None),
            max_tokens=self.max_output_tokens,
            stops=self.stops,
            ignores_ends=self.ignore_eos,
            stream=self.stream,
            schema=parse.wanted_schema(self.text.format.type, self.text.format.schema_),
            chat=chat,
            names=NAMES,
            unfollowed=tuple(self.unfollowed()),
            repeated=self._repeated(),
        )

    def _repeated(self) -> Object:
        """Return the request's fields that the answer repeats."""
        return {
            "instructions": self.instructions,
            "metadata": self.metadata,
            "max_output_tokens": self.max_output_tokens,
            "reasoning": self.reasoning.model_dump(exclude={"generate_summary"}),
            "max_tool_calls": self.max_tool_calls,
            "text": {"format": self.text.format.repeated(), "verbosity": self.text.verbosity or "medium"},
            "tools": [one.repeated() for one in self.tools],
            "tool_choice": "auto"
            if self.tool_choice is None
            else self.model_dump(include={"tool_choice"})["tool_choice"],
            "parallel_tool_calls": self.parallel_tool_calls,
            "user": self.user,
            "safety_identifier": self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }


def responses(given: Object, vocabulary: int, defaults: Sampling = DEFAULTS) -> Request:
    """Parse a request to /v1/responses. An ApiError names the field that is wrong or unsupported."""
    return read(ResponsesBody, given).request(vocabulary, defaults)
