"""Write grammars in llguidance's Lark: literals, special tokens, JSON by a schema. It knows no model's form."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

# Between fields as Python's json writes them, which models have read most; no other space, or a weak model writes line
# breaks without end. A request's own "x-guidance" is replaced: it could loosen the schema.
BREAK = r"\n"
STYLE: dict[str, object] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """A grammar, rule by rule."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """Begin a grammar; `tokens` has the added tokens by name: llguidance takes none of them for its text."""
        self._tokens = tokens
        self._rules = list[str]()
        self._marks = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")

    def rule(self, body: str, prefix: str = "r", options: str = "") -> str:
        """Add a rule, or a terminal if `prefix` is of capitals; return its name."""
        name = f"{prefix}{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        return name

    def text(self, text: str) -> str:
        """Return what matches a text, in which added tokens may stand."""
        pieces = [_quoted(piece) for piece in self._marks.split(text)]
        tokens = [f"<[{self._tokens[mark]}]>" for mark in self._marks.findall(text)]
        both = [x for pair in zip(pieces, [*tokens, None], strict=True) for x in pair]
        return " ".join(x for x in both if x)

    def json(self, schema: dict[str, object]) -> str:
        """Return a rule of JSON that keeps to a schema."""
        return self.rule("%json " + json.dumps({**schema, "x-guidance": STYLE}, ensure_ascii=False))

    def one_of(self, rules: Sequence[str]) -> str:
        """Return a rule of any of several."""
        return self.rule(" | ".join(rules))

    def through(self, mark: str, least: int = 0, most: int | None = None) -> str:
        """Return a rule of a text up to a mark, and the mark; the text has at least and at most so many letters."""
        count = f"{{{least},{'' if most is None else most}}}"
        if (token := self._marks.search(mark)) is not None:  # text never holds it
            text = self.rule(f"/(.|{BREAK}){count}{pattern(mark[: token.start()])}/", "T")
            return self.rule(f"{text} {self.text(mark[token.start() :])}")
        return self.rule(f"/(.|{BREAK}){count}{pattern(mark)}/", options="[lazy]")

    def text_or(self, opening: str, calls: str) -> str:
        """Return a body of any text without an opening mark, or a text up to it and then calls."""
        return f"({self.rule(f'/(.|{BREAK})*/', 'T')} | {self.through(opening)} {calls})"

    def grammar(self, start: str) -> str:
        """Return the whole grammar, which begins with this body."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def pattern(text: str) -> str:
    """Escape a text for a regular expression in a grammar."""
    return re.sub(r"([-.^$*+?(){}\[\]\\|/])", r"\\\1", text).replace("\n", BREAK)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
