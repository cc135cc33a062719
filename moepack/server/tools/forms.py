"""Which form a model writes its calls in, by its chat template, and what an answer in it is read and held to by."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from . import thinking
from .calls import CallForm
from .delimited import DEEPSEEK, DEEPSEEK_V3, HERMES, KIMI
from .harmony import HARMONY
from .lark import BREAK, Lark
from .parts import AnswerReader, JsonOrCalls, PlainReader, Schema, Tools
from .tagged import DEEPSEEK_V4, DEEPSEEK_V32, GLM, QWEN_CODER
from .thinking import Thinking

# A new form is one line here. The first whose sign a template holds is the model's: GLM's and Qwen3-Coder's templates
# have Hermes's mark too, and DeepSeek V3's has that of V3.1.
FORMS: tuple[CallForm, ...] = (
    HARMONY,
    DEEPSEEK_V32,
    DEEPSEEK_V4,
    DEEPSEEK_V3,
    DEEPSEEK,
    KIMI,
    GLM,
    QWEN_CODER,
    HERMES,
)


class Manners:
    """How one model writes.

    Attributes:
        form: its form of calls; None if the template has none that is known.
        thinks: whether it may write its thoughts between tags before its answer.
    """

    def __init__(self, template: str, added: Mapping[str, int], special: Collection[str]) -> None:
        """Read the model's template.

        Args:
            template: the source of the chat template; "" without one.
            added: the tokens that were added to the tokenizer's vocabulary, by name.
            special: those of them that decoding leaves out.
        """
        # DeepSeek's signs are a fence or a word, which other templates may hold: its marks they do not.
        found = (form for form in FORMS if form.sign in template and form.marks[0] in template)
        self.form = next(found, None)
        self.thinks = self.form is not HARMONY and thinking.CLOSE in template
        marks = (*(() if self.form is None else self.form.marks), thinking.OPEN, thinking.CLOSE)
        self._tokens = {mark: added[mark] for mark in marks if mark in added}
        self.shows_special = any(mark in special for mark in marks)  # whether decoding must leave special tokens in

    @property
    def reasons(self) -> bool:
        """Whether it may reason before its answer."""
        return self.thinks or self.form is HARMONY

    def reader(self, tools: Tools, prompt: str, is_json: bool = False) -> AnswerReader:
        """Make a reader of one answer to a rendered prompt; `is_json` says that it is JSON unless it is calls."""
        calls = self.form is not None and (bool(tools.functions) or self.form is HARMONY)
        inner = self.form.reader(tools.functions) if self.form is not None and calls else PlainReader()
        if is_json and calls and self.form is not HARMONY:
            inner = JsonOrCalls(inner)
        return Thinking(inner, _opened(prompt)) if self.thinks else inner

    def grammar(self, tools: Tools, prompt: str, schema: Schema | None = None) -> str:
        """Write the grammar of an answer whose calls keep to their schemas, after it has thought if the model does.

        An answer without calls keeps to `schema`, if there is one.
        """
        assert self.form is not None
        lark = Lark(self._tokens)
        answer = self.form.answer(lark, tools, schema)
        return self._behind_thought(lark, answer, prompt) if self.thinks else lark.grammar(answer)

    def json_grammar(self, schema: Schema, prompt: str) -> str | None:
        """Write the grammar of an answer in JSON by a schema, behind what the model writes first; None if nothing."""
        lark = Lark(self._tokens)
        if self.form is HARMONY:
            return lark.grammar(HARMONY.final(lark, lark.json(schema)))
        return self._behind_thought(lark, lark.json(schema), prompt) if self.thinks else None

    def _behind_thought(self, lark: Lark, answer: str, prompt: str) -> str:
        thought = lark.through(thinking.CLOSE)
        first = thought if _opened(prompt) else f"({lark.text(thinking.OPEN)} {thought})?"
        breaks = lark.rule(f"/{BREAK}{{0,2}}/", "T")
        return lark.grammar(f"{first} {breaks} {answer}")


def _opened(prompt: str) -> bool:
    return prompt.rstrip().endswith(thinking.OPEN)
