"""Parse requests of Anthropic's Messages interface."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from moepack.server.errors import bad
from moepack.server.http import parse
from moepack.server.http.models import Body, Flag, Hint, List, NoItems, Number, Object, Off, Text, Whole, read, wrong
from moepack.server.http.parse import Dialogue, Names, Request
from moepack.server.http.toolbox import MOST_TOOLS, Arguments, Function, Parameters, chosen, said_call
from moepack.server.options import DEFAULTS, Sampling

NAMES = Names(prompt="messages", schema="output_config.format", effort="output_config.effort")
CHOICES = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}


class Cached(Body):
    """Base of items that may have cache_control, a hint that changes no answer."""

    cache_control: Object | None = None


# --- the conversation


class TextBlock(Cached):
    """A piece of text."""

    type: Literal["text"]
    text: Text
    citations: Annotated[list[object], Field(max_length=0)] | None = None


class ThinkingBlock(Cached):
    """Earlier reasoning."""

    type: Literal["thinking"]
    thinking: Text = ""
    signature: Text | None = None


class RedactedThinking(Cached):
    """Earlier reasoning of another model, which no other can read."""

    type: Literal["redacted_thinking"]
    data: Text = ""


class ToolUse(Cached):
    """An earlier call."""

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: Arguments
    caller: object = None  # of our answers, which clients send back


Texts = Text | List[TextBlock]


class ToolResult(Cached):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: Text = ""
    content: Texts = ""
    is_error: Flag = False

    def said(self) -> Object:
        """The result as a message that templates read."""
        text = parse.joined(self.content, "\n\n")
        shown = f"Error: {text}" if self.is_error else text
        return {"role": "tool", "content": shown, "tool_call_id": self.tool_use_id}


Block = Annotated[TextBlock | ThinkingBlock | RedactedThinking | ToolUse | ToolResult, Field(discriminator="type")]
BLOCKS = {
    "system": (TextBlock,),
    "user": (TextBlock, ToolResult),
    "assistant": (TextBlock, ThinkingBlock, RedactedThinking, ToolUse),
}


class Turn(Body):
    """A message of blocks."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[List[Block], Field(min_length=1)]

    @model_validator(mode="after")
    def _blocks(self) -> Turn:
        for block in () if isinstance(self.content, str) else self.content:
            if not isinstance(block, BLOCKS[self.role]):
                message = f"{block.type!r} is not supported in a message of {self.role}"
                raise wrong(message, "content", "unsupported")
        return self

    def said(self) -> list[Object]:
        """The message as those that templates read: results of tools are messages of their own, before the text."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        said: Object = {"role": self.role, "content": ""}
        calls: list[Object] = []
        results: list[Object] = []
        for block in self.content:
            if isinstance(block, TextBlock):
                said["content"] += block.text
            elif isinstance(block, ThinkingBlock):
                said |= parse.reasoned(block.thinking)
            elif isinstance(block, ToolUse):
                calls.append(said_call(block.id, block.name, block.input))
            elif isinstance(block, ToolResult):
                results.append(block.said())
        if calls:
            said["tool_calls"] = calls
        return [*results, said] if said["content"] or calls or not results else results


# --- the other fields


class ThinkingOptions(Body):
    """Whether the model is to think first. A budget bounds nothing here, and thoughts are sent whole."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[Whole | None, Hint(), Field(ge=1, le=1 << 31)] = None
    display: Annotated[Literal["summarized", "omitted"] | None, Hint("summarized")] = None


class ContextEdit(Body):
    """Accepted for compatibility: earlier thoughts are never shortened."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    """Accepted for compatibility: the conversation is never shortened."""

    edits: List[ContextEdit] = Field(default_factory=list)


class OutputFormat(Body):
    """JSON by a schema."""

    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema")


class OutputConfig(Body):
    """The answer's form, and how much to reason."""

    effort: Text | None = None  # how much to reason, in the words of the model's template
    format: OutputFormat | None = None


class MessagesTool(Function):
    """A function that an answer may call."""

    type: Literal["custom"] = "custom"
    parameters: Parameters | None = Field(None, alias="input_schema")
    eager_input_streaming: Flag | None = None  # arguments are streamed as they are made
    defer_loading: Off | None = None
    allowed_callers: List[Literal["direct"]] | None = None


class ToolChoice(Body):
    """The tools that an answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Text | None = None
    disable_parallel_tool_use: Flag = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.name is None) is (self.type == "tool"):
            raise wrong("is needed by the type tool, and by no other", "name")
        return self


class CountBody(Cached):
    """A request to /v1/messages/count_tokens, of which only the prompt matters."""

    model: Text
    messages: Annotated[List[Turn], Field(min_length=1)]
    system: Texts | None = None
    tools: List[MessagesTool] = Field(default_factory=list, max_length=MOST_TOOLS)
    tool_choice: ToolChoice = Field(default_factory=lambda: ToolChoice(type="auto"))
    thinking: ThinkingOptions | None = None  # None leaves it to the model's template
    output_config: OutputConfig = Field(default_factory=OutputConfig)
    output_format: OutputFormat | None = None  # the older name of output_config.format
    # fields that change no answer at these values
    metadata: Object | None = None
    context_management: ContextManagement | None = None
    mcp_servers: NoItems | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    speed: Annotated[Literal["standard", "fast"] | None, Hint("standard")] = None
    inference_geo: Annotated[Text | None, Hint()] = None

    def request(self, **own: Any) -> Request:
        """Make the request; `own` holds what only an answer needs."""
        asked = self.tool_choice
        format = self.output_config.format or self.output_format
        if self.output_config.format is not None and self.output_format is not None:
            raise bad("output_format", "cannot stand beside output_config.format, its newer name: send one of them")
        shown, tools = chosen(self.tools, CHOICES[asked.type], asked.name, not asked.disable_parallel_tool_use)
        said: list[Object] = []
        if self.system is not None:
            said.append({"role": "system", "content": parse.joined(self.system, "\n\n")})
        origins = ["system"] * len(said)
        for n, message in enumerate(self.messages):
            for made in message.said():
                said.append(made)
                origins.append(f"messages[{n}]")
        last = said[-1]
        template: Object = {}
        if last["role"] == "assistant" and last["content"] and "tool_calls" not in last:  # the answer goes on from it
            template = {"add_generation_prompt": False, "continue_final_message": True}
        thinks = None if self.thinking is None else self.thinking.type != "disabled"
        names = NAMES if self.output_format is None else replace(NAMES, schema="output_format")
        return Request(
            model=self.model,
            schema=None if format is None else format.schema_,
            chat=Dialogue(said, origins, shown, tools, self.output_config.effort, template, thinks, names=names),
            names=names,
            unfollowed=tuple(self.unfollowed()),
            **own,
        )


class MessagesBody(CountBody):
    """A request to /v1/messages."""

    max_tokens: Whole = Field(ge=1, le=1 << 31)
    temperature: Number | None = Field(None, ge=0, le=1)
    top_p: Number | None = Field(None, ge=0, le=1)
    top_k: Whole | None = Field(None, ge=0, le=1 << 31)
    stop_sequences: parse.Stops = Field(default_factory=list)
    stream: Flag = False


def messages(given: Object, vocabulary: int, defaults: Sampling = DEFAULTS) -> Request:
    """Parse a request to /v1/messages. An ApiError names the field that is wrong or unsupported."""
    body = read(MessagesBody, given)
    sampling = defaults.with_given(temperature=body.temperature, top_p=body.top_p, top_k=body.top_k)
    stops = tuple(body.stop_sequences)
    return body.request(max_tokens=body.max_tokens, bound=True, sampling=sampling, stops=stops, stream=body.stream)


def counted(given: Object, vocabulary: int) -> Request:
    """Parse a request to /v1/messages/count_tokens, of which only the prompt matters."""
    return read(CountBody, given).request(max_tokens=None, sampling=Sampling())
