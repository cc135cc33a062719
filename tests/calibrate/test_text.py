"""Text: what a document is, that cutting it for the tokenizer changes no id, chats, and mixtures of sources."""

import io
import itertools
import json
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from moepack.calibrate.text import windows as data
from moepack.calibrate.text.documents import Conversation, documents, split_lines
from moepack.calibrate.text.tokenise import PART, Encoder, parts
from moepack.families.tokenizer import load_tokenizer
from moepack.pack.errors import InputError

WIKI = " \n = One = \n \n Text of one . \n \n = = Section = = \n \n More . \n \n = Two = \n \n Text of two = 2 = \n"


def rows(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


# --- documents


def test_a_text_is_split_at_titles_and_marks():
    def split(text):
        return list(split_lines(io.StringIO(text)))

    one, two = split(WIKI)
    assert one.startswith(" = One = \n") and one.endswith(" More . \n \n") and two == WIKI[WIKI.index(" = Two") :]
    assert split("a\n<|endoftext|>\nb\n\n\f\nc") == ["a\n", "b\n\n", "c"]
    for whole in (
        "a\n\n\nb\n",
        "a <|endoftext|>\nb",
        "x\n = Not alone = \n\ny",
        "\n = = Section = = \n\ny",
        "a\x0cb\n",
    ):
        assert split(whole) == [whole]
    assert split("") == split(" \n\n") == []


@given(st.text(alphabet="a =\n\t.", max_size=60))
def test_without_separators_nothing_is_lost(text):
    made = list(split_lines(io.StringIO(text)))
    # Only blank documents go, and only at the beginning may there be one that is not the whole.
    assert "".join(made) == (text if made and made[0] == text else text[len(text) - len("".join(made)) :])
    assert not text[: len(text) - len("".join(made))].strip()


def test_rows_that_are_lines_of_articles(tmp_path):
    """As the Hub has WikiText: an article is one document, and not each of its lines."""
    import pyarrow
    import pyarrow.parquet

    def table(*texts):
        pyarrow.parquet.write_table(pyarrow.table({"text": list(texts)}), tmp_path / "t.parquet")
        return list(documents(str(tmp_path / "t.parquet")))

    assert table("", " = One = \n", "", " a \n", "", " = = S = = \n", "", " b \n", "", " = Two = \n", "", " c \n") == [
        " = One = \n\n a \n\n = = S = = \n\n b \n\n",
        " = Two = \n\n c \n",
    ]
    assert table("", "first", "", " = One = \n", "") == ["", "first", "", " = One = \n", ""]
    assert table() == []


def test_json_in_its_forms(tmp_path):
    items = [{"text": "a"}, {"text": "b"}]
    (tmp_path / "lines.json").write_text("\n".join(map(json.dumps, items)))
    (tmp_path / "list.json").write_text(json.dumps(items, indent=1))
    (tmp_path / "line.json").write_text(json.dumps(items))
    (tmp_path / "one.json").write_text(json.dumps(items[0], indent=1))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"text": "a"}\n')
    for name, wanted in (("lines", "ab"), ("list", "ab"), ("line", "ab"), ("one", "a")):
        assert list(documents(str(tmp_path / f"{name}.json"))) == list(wanted)
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfa")
    (tmp_path / "bom.md").write_bytes(b"\xef\xbb\xbfa")
    for name in ("bom.jsonl", "bom.txt", "bom.md"):
        assert list(documents(str(tmp_path / name))) == ["a"]
    for text, word in (
        ('{"text": "a"}\n{"text"\n', "line 2: "),
        ("[1]\n", "not objects with a column 'text'"),
        ('{"text": 3}\n', "no 'text' of text; they have text"),
        ('{"messages": ["x"]}\n', "they have messages"),
        ('{"messages": [{"role": "user"}], "tools": "{"}\n', "cannot be read"),
    ):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(InputError, match=word):
            list(documents(str(tmp_path / "bad.jsonl")))
    (tmp_path / "half.jsonl").write_text('{"text": "\\ud800"}\n')
    with pytest.raises(InputError, match="half a pair of surrogates"):
        data.windows(str(tmp_path / "half.jsonl"), byte_level(), 4, 1)


def test_what_is_here_and_no_text_is_not_sought_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr("moepack.calibrate.text.documents.on_hub", lambda *_, **__: pytest.fail("the Hub was asked"))
    table = tmp_path / "x.csv"
    table.write_text("text\na\n")
    with pytest.raises(InputError, match=r"x\.csv: a file of text is a \.txt, .* or \.parquet: convert or rename it"):
        list(documents(str(table)))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "x.csv").write_bytes(b"text\n\xff\n")
    with pytest.raises(InputError, match="set: cannot be read as a data set's directory"):
        list(documents(str(tmp_path / "set")))


def test_a_data_set_is_streamed(tmp_path, monkeypatch):
    """A directory, by its split and column; an endless one is read only as far as needed."""
    import datasets

    (tmp_path / "set").mkdir()
    rows(tmp_path / "set" / "train.jsonl", *({"body": f"train {i}"} for i in range(3)))
    rows(tmp_path / "set" / "test.jsonl", {"body": "test"})
    assert list(documents(f"{tmp_path}/set:::body")) == ["train 0", "train 1", "train 2"]
    assert list(documents(f"{tmp_path}/set::test:body")) == ["test"]
    with pytest.raises(InputError, match="no 'text' of text; they have body"):
        list(documents(f"{tmp_path}/set"))
    given = []

    def endless(*args, streaming, **kwargs):
        assert streaming
        for i in itertools.count():
            given.append(i)
            yield {"text": "word " * 20}

    monkeypatch.setattr(datasets, "load_dataset", endless)
    made = data.windows(f"{tmp_path}/set", byte_level(), 16, 5)
    assert made.shape == (5, 16) and len(given) <= 80


# --- tokens


def byte_level(bos=False):
    """As GPT-2's and Qwen's: words with the space before them."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return trained(tokenizer, trainers.BpeTrainer(special_tokens=["<s>", "</s>"], vocab_size=400), bos)


def one_word():
    """As Llama-2's and Mixtral's: a space before every text, and the whole text merged as one word."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # words in training only
    tokenizer = Tokenizer.from_str(
        trained(
            tokenizer, trainers.BpeTrainer(special_tokens=["<unk>", "</s>"], vocab_size=300)
        ).backend_tokenizer.to_str()
    )
    bare = json.loads(tokenizer.to_str())
    bare["pre_tokenizer"] = None
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(bare)), eos_token="</s>")


def pieces():
    """As T5's: words of probable pieces, each with a space before it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(special_tokens=["<unk>", "</s>"], unk_token="<unk>", vocab_size=200)
    return trained(tokenizer, trainer)


def words():
    """As BERT's: white space is dropped."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return trained(tokenizer, trainers.WordPieceTrainer(special_tokens=["<unk>", "</s>"], vocab_size=300))


def trained(tokenizer, trainer, bos=False):
    texts = [
        "the cat sat on the mat , 12 cats sat there .\n\n  def f(x):\n    return x + 1\n",
        WIKI,
        "他们说。我们走。",
    ]
    tokenizer.train_from_iterator(texts * 5, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>" if bos else None, eos_token="</s>")


KINDS = {
    "byte_level": byte_level, "one_word": one_word, "pieces": pieces, "words": words
}  # fmt: skip
WORDS = st.sampled_from(
    ["the", "cat", "sat,", "mats.", "12", "3.5", "def", "x", "他们说。我们走。", "é", "🙂", "don't", "</s>", "= ="]
)
GAPS = st.sampled_from([" "] * 8 + ["\n", "  ", "\n\n", " \n ", "\t", "    "])


@pytest.fixture(scope="module")
def encoders():
    return {name: Encoder(make()) for name, make in KINDS.items()}


@given(st.lists(st.tuples(WORDS, GAPS), min_size=60, max_size=300), st.sampled_from(sorted(KINDS)))
@settings(max_examples=80)
def test_ids_of_the_parts_are_those_of_the_whole(encoders, text, kind):
    whole, encode = "".join(itertools.chain(*text)), encoders[kind].encode
    made = list(parts(whole, encode, size=100, around=60))
    assert [i for part in made for i in encode(part)] == encode(whole)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_long_text_is_cut_and_its_ids_stay(encoders, kind, text):
    whole, encode = "\n".join(d for d in documents(str(text)) if isinstance(d, str))[: 10 * PART], encoders[kind].encode
    made = list(parts(whole, encode))
    assert len(made) >= 9 and max(map(len, made)) < 1.1 * PART
    assert [i for part in made for i in encode(part)] == encode(whole)
    # What the check is for: parts of a fixed length, at any place, have other ids.
    naive = [i for at in range(0, len(whole), PART) for i in encode(whole[at : at + PART])]
    assert naive != encode(whole)


def test_documents_begin_and_end_as_the_tokenizer_has_it(tmp_path):
    source = rows(tmp_path / "t.jsonl", {"text": "the cat"}, {"text": ""}, {"text": "sat on"})
    for tokenizer, begin in ((byte_level(bos=True), [0]), (byte_level(), [])):
        encoder = Encoder(tokenizer)
        assert (encoder.begin, encoder.end) == (begin, [1])
        stream = [(n, i) for n, ids in encoder.stream(source) for i in ids]
        wanted = [(n, i) for n, t in enumerate(("the cat", "sat on")) for i in [*begin, *encoder.encode(t), 1]]
        assert stream == wanted
        made, owners = data.document_windows(source, tokenizer, 3, 99)
        count = len(wanted) // 3 * 3
        assert list(zip(owners.flatten().tolist(), made.flatten().tolist(), strict=True)) == wanted[:count]


# --- chats

TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}{{ eos_token + '\\n' }}"
)
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
OTHER = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def chats(template, bos=False):
    tokenizer = byte_level(bos)
    tokenizer.chat_template = template
    return tokenizer


def test_chats_keep_their_tool_calls(tmp_path):
    def chat(call):
        return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]

    tools = [{"name": "add"}]
    source = rows(
        tmp_path / "c.jsonl",
        {"messages": chat(CALL)}, {"messages": chat(OTHER), "tools": json.dumps(tools)}, {"messages": []}
    )  # fmt: skip
    assert list(documents(source)) == [Conversation(chat(CALL)), Conversation(chat(OTHER), tools), Conversation([])]
    tokenizer = chats(TEMPLATE)
    texts = ['[user]x[assistant]weather{"city": "Bonn"}', 'T[{"name": "add"}][user]x[assistant]add{"a": 1}']
    wanted = [[n, *tokenizer(f"{t}</s>\n")["input_ids"]] for n, t in enumerate(texts)]
    stream = Encoder(tokenizer).stream(source)
    made = [[n, *(i for _, ids in group for i in ids)] for n, group in itertools.groupby(stream, key=lambda p: p[0])]
    assert made == wanted, "and </s> is not written twice"
    # Arrow gives all objects of a column the same fields: those that are null are no fields of this one.
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": chat(CALL)}, {"messages": chat(OTHER)}]), tmp_path / "c.parquet"
    )
    assert list(documents(str(tmp_path / "c.parquet"))) == [Conversation(chat(CALL)), Conversation(chat(OTHER))]


def test_chats_begin_once_and_end_once(tmp_path):
    source = rows(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "the cat"}]})
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for template, text in ((plain, "the cat"), ("<s>" + plain, "the cat"), (plain + "</s>", "the cat")):
        tokenizer = chats(template, bos=True)
        made = [i for _, ids in Encoder(tokenizer).stream(source) for i in ids]
        assert made == [0, *tokenizer(text, add_special_tokens=False)["input_ids"], 1]


def test_chats_that_cannot_be_had(tmp_path):
    source = rows(tmp_path / "c.jsonl", {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]})
    for template, word in (
        (None, "holds chats, and this model's tokenizer has no chat template"),
        ("{{ raise_exception('no such role') }}", "does not take a chat: no such role"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", "leaves out tool calls .here of 'weather'"),
    ):
        with pytest.raises(InputError, match=word):
            data.windows(source, chats(template), 2, 1)


# --- mixtures


def test_windows_of_one_source_are_as_they_were(demo_model, text, evaluation):
    """Text of rows, equal weights, no BOS: the windows that earlier bundles were calibrated on, written out here."""
    tokenizer, length, samples = load_tokenizer(demo_model), 64, 9
    pools = []
    for k, path in enumerate((text, evaluation)):
        stream = []
        for line in path.read_text().splitlines():
            stream += [*tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"], 0]
            if len(stream) >= 8 * samples * length:
                break
        pool = torch.tensor(stream[: min(len(stream) // length, 8 * samples) * length]).view(-1, length)
        order = list(range(len(pool)))
        random.Random(f"3/{k}").shuffle(order)
        pools.append(pool[order])
    made = data.calibration_windows([str(text), str(evaluation)], tokenizer, samples, length, seed=3)
    assert torch.equal(made.ids, torch.cat([pools[0][:5], pools[1][:4]])) and made.taken == (5, 4)


def mixture(sizes, samples, weights):
    """Windows of sources of these sizes; a token names its source."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "windows", lambda source, *_, **__: torch.full((sizes[int(source)], 2), int(source)))
        return data.calibration_windows([str(i) for i in range(len(sizes))], None, samples, 2, 0, weights)


def test_mixtures_by_weight():
    assert mixture([99, 99], 9, [2, 1]).taken == (6, 3)
    assert mixture([99, 99, 99], 8, [1, 1, 1]).taken == (3, 3, 2)
    assert mixture([99, 99], 10, [0.5, 4.5]).taken == (1, 9)
    assert mixture([2, 99, 99], 9, [2, 1, 1]).taken == (2, 4, 3), "what one does not have, the others give"
    assert mixture([2, 3], 9, [1, 5]).taken == (2, 3)
    assert mixture([99, 99], 3, [2, 1]).ids.tolist() == [[0, 0], [0, 0], [1, 1]]
