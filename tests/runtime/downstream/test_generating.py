"""How programs generate (docs/in-other-programs.md, "Generating"): token by token what the plain model gives."""

import json
import socket
import threading
import time
import urllib.request

import pytest
import torch
from support import HOT, PATIENCE, at_once, ids
from transformers import ContinuousBatchingConfig, TextIteratorStreamer, pipeline

PROMPT = "The history of"
GREEDY = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
SAMPLED = {"do_sample": True, "temperature": 0.8}
STATIC = {"cache_implementation": "static", "disable_compile": True}
LOOKUP = {"prompt_lookup_num_tokens": 3}
GROUPS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}


@pytest.fixture(scope="session")
def agree(plain, free, hot):
    """Runs `generate` with the same arguments on the plain model and on bundles, and compares."""

    def check(inputs=None, **options):
        options = {**GREEDY, **options}
        made = []
        for model in (plain, free, hot):
            torch.manual_seed(0)
            made.append(model.generate(ids(12) if inputs is None else inputs, **options))
        assert made[0].shape[1] > 8 and torch.equal(made[0], made[1]) and torch.equal(made[0], made[2]), options

    return check


def asking(row, *asked):
    return pytest.param(asked, marks=pytest.mark.row(row))


@pytest.mark.parametrize(
    "asked",
    [
        asking("`generate`: greedy", {}),
        asking("`generate`: sampling, several sequences", {**SAMPLED, "top_k": 20, "num_return_sequences": 3}),
        asking("`generate`: beams, sampled beams", {"num_beams": 3}, {"num_beams": 3, "do_sample": True}),
        asking("`generate`: a static cache; no cache", STATIC, {"use_cache": False}),
        asking("`generate`: `prompt_lookup_num_tokens`, `assistant_early_exit`", LOOKUP, {"assistant_early_exit": 2}),
    ],
)
def test_generate(row, agree, asked):
    for options in asked:
        agree(**options)


@pytest.mark.parametrize(
    "options",
    [
        asking("`generate`: contrastive search", {"penalty_alpha": 0.6, "top_k": 4}),
        asking("`generate`: DoLa", {"dola_layers": "low"}),
        asking("`generate`: groups of beams", GROUPS),
    ],
)
def test_what_is_no_longer_in_transformers(row, free, hot, options):
    for model in (free, hot):
        row.refuses(model.generate, ids(4), **options[0])


@pytest.mark.row("`generate`: an assistant, plain or the same bundle at `w1`")
def test_assistants(row, agree, plain, another):
    for assistant in (plain, another(policy="static:w1"), another(policy="static:w1", device_memory="30MB")):
        agree(assistant_model=assistant)


@pytest.mark.row("`generate`: a streamer")
def test_streamer(row, free, hot, plain, tokenizer):
    texts = []
    for model in (plain, free, hot):
        streamer = TextIteratorStreamer(tokenizer, timeout=PATIENCE)  # a thread that failed ends nothing
        options = {"streamer": streamer, **GREEDY}
        worker = threading.Thread(target=model.generate, args=(ids(8),), kwargs=options)
        worker.start()
        texts.append(list(streamer))
        worker.join()
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) > 4


@pytest.mark.row("`generate`: a batch with padding")
def test_padding(row, agree, tokenizer):
    batch = tokenizer(["The history of the", "One"], return_tensors="pt", padding=True, padding_side="left")
    assert not batch["attention_mask"].all()
    agree(batch["input_ids"], attention_mask=batch["attention_mask"])


@pytest.mark.row("`generate`: `inputs_embeds`; `prefill_chunk_size`")
def test_embeddings_and_chunks(row, agree, plain, free, hot):
    agree(prefill_chunk_size=4)
    made = [m.generate(inputs_embeds=m.get_input_embeddings()(ids(12)), **GREEDY) for m in (plain, free, hot)]
    assert torch.equal(made[0], made[1]) and torch.equal(made[0], made[2])


@pytest.mark.row("`generate` in several threads")
def test_threads(row, plain, free, hot):
    want = [plain.generate(ids(10, s), **GREEDY) for s in range(4)]
    for model in (free, hot):
        got = {}

        def work(seed, model=model, got=got):
            got[seed] = model.generate(ids(10, seed), **GREEDY)

        at_once(work, 4)
        assert all(torch.equal(want[s], got[s]) for s in range(4))


@pytest.mark.row("`generate_batch`, continuous batching")
def test_continuous_batching(row, plain, another, hot):
    prompts = [ids(5)[0].tolist(), ids(7, 1)[0].tolist()]

    def run(model):
        config = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64, use_cuda_graph=False)
        made = model.generate_batch(prompts, max_new_tokens=4, continuous_batching_config=config)
        return [made[name].generated_tokens for name in sorted(made)]

    assert run(another()) == run(plain)
    row.refuses(run, hot)


@pytest.mark.row('`pipeline("text-generation")`, by model and by path')
def test_pipeline(row, bundle, plain, free, hot, tokenizer):
    def text(model, **options):
        options = {"tokenizer": tokenizer, **options}
        made = pipeline("text-generation", model=model, **options)(PROMPT, max_new_tokens=8, do_sample=False)
        return str(made[0]["generated_text"])

    want = text(plain)
    assert text(free) == text(hot) == text(str(bundle)) == want
    assert text(str(bundle), model_kwargs=dict(HOT)) == want


@pytest.mark.row("chat and completions through `transformers serve`", needs=["fastapi", "uvicorn", "openai"])
def test_transformers_serve(row, bundle, demo_model, monkeypatch):
    """Over HTTP. The example has no chat template: the test gives it one."""
    from transformers.cli.serve import Serve

    with socket.socket() as free_port:
        free_port.bind(("127.0.0.1", 0))
        port = free_port.getsockname()[1]

    def ask(path, body):
        data = json.dumps({"max_tokens": 6, "temperature": 0, **body}).encode()
        at = urllib.request.Request(f"http://127.0.0.1:{port}/v1/{path}", data, {"content-type": "application/json"})
        with urllib.request.urlopen(at, timeout=PATIENCE) as answer:
            return json.load(answer)["choices"][0]

    said = []
    for path, budget in ((demo_model, False), (bundle, False), (bundle, True)):
        for name, value in (("MOEPACK_POLICY", HOT["policy"]), ("MOEPACK_DEVICE_MEMORY", HOT["device_memory"])):
            monkeypatch.setenv(name, value) if budget else monkeypatch.delenv(name, raising=False)
        server = Serve(force_model=str(path), device="cpu", port=port, host="127.0.0.1", non_blocking=True)
        try:
            for loaded in server._model_manager.loaded_models.values():
                loaded.processor.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
            while not server.server.started:
                time.sleep(0.01)
            model = {"model": str(path)}
            text = ask("completions", {**model, "prompt": PROMPT})["text"]
            chat = ask("chat/completions", {**model, "messages": [{"role": "user", "content": PROMPT}]})
            said.append((text, chat["message"]["content"]))
        finally:
            server.kill_server()
    assert said[0] == said[1] == said[2] and all(said[0])


@pytest.mark.row("`HFLM` of lm-eval, by model and by path", needs=["lm_eval"])
def test_lm_eval(row, bundle, demo_model, free, hot, plain, tokenizer):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    pairs = [(PROMPT, " the United States"), ("One plus", " one is two")]

    def score(model, **options):
        by = {"tokenizer": tokenizer} if not isinstance(model, str) else {"device": "cpu"}
        asked = [Instance("loglikelihood", {}, pair, n) for n, pair in enumerate(pairs)]
        return HFLM(pretrained=model, batch_size=2, **by, **options).loglikelihood(asked, disable_tqdm=True)

    want = score(plain)
    assert score(free) == score(hot) == score(str(bundle)) == score(str(demo_model)) == want
    assert score(str(bundle), **HOT) == want
    assert score(str(bundle), policy="static:w1") != want
