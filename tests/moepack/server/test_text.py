"""Tokens to text in pieces: whole characters, no part of a stop string, nothing lost."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moepack.server.batching.text import BROKEN, Pieces, Stops
from moepack.server.batching.tokens import Tokens

ROOT = Path(__file__).resolve().parents[3]
TEXTS = st.text(alphabet=st.one_of(st.sampled_from("ab é€😀\n界"), st.characters(codec="utf-8")), max_size=30)


@pytest.fixture(scope="module")
def tokens():
    from transformers import AutoTokenizer

    return Tokens(AutoTokenizer.from_pretrained(ROOT / "examples" / "mini-qwen3-moe"))


@given(prompt=TEXTS, text=TEXTS)
@settings(max_examples=60)
def test_pieces_are_whole_characters_and_make_up_the_text(tokens, prompt, text):
    text = text.replace(BROKEN, "x")
    pieces = Pieces(tokens.decode, tokens.encode(prompt, False, "p"))
    found = [pieces.push(t) for t in tokens.encode(text, False, "p")]
    assert not any(BROKEN in piece for piece in found)
    assert "".join(found) + pieces.end() == text


def test_half_a_character_at_the_end(tokens):
    whole = tokens.encode("x😀", False, "p")
    assert len(whole) > 3, "this tokenizer has no token for it"
    pieces = Pieces(tokens.decode, [])
    assert [pieces.push(t) for t in whole[:-1]] == ["x"] + [""] * (len(whole) - 2)
    assert set(pieces.end()) == {BROKEN}
    assert Pieces(tokens.decode, whole[:-1]).push(whole[1]) == ""  # a prompt that ends within a character


def test_bytes_that_never_make_a_character_do_not_wait_for_ever(tokens):
    broken = tokens.encode("😀", False, "p")[0]
    pieces = Pieces(tokens.decode, [])
    found = "".join(pieces.push(broken) for _ in range(200))
    assert 100 < len(found) <= 200 and set(found) == {BROKEN}
    assert len(found + pieces.end()) == 200


def test_a_space_that_a_word_begins_with():
    """As sentencepiece decodes: the first word loses its space."""
    words = ["▁The", "▁his", "tory", "▁of"]
    pieces = Pieces(lambda ids: "".join(words[i] for i in ids).replace("▁", " ")[1:], [0])
    assert [pieces.push(i) for i in (1, 2, 3)] == [" his", "tory", " of"]


def reference(text, stops):
    """The text up to the stop string that ends first; of two that end together, the longer."""
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return text[: min(ends)[1]] if ends else text


@given(
    parts=st.lists(st.text(alphabet="ab", max_size=4), max_size=12),
    stops=st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=3),
)
@settings(max_examples=200)
def test_stops(parts, stops):
    """The shown text ends before the first stop string, however the text is split."""
    held, shown, text = Stops(stops), "", ""
    for part in parts:
        text += part
        more, stopped = held.push(part)
        shown += more
        assert stopped == any(s in text for s in stops)
        if stopped:
            break
        assert text.startswith(shown) and len(text) - len(shown) < max((len(s) for s in stops), default=1)
    else:
        shown += held.end()
    assert shown == reference(text, stops)


def test_tokens_as_they_are_shown(tokens):
    ids = tokens.encode(" the😀", False, "p")
    assert tokens.shown(ids[0]) == " the" and tokens.raw(ids[0]) == b" the"
    assert b"".join(tokens.raw(t) for t in ids[1:]) == "😀".encode()
    assert tokens.shown(ids[1]).startswith("bytes:\\x")
    assert tokens.raw(0) == b"<|endoftext|>" and tokens.decode([0]) == ""
    assert tokens.raw(1 << 30) == b""


def test_tokens_of_byte_fallback():
    names = ["</s>", "▁the", "<0xF0>", "x"]
    tokenizer = SimpleNamespace(
        eos_token_id=0, all_special_ids=[0], added_tokens_decoder={}, convert_ids_to_tokens=names.__getitem__
    )
    found = Tokens(tokenizer)
    assert [found.raw(t) for t in range(4)] == [b"</s>", b" the", b"\xf0", b"x"] and found.ends == {0}
