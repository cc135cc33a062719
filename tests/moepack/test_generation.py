"""Text as it comes: stop strings, chats, what an interrupted answer leaves."""

import json
import re

import pytest
import torch
from gpu_stand_in import install
from support import ROOT, cli, ok
from tiny_models import save_tiny
from transformers import AutoModelForCausalLM

import moepack
from benchmarks.families import small
from moepack.chat import local_model, server, talk
from moepack.families.model_class import auto_class
from moepack.families.tokenizer import load_tokenizer
from moepack.generation import GREEDY, Session, generate
from moepack.pack.errors import InputError
from moepack.runtime.planning.options import LoadOptions
from moepack.server.own_sampling import SamplingFlags

TEMPLATE = "{% for m in messages %}<{{ m.role }}> {{ m.content }}\n{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}<a>{% endif %}"


def test_text_comes_piece_by_piece_and_is_that_of_generate(bundle):
    told = []
    text = generate(bundle, "The history of", LoadOptions(policy="static:w4"), max_new_tokens=16, tell=told.append)
    model, tokenizer = moepack.load(bundle, policy="static:w4"), load_tokenizer(bundle)
    ids = tokenizer("The history of", return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
    assert text == "".join(told) == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert len(told) > 3
    word = text.split()[3]
    stopped = generate(bundle, "The history of", LoadOptions(policy="static:w4"), max_new_tokens=16, stop=(word,))
    assert stopped == text[: text.index(word)]


def test_minimax_reads_a_text_in_parts():
    """Its cache says how many tokens it holds; transformers' own says none, and places each part at the beginning."""
    torch.manual_seed(0)
    config = small("minimax")
    config.layer_types = ["linear_attention", "full_attention"]  # as released
    model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    for weight in model.parameters():
        weight.data.mul_(4 if weight.dim() > 1 else 1)  # so that attention tells places apart
    ids = torch.randint(1, 60, (1, 40))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits[0, -1]
        for size in (1, 7, 39):
            cache = None
            for part in ids.split(size, 1):
                out = model(part, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
            assert cache.get_seq_length() == 40
            assert (out.logits[0, -1] - whole).abs().max() < 0.01 * whole.abs().max()


def test_a_chat_goes_on_from_its_cache_and_answers_the_same(bundle):
    def answers(fresh):
        with Session(bundle, LoadOptions(policy="static:w4"), chat_template=TEMPLATE) as session:
            session.load(512, 64)
            here, told, read = local_model(session, 8, GREEDY, ("\n",)), [], []
            embeddings = session.model.get_input_embeddings()
            embeddings.register_forward_hook(lambda module, args, out: read.append(out.shape[1]))

            def answer(messages, tell):
                if fresh:
                    session._cache = None
                return here(messages, tell)

            lines = ["one and two", "", "three", "/help", "/nonesuch", "/reset", "one and two", "/exit", "never"]
            talk(answer, lines=lines, tell=told.append)
            return "".join(told).split("\n"), sum(read)

    kept, fresh = answers(False), answers(True)
    assert kept[0] == fresh[0] and kept[0][0] == kept[0][2], "after /reset as at first"
    assert kept[1] < fresh[1]


@pytest.mark.parametrize("budget", [None, 40_000_000])
def test_a_chat_on_a_gpu_keeps_a_cache_of_fixed_size_while_it_fits(bundle, budget, monkeypatch):
    """Cut to a shared beginning, too; a GPU's counter of tokens is made inside a pass. Then it grows, in a budget."""
    from transformers.cache_utils import StaticCache, StaticLayer

    install(monkeypatch, computes=False)
    made = StaticLayer.lazy_initialization

    def lazy(self, *given):
        made(self, *given)
        self.cumulative_length = self.cumulative_length.clone()  # what a GPU's `.to` does

    monkeypatch.setattr(StaticLayer, "lazy_initialization", lazy)
    fixed, read = [], []
    with Session(bundle, LoadOptions(policy="static:w4", device_memory=budget), chat_template=TEMPLATE) as session:
        session.load(64, 32)
        here = local_model(session, 4, GREEDY)
        session.model.get_input_embeddings().register_forward_hook(lambda module, args, out: read.append(out.shape[1]))

        def answer(messages, tell):
            read.clear()
            text = here(messages, tell)
            fixed.append(isinstance(session._cache, StaticCache))
            return text

        talk(answer, lines=["one", "two", "/reset", "one", *["more words than there were"] * 4], tell=lambda text: None)
        assert fixed[:3] == [True] * 3 and fixed[-1] == (budget is None)
        assert read[0] < 30, "the whole chat was read again"


def test_an_interrupted_answer_is_forgotten_and_the_chat_goes_on(bundle):
    with Session(bundle, LoadOptions(policy="hotness", device_memory=20_000_000), chat_template=TEMPLATE) as session:
        session.load(256, 16)
        here, seen = local_model(session, 6, GREEDY), []

        def interrupted(messages, tell):
            seen.append(list(messages))

            def stop(text):
                if len(seen) == 1:
                    raise KeyboardInterrupt

            return here(messages, stop)

        talk(interrupted, system="Be short.", lines=["one", "two"], tell=lambda text: None)
        assert [m["content"] for m in seen[1]] == ["Be short.", "two"]
        assert session.model.moepack.counters()["worker_failures"] == 0


def test_what_cannot_chat_says_so(bundle):
    with pytest.raises(InputError, match="no chat template: give one with chat_template"):
        generate(bundle, "hi", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(InputError, match=r"does not take this chat: .*no system"):
        generate(
            bundle, "", messages=[{"role": "user", "content": "hi"}], chat_template="{{ raise_exception('no system') }}"
        )  # fmt: skip
    with pytest.raises(InputError, match=r"http://127.0.0.1:9: .*refused"):
        talk(server("http://127.0.0.1:9", None, 4, SamplingFlags(0.0)), lines=["hi"], tell=lambda text: None)


def test_the_commands(bundle, tmp_path, monkeypatch):
    from transformers import GenerationConfig

    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    said = ("generate", bundle, "--prompt", "The history of", "--max-new-tokens", "4")
    code, text, err = cli(*said)
    assert code == 0 and text.startswith("The history of") and text.endswith("\n")
    rates = re.match(
        r"prompt (\d+) tokens at [\d,.]+/s; .* answer 4 tokens at .* experts 100% bf16; ", err.splitlines()[-1]
    )
    assert rates is not None, err
    facts = json.loads(ok(cli(*said, "--json")))
    assert facts["prompt_tokens"] == int(rates[1]) and facts["new_tokens"] == 4 and facts["experts"] == {"bf16": 64}
    assert facts["tokens_per_second"] > 0
    assert facts["first_token_seconds"] * facts["prompt_tokens_per_second"] == pytest.approx(facts["prompt_tokens"])
    options = ("--chat-template", template, "--max-new-tokens", "4")
    answer = ok(cli("generate", bundle, "-p", "hi", "--chat", *options))
    own = GenerationConfig(temperature=0.9, top_k=3)
    with monkeypatch.context() as patched:
        patched.setattr(GenerationConfig, "from_pretrained", lambda *args, **more: own)
        chat = ("generate", bundle, "-p", "hi", "--chat", *options)
        drawn = cli(*chat)
        assert "moepack: sampling by generation_config.json: temperature 0.9, top_k 3\n" in drawn[2]
        assert ok(drawn) == ok(cli(*chat, "--temperature", "0.9", "--top-k", "3"))
        assert ok(cli(*chat, "--generation-config", "none")) == answer
    code, out, err = cli("chat", bundle, *options, "--temperature", "0", stdin="hi\n/nonesuch\n/exit\nnever\n")
    assert code == 0 and out == answer and "/nonesuch: there is no such command. /reset" in err
    assert "; answer 4 tokens at " in err.splitlines()[-1], "of the one answer"
    hot = ("--temperature", "2", "--max-new-tokens", "24")
    same, *others = (
        ok(cli("chat", bundle, *options[:2], *hot, stdin="hi\n/reset\nhi\n")).split("\n", 1)[0] for _ in "12"
    )
    assert [same] != others, "another seed each time"


def test_the_example_model_can_be_chatted_with(demo_model):
    """From a clone: `moepack chat examples/mini-qwen3-moe`."""
    example = ROOT / "examples" / demo_model.name
    with Session(example) as session:
        ids = session.chat([{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}])
        assert session.tokenizer.decode(ids) == "System: Be short.\nUser: hi\nAssistant:"


def test_a_chat_with_a_server(bundle):
    """The same words as here, by the official protocol; what the server refuses is said in its own words. In float32:
    packed passes and others round some BF16 numbers apart, and a token is then another."""
    pytest.importorskip("uvicorn")
    from server_fixtures import serving

    from moepack.server.options import Options

    model = moepack.load(bundle, policy="static:bf16", dtype=torch.float32)
    with serving(model, load_tokenizer(bundle), Options("mini", keys=("secret",), template=TEMPLATE)) as running:
        flags = SamplingFlags(0.7, temperature=0.9, top_k=20, min_p=0.05, repetition=1.2, seed=3)
        how = flags.over({})
        lines, there, here = ["one and two", "three"], [], []
        talk(server(f"{running.url}/v1/", "secret", 8, flags, ("\n",)), "Be short.", lines, there.append)
        with Session(bundle, LoadOptions(policy="static:bf16", dtype="float32"), chat_template=TEMPLATE) as session:
            session.load(256, 64)
            talk(local_model(session, 8, how, ("\n",)), "Be short.", lines, here.append)
        assert "".join(there) == "".join(here) and len("".join(here)) > 10
        for key, new, words in (("wrong", 8, "key"), ("secret", 1 << 20, "maximum context length")):
            with pytest.raises(InputError, match=words):
                talk(server(running.url, key, new, flags), lines=lines, tell=lambda text: None)


@pytest.mark.parametrize("family", ["jamba", "unlimited_ocr"])
def test_later_passes_of_a_prompt_know_of_the_first(family, bundle, tmp_path, monkeypatch):
    """In a budget, and in a chat's next turn: a state (jamba), the prompt's length (unlimited_ocr)."""
    torch.manual_seed(0)
    if family == "jamba":
        save_tiny(family, tmp_path)
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    else:
        config = small(family)
        model = auto_class(config).from_config(config, dtype=torch.float32).eval()
    ids = list(range(3, 43))
    with torch.inference_mode():
        right = model(input_ids=torch.tensor([ids])).logits[0, -1]
        monkeypatch.setattr("moepack.generation.load_model", lambda *arguments: model)
        session = Session(bundle, LoadOptions(device_memory=10**9))
        session.load(64, 16)
        got, _ = session._read(ids, None, 0)
        _, session._cache = session._read(ids[:24], None, 0)
        session._cached = ids[:24]
        turn, _ = session._read(ids, *session._reuse(ids, 64))
    for logits in (got, turn):
        torch.testing.assert_close(logits, right, atol=5e-6, rtol=1e-4)
