"""The four domains whose experts are trained apart: prose, maths, code, and chats that call tools.

Prose, maths and code are the texts in examples/. The chats are made from lists of words and a seed, because no chats
with calls lie in the repository: what they teach is the form of a call, not conversation. The chats to evaluate on use
tools and words that the training has not.
"""

import json
import random
from collections.abc import Callable, Sequence

from benchmarks.common import EXAMPLES

Messages = list[dict[str, str]]
Template = Callable[[Messages], str]  # writes a chat as its text

DOMAINS = ("prose", "maths", "code", "chat")
_SOURCES = {
    "prose": ("WikiText-2 validation", "WikiText-2 test"),
    "maths": ("GSM8K train", "GSM8K test"),
    "code": ("CPython 3.11 standard library", "HumanEval"),
}
_CHATS = 400  # of training; a tenth of it to evaluate on
_Tools = dict[str, tuple[str, str, Sequence[str]]]
_TOOLS: _Tools = {  # of training: a tool, its argument, how it is asked for, and what can stand there
    "get_weather": ("city", "What is the weather in {}?", ("Paris", "Lima", "Oslo", "Cairo", "Tokyo", "Boston")),
    "set_alarm": ("time", "Wake me up at {}, please.", ("6:30", "7:00", "7:45", "8:15", "9:20", "5:55")),
    "search_web": ("query", "Look up {} for me.", ("black holes", "bread recipes", "train times", "oak trees")),
    "play_music": ("artist", "I want to hear {}.", ("Mozart", "Nina Simone", "Bach", "The Beatles", "Miles Davis")),
    "send_message": ("to", "Tell {} that I am late.", ("Anna", "my boss", "Tom", "the team", "Maria")),
    "convert_money": ("amount", "How many euros are {}?", ("20 dollars", "50 pounds", "900 yen", "12 francs")),
}
_HELD_TOOLS: _Tools = {
    "find_recipe": ("dish", "How do I cook {}?", ("pancakes", "lentil soup", "risotto", "pizza")),
    "book_table": ("restaurant", "Reserve a table at {}.", ("Luigi's", "the Blue Lagoon", "Chez Marie", "Sakura")),
    "track_parcel": ("number", "Where is my parcel {}?", ("A1034", "ZX-77", "90210", "K8812")),
}


def domain_texts(domain: str, template: Template, *, held: bool) -> list[str]:
    """The documents of a domain, to train on, or those that training has not seen (`held`)."""
    if domain == "chat":
        return _chats(template, held=held)
    source = _SOURCES[domain][held]
    path = EXAMPLES / "text" / ("evaluation.jsonl" if held else "calibration.jsonl")
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [row["text"] for row in rows if row["source"] == source]


def _chats(template: Template, *, held: bool) -> list[str]:
    tools = _HELD_TOOLS if held else _TOOLS
    draw = random.Random(held)
    count = _CHATS // 10 if held else _CHATS
    return [template(_chat(draw, tools)) for _ in range(count)]


def _chat(draw: random.Random, tools: _Tools) -> Messages:
    """A chat in which the model calls the one tool that fits, or adds two numbers itself."""
    listed = [{"name": name, "parameters": {argument: "string"}} for name, (argument, _, _) in tools.items()]
    draw.shuffle(listed)
    system = f"You can call these tools: {json.dumps(listed)}. Call one with <tool_call>, or answer yourself."
    messages = [{"role": "system", "content": system}]
    for _ in range(draw.randint(1, 3)):
        if draw.random() < 0.25:
            left, right = draw.randint(2, 90), draw.randint(2, 90)
            question = f"What is {left} plus {right}?"
            answer = f"{left} plus {right} is {left + right}."
        else:
            name = draw.choice(list(tools))
            argument, asked, values = tools[name]
            value = draw.choice(values)
            question = asked.format(value)
            call = {"name": name, "arguments": {argument: value}}
            answer = f"<tool_call>{json.dumps(call)}</tool_call>"
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages
