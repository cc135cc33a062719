"""What bits cost in answers: questions that a model of this size can answer, each with four options.

The answer is the option to which the model gives the most probability, with the mark that ends it. Numbers, names and
words are drawn from a seed.
"""

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from moepack.pack.errors import NotFiniteError

Logits = Callable[[Tensor], Tensor]  # int64 [rows, tokens] to [rows, tokens, vocabulary]

_OPTIONS = 4
_COUNTRIES = """
France: Paris, Germany: Berlin, Italy: Rome, Spain: Madrid, Portugal: Lisbon, Greece: Athens, Austria: Vienna,
Poland: Warsaw, Russia: Moscow, Ireland: Dublin, Norway: Oslo, Sweden: Stockholm, Finland: Helsinki,
Denmark: Copenhagen, Belgium: Brussels, Hungary: Budapest, Romania: Bucharest, Bulgaria: Sofia, Ukraine: Kyiv,
Turkey: Ankara, Egypt: Cairo, Kenya: Nairobi, Iran: Tehran, Iraq: Baghdad, Japan: Tokyo, China: Beijing,
India: New Delhi, Thailand: Bangkok, Vietnam: Hanoi, Peru: Lima, Chile: Santiago, Cuba: Havana, Canada: Ottawa,
Australia: Canberra
"""
_CAPITALS = dict(re.findall(r"(\w+): (\w[\w ]*)", _COUNTRIES))
_WORDS = "apple river stone cloud chair green seven horse paper window garden silver bottle candle bridge music"
_NAMES = ("Tom", "Anna", "Lucy", "Omar", "Maria", "Ben")
_THINGS = ("apples", "books", "coins", "shells", "stamps", "marbles")
_KEYS = ("name", "colour", "city", "animal")
_VALUES = ("Ada", "blue", "Rome", "horse", "green", "Oslo", "Max", "goat")


@dataclass(frozen=True, slots=True)
class Question:
    """A text, the texts that may go on from it, and which of them is right."""

    kind: str
    prompt: str
    options: tuple[str, ...]
    answer: int


def questions(each: int, seed: int = 0) -> list[Question]:
    """`each` different questions of every kind: capitals, sums in words, copying, and JSON from a sentence.

    Raises:
        ValueError: there are fewer capitals.
    """
    if each > len(_CAPITALS):
        raise ValueError(f"there are {len(_CAPITALS)} capitals to ask for, and not {each}")
    draw = random.Random(seed)
    asked: list[Question] = []
    for kind in (_capital, _sum, _copy, _json):
        by_prompt: dict[str, Question] = {}
        while len(by_prompt) < each:
            question = kind(draw)
            by_prompt.setdefault(question.prompt, question)
        asked += by_prompt.values()
    return asked


def answered(logits: Logits, tokenizer: PreTrainedTokenizerBase, asked: Sequence[Question]) -> dict[str, list[bool]]:
    """Whether each question was answered right, by kind."""
    right: dict[str, list[bool]] = {}
    for question in asked:
        scores = list(_scores(logits, tokenizer, question))
        if not all(map(math.isfinite, scores)):
            raise NotFiniteError(repr(question.prompt), "has an answer whose probability is not finite")
        right.setdefault(question.kind, []).append(scores.index(max(scores)) == question.answer)
    return right


def _scores(logits: Logits, tokenizer: PreTrainedTokenizerBase, question: Question) -> Iterator[float]:
    """The logarithm of the probability of each option.

    Options are rows of one pass, filled up at their ends, where a causal model does not look.
    """
    prompt = tokenizer.encode(question.prompt, add_special_tokens=False)
    options = [tokenizer.encode(option, add_special_tokens=False) for option in question.options]
    most = max(map(len, options))
    rows = [prompt + added + added[-1:] * (most - len(added)) for added in options]
    with torch.no_grad():
        found = logits(torch.tensor(rows))[:, len(prompt) - 1 : -1].float().log_softmax(-1)
    for row, added in zip(found, options, strict=True):
        yield float(row[: len(added)].gather(1, torch.tensor(added)[:, None]).sum())


def _question(draw: random.Random, kind: str, prompt: str, right: str, wrong: Sequence[str]) -> Question:
    options = [right, *wrong[: _OPTIONS - 1]]
    draw.shuffle(options)
    return Question(kind, prompt, tuple(options), options.index(right))


def _capital(draw: random.Random) -> Question:
    country, *others = draw.sample(sorted(_CAPITALS), _OPTIONS)
    wrong = [f" {_CAPITALS[other]}." for other in others]
    return _question(draw, "capitals", f"The capital of {country} is", f" {_CAPITALS[country]}.", wrong)


def _sum(draw: random.Random) -> Question:
    name, things = draw.choice(_NAMES), draw.choice(_THINGS)
    left, right = draw.randint(2, 20), draw.randint(2, 20)
    prompt = (
        f"Question: {name} has {left} {things} and finds {right} more. How many {things} does {name} have now?\n"
        f"Answer: {left} + {right} ="
    )
    below = draw.randint(0, _OPTIONS - 1)  # so that no rank among the options is likelier to be right
    offsets = [-by for by in range(1, below + 1)] + list(range(1, _OPTIONS - below))
    return _question(draw, "sums", prompt, f" {left + right}\n", [f" {left + right + by}\n" for by in offsets])


def _copy(draw: random.Random) -> Question:
    words = draw.sample(_WORDS.split(), 7)
    listed, at = " ".join(words), draw.randint(2, 6)
    prompt = f"Copy the line.\nLine: {listed}\nCopy: {' '.join(words[:at])}"
    others = [f" {word}" for word in draw.sample(words[:at] + words[at + 1 :], _OPTIONS - 1)]
    return _question(draw, "copying", prompt, f" {words[at]}", others)


def _json(draw: random.Random) -> Question:
    values = dict(zip(_KEYS, draw.sample(_VALUES, len(_KEYS)), strict=True))
    key = draw.choice(_KEYS)
    said = ", ".join(f"the {name} is {value}" for name, value in values.items())
    prompt = f'Write the facts as JSON.\nFacts: {said}.\nJSON: {{"{key}": "'
    wrong = [json.dumps(value)[1:] for name, value in values.items() if name != key]
    return _question(draw, "JSON", prompt, json.dumps(values[key])[1:], wrong)
