"""Kept prompts: the store against a model of it, answers that are the same bits, waiting for a chunk, and room."""

import concurrent.futures
import contextlib
import copy
import json
import socket

import hypothesis.strategies as st
import pytest
import torch
from arithmetic import said
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from kept_prompts import MOST, STEP, SYSTEM, model_of, read, scheduled
from live_models import least, wait_for
from server_fixtures import NAME, post, serving
from support import load_for_logits
from tiny_models import WITH_STATES

import moepack
from moepack.runtime.planning.exceeded import BudgetExceeded
from moepack.server.batching import engine as engine_module
from moepack.server.batching.engine import Engine, StepInput
from moepack.server.batching.jobs import Job
from moepack.server.batching.packed_cache import PackedKvCache
from moepack.server.batching.prefixes import CHUNK, STATES, Prefixes, chunk_keys
from moepack.server.options import Limits, Options, Sampling

# --- the store


class Store(RuleBasedStateMachine):
    """Chunks of one layer, whose keys hold the tokens that lead to them, beside a list in the order of their use.

    The states after a chunk take as many bytes as two chunks.
    """

    MOST = 5  # chunks of 16 bytes a token

    def __init__(self):
        super().__init__()
        self.store = Prefixes(self.MOST * CHUNK * 16)
        self.used = []  # what is kept, by the letters up to it, behind states a "s"; the least recently used first

    def _found(self, letters):
        """Find a prompt, and compare with the model; what is found is used."""
        found = self.store.find([_key(n) for n in letters])
        have = [letters[: n + 1] for n in range(len(letters)) if letters[: n + 1] in self.used]
        assert [_letters(chunk) for chunk in found] == have
        self._use(have)
        return found, have

    def _use(self, have, *states):
        self.used = [one for one in self.used if one not in (*have, *states)] + [*states, *have[::-1]]

    def _fits(self, size, spared):
        while sum(map(_size, self.used)) + size > self.MOST:
            if self.used[0] in spared:
                return False
            del self.used[0]
        return True

    @rule(letters=st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple))
    def keep(self, letters):
        found, have = self._found(letters)
        for n in range(len(found), len(letters)):
            fits = self._fits(1, have)
            tensor = torch.tensor(letters[: n + 1]).float().sum() * torch.zeros(1, 1, CHUNK, 2)
            tensor[0, 0, : n + 1, 0] = torch.tensor(letters[: n + 1]) + 1.0
            assert self.store.add(found, _key(letters[n]), {0: (tensor, tensor + 1)}) is fits
            tensor.fill_(-1)  # the store has copies
            if not fits:
                return
            have.append(letters[: n + 1])
            self._use(have)
            assert _letters(found[-1]) == letters[: n + 1]

    @rule(letters=st.lists(st.integers(0, 2), min_size=1, max_size=7).map(tuple), count=st.integers(1, 7))
    def keep_states(self, letters, count):
        found, have = self._found(letters)
        if count > len(found):
            return
        states = (*letters[:count], "s")
        fits = states in self.used or self._fits(2, have)
        made = self.store.add_states(found, count, {0: (torch.zeros(32 * CHUNK // 4),)})
        assert (made is not None) is fits
        if fits and states not in self.used:
            self._use(have, states)

    @rule(letters=st.lists(st.integers(0, 2), max_size=7).map(tuple))
    def go_on(self, letters):
        """From the last states; others of the same prompt leave before."""
        found, have = self._found(letters)
        count = max((n for n in range(len(have) + 1) if (*letters[:n], "s") in self.used), default=0)
        assert self.store.deepest(found) == count
        if count:
            self._use(have, (*letters[:count], "s"))

    @rule(letters=st.lists(st.integers(0, 2), max_size=7).map(tuple))
    def find(self, letters):
        self._found(letters)

    @rule()
    def evict(self):
        assert self.store.evict() is bool(self.used)
        self.used = self.used[1:]

    @invariant()
    def bytes_are_exact(self):
        held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for c in self.store._chunks.values()
                for given in c.layers.values() for t in given}  # fmt: skip
        assert sum(held.values()) == self.store.bytes == sum(map(_size, self.used)) * CHUNK * 16 <= self.store.most
        paths = {c.number: _letters(c) for c in self.store._chunks.values() if c.key[1] != STATES}
        assert [paths.get(c.number) or (*paths[c.key[0]], "s") for c in self.store._chunks.values()] == self.used
        assert all(one[:-1] in self.used for one in self.used if one[:-1]), "something outlived the chunk before it"
        assert len(self.store) == len(paths)


def _size(kept):
    return 2 if kept[-1] == "s" else 1


def _key(letter):
    return chunk_keys([letter] * CHUNK)[0]


def _letters(chunk):
    keys, values = chunk.layers[0]
    assert torch.equal(values, keys + 1)
    return tuple(int(v) - 1 for v in keys[0, 0, :, 0] if v)


def test_the_store_keeps_count_and_order():
    run_state_machine_as_test(Store, settings=settings(max_examples=60, stateful_step_count=30))


def test_chunks_are_whole_and_known_by_all_their_tokens():
    keys = chunk_keys(SYSTEM)
    assert len(keys) == 3 and chunk_keys(SYSTEM[:63]) == () and chunk_keys(SYSTEM[:64]) == keys[:1]
    assert chunk_keys([1 << 31] * 64) != chunk_keys([0] * 64)
    layers = {0: (torch.zeros(1, 1, CHUNK, 2), torch.zeros(1, 1, CHUNK, 2))}
    assert Prefixes(100).add([], keys[0], layers) is False  # larger than all that may be kept


# --- the same bits


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3_next", *WITH_STATES])
def test_a_kept_prompt_gives_the_same_bits(family, tmp_path):
    """Grouped heads, latents (MLA), states beside either. Read in the same pieces, logits are equal in all bits;
    against a prompt that was read in one piece, up to the order of sums."""
    model = model_of(family, tmp_path)
    plain, engine = Engine(model, STEP), Engine(model, STEP, MOST)
    assert plain.why_not_kept == "it is switched off" and engine.why_not_kept is None
    for own in ([5, 6, 7], [8], [9] * 30):
        prompt = SYSTEM + own
        again, kept = read(engine, prompt, (192, len(prompt))[engine.kept_tokens() > 0 :], 6)
        assert again == (0 if own == [5, 6, 7] else 192)
        none, same = read(plain, prompt, (192, len(prompt)), 6)
        assert none == 0 and torch.equal(kept, same)
        _, whole = read(plain, prompt, (len(prompt),), 6)
        torch.testing.assert_close(kept, whole, atol=5e-6, rtol=1e-4)
        assert kept.argmax(-1).tolist() == whole.argmax(-1).tolist()
    assert engine.kept_tokens() == 192 and plain.kept_tokens() == 0


def test_a_part_of_a_chunk_is_taken(tmp_path):
    """All of a prompt but its last token, which is computed; and the rest of a chunk that a row has begun itself."""
    model = model_of("qwen3_moe", tmp_path)
    plain, engine = Engine(model, STEP), Engine(model, STEP, MOST)
    prompt = SYSTEM[:128]
    assert read(engine, prompt, (128,))[0] == 0
    taken, logits = read(engine, prompt, (128,))
    assert taken == 127  # torch's products with AVX2 round by where in memory their factors lie
    torch.testing.assert_close(logits, read(plain, prompt, (127, 128))[1], atol=5e-6, rtol=1e-4)
    slot = engine.add(200, chunk_keys(SYSTEM))
    rows = engine._rows
    kept = rows.prefixes
    hidden, rows.prefixes = kept, Prefixes(MOST)
    engine.run([StepInput(slot, SYSTEM[:20], 0, True)])
    rows.prefixes = hidden
    assert engine.kept_ahead(slot, 179) == 108
    out = engine.run([StepInput(slot, SYSTEM[128:], 1, True, 108, 9)])[0]
    assert out is not None and slot.length == 200 and engine.kept_tokens() == 192
    torch.testing.assert_close(out, read(plain, SYSTEM, (20, 200))[1], atol=5e-6, rtol=1e-4)
    engine.remove(slot)


def test_windows_are_not_kept_and_it_says_so(tmp_path, caplog):
    engine = Engine(model_of("gpt_oss", tmp_path), STEP, MOST)
    assert "layers with an attention window" in str(engine.why_not_kept) and engine.most_kept == 0
    assert "no prompt is kept" in caplog.text
    slot = engine.add(200, chunk_keys(SYSTEM))
    engine.run([StepInput(slot, SYSTEM, 1, True, engine.kept_ahead(slot, 199), 9)])
    assert engine.kept_tokens() == engine.kept_bytes == 0
    engine.remove(slot)


def test_a_failed_pass_keeps_nothing(tmp_path, monkeypatch):
    engine = Engine(model_of("qwen3_moe", tmp_path), STEP, MOST)
    attend, slot = PackedKvCache.attend, engine.add(200, chunk_keys(SYSTEM))

    def fails(self, module, *rest):
        if module.layer_idx == 1:
            raise OSError("the disk is gone")
        return attend(self, module, *rest)

    monkeypatch.setattr(PackedKvCache, "attend", fails)
    with pytest.raises(OSError, match="the disk is gone"):
        engine.run([StepInput(slot, SYSTEM, 1, True, 0, 9)])
    assert engine.kept_tokens() == 0 and slot.cache is None
    monkeypatch.undo()
    assert read(engine, SYSTEM, (200,))[0] == 0 and read(engine, SYSTEM, (200,))[0] == 192


def test_a_pass_keeps_what_was_planned(tmp_path):
    """A row ahead of the kept chunks keeps none, even if another row of the pass keeps those up to it."""
    engine, prompt = Engine(model_of("qwen3_moe", tmp_path), STEP, MOST), SYSTEM * 2
    ahead, behind = engine.add(400, chunk_keys(prompt)), engine.add(256, chunk_keys(prompt[:256]))
    engine.run([StepInput(ahead, prompt[:256], 0, True, 0, 9)])
    assert engine.evict() and engine.kept_tokens() == 192
    both = [StepInput(behind, prompt[192:256], 0, True, 192, 9), StepInput(ahead, prompt[256:], 0, True, 0, 9)]
    assert engine.kept_tokens(both) == 256
    engine.run(both)
    assert engine.kept_tokens() == 256


# --- a scheduler


@pytest.fixture
def asked(bench, tokenizer, tmp_path):
    """Make a scheduler that keeps so many bytes, a list of its passes, and what has a prompt answered at once."""
    model = model_of("qwen3_moe", tmp_path)

    def make(most, before=lambda items: None):
        passes = []

        def noted(items):
            before(items)
            passes.append([len(item.tokens) for item in items])

        made = scheduled(bench, model, tokenizer, most, noted)

        def ask(count, tokens):
            told = [[] for _ in range(count)]
            made.scheduler.submit([Job(SYSTEM, tokens, Sampling(temperature=0), events.append) for events in told])
            return [said(events) for events in told]

        return made.scheduler, passes, ask

    return make


def test_nobody_waits_for_what_is_not_kept(asked):
    """The bytes hold no chunk, which the first pass shows. The other prompts are then read beside one another."""
    scheduler, passes, ask = asked(100)
    assert len(set(ask(4, 1))) == 1 and scheduler.totals.prefix_hits == 0
    assert passes == [[200], [200, 56], [144, 112], [88]]


def test_a_prompt_that_is_read_again_beside_its_answer_is_kept_again(asked):
    """The budget refuses two passes: kept chunks leave, then the younger one gives its cache up."""
    refused = []

    def refuse(items):
        if len(items) == 2 and items[0].slot.length >= 204 and len(refused) < 2:
            refused.append(len(items))
            raise BudgetExceeded("planted")

    scheduler, passes, ask = asked(MOST, refuse)
    assert len(set(ask(2, 12))) == 1 and scheduler.totals.preempted == 1
    assert [tokens[1:] for tokens in passes if max(tokens) > 1] == [[], [8], [204]]
    assert ask(1, 1) and scheduler._engine.kept_tokens() == 192 and scheduler.totals.prefix_hits == 2 * 192
    scheduler.close()
    assert scheduler._engine.kept_bytes == 0


# --- a server


LIMITS = {"max_tokens": 12, "ignore_eos": True}


def usage(server, prompt, **more):
    """A greedy answer's text, and the tokens of its prompt that were not read."""
    body = {"model": NAME, "prompt": prompt, "temperature": 0, **LIMITS, **more}
    found = json.loads(post(f"{server.url}/v1/completions", body))
    assert found["usage"]["prompt_tokens"] == len(prompt)
    return found["choices"][0]["text"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def kept(bundle, tokenizer):
    """A server without a budget, in float32, and one that keeps nothing."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with contextlib.ExitStack() as stack:
        servers = []
        for size in (None, 0):
            model = moepack.load(bundle, policy="static:bf16", dtype=torch.float32)
            options = Options(NAME, limits=Limits(sequences=16, step_tokens=256, kept_bytes=size))
            servers.append(stack.enter_context(serving(model, tokenizer, options)))
        yield servers


def test_clients_at_once_read_a_shared_prompt_once(kept):
    """16 clients, as many answers as without kept prompts, and each chunk is read by the first of them alone."""
    server, without = kept
    prompts = [SYSTEM + [3 + n, 5, 7 + n] for n in range(16)]
    before = server.server.scheduler.totals.prompt_tokens
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda prompt: usage(server, prompt), prompts))
        right = list(pool.map(lambda prompt: usage(without, prompt), prompts))
    assert [text for text, _ in found] == [text for text, _ in right]
    assert sorted(cached for _, cached in found) == [0] + [192] * 15
    assert [cached for _, cached in right] == [0] * 16
    totals = server.server.scheduler.totals
    assert totals.prompt_tokens - before == 203 + 15 * 11
    assert (totals.prefix_hits, totals.prefix_queries) == (15 * 192, 16 * 203)
    assert without.server.scheduler.totals.prefix_queries == 0
    raw = post(f"{server.url}/metrics", None).decode()
    labels = f'{{engine="0",model_name="{NAME}"}}'
    assert f"vllm:prefix_cache_hits_total{labels} 2880.0" in raw
    assert f"vllm:prefix_cache_queries_total{labels} 3248.0" in raw
    assert "moepack_prefix_hits_total 2880.0" in raw and "moepack_prefix_queries_total 3248.0" in raw
    assert f"moepack_prefix_bytes {float(server.server.engine.kept_bytes)}" in raw
    config = server.model.config  # keys and values in float32
    token = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim * 4
    assert server.server.engine.kept_bytes == 192 * token


def test_every_interface_says_what_was_kept(kept, tokenizer):
    """Anthropic's input_tokens are those that were read; the others count all. Twice the same prompt: all but one."""
    server, without = kept
    said = [{"role": "user", "content": "The history of the town is long. " * 20}]
    count = len(tokenizer(said[0]["content"]).input_ids)
    whole = (count - 1) // CHUNK * CHUNK
    assert whole >= CHUNK
    chat = {"model": NAME, "messages": said, "max_tokens": 4, "temperature": 0}
    for turn, cached in enumerate((0, whole)):
        found = json.loads(post(f"{server.url}/v1/chat/completions", chat))["usage"]
        assert found["prompt_tokens_details"] == {"cached_tokens": cached}, turn
    found = json.loads(post(f"{server.url}/v1/messages", chat))["usage"]
    assert (found["input_tokens"], found["cache_read_input_tokens"]) == (count - whole, whole)
    asked = {"model": NAME, "input": said, "max_output_tokens": 4, "temperature": 0}
    found = json.loads(post(f"{server.url}/v1/responses", asked))["usage"]
    assert (found["input_tokens"], found["input_tokens_details"]) == (count, {"cached_tokens": whole})
    found = json.loads(post(f"{without.url}/v1/messages", chat))["usage"]
    assert (found["input_tokens"], found["cache_read_input_tokens"]) == (count, 0)


def test_a_scored_prompt_is_read_in_full(kept):
    server, without = kept
    usage(server, SYSTEM)
    for one in (server, without):
        assert usage(one, SYSTEM, echo=True, logprobs=1)[1] == 0
    assert usage(server, SYSTEM, n=3, temperature=1.0)[1] == 192  # a prompt counts once for all its answers


def test_a_client_that_leaves_holds_nobody_up(kept):
    """It leaves while it reads what another one waits for."""
    server = kept[0]
    scheduler, prompt = server.server.scheduler, [9 + n % 800 for n in range(1500)]
    left, raw = scheduler.totals.cancelled, json.dumps({"prompt": prompt, **LIMITS}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(f"{head}{len(raw)}\r\n\r\n".encode() + raw)
            wait_for(lambda: scheduler.running)
            second = pool.submit(usage, server, prompt)
        text, cached = second.result(20)
    assert scheduler.totals.cancelled == left + 1 and cached < 1500
    assert text == usage(kept[1], prompt)[0]
    server.idle()


# --- room


@pytest.mark.parametrize(("policy", "least_room"), [("hotness:interval=0.05", 200_000), ("uniform", 0)])
def test_kept_prompts_are_in_the_budget_and_leave_first(policy, least_room, bundle, tokenizer):
    """A budget that holds few tokens beyond a request's: prompts of many kinds are kept and leave again, every request
    is answered, none gives its cache up, and the peak stays below the budget. Idle, the kept bytes are all KV bytes."""
    room = {"prefill_tokens": 256, "all_logits": False, "kv_tokens": 512}
    budget = least(bundle, policy, **room) + least_room
    model = load_for_logits(bundle, policy=policy, device_memory=budget, **room)
    options = Options(NAME, limits=Limits(sequences=8, step_tokens=256, kept_bytes=MOST))
    with serving(model, tokenizer, options) as server:
        engine, served, most = server.server.engine, model.moepack, 0
        for turn in range(7):
            prompt = [1 + turn + n * 7 % 900 for n in range(300)]
            _, cached = usage(server, prompt)
            assert cached == 0 and usage(server, prompt)[1] in range(0, 257, CHUNK)
            server.idle()
            assert engine.kept_bytes == engine.cache_bytes <= served.caches.needs.kv_bytes + served.caches._reserve.most
            assert engine.kept_bytes == engine.kept_tokens() * engine._shape().full
            most = max(most, engine.kept_tokens())
        assert most >= 128
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda n: usage(server, [n + 1] * 70), range(4)))
        totals = server.server.scheduler.totals
        assert totals.finished == 18 and totals.failed == totals.preempted == 0
        assert engine.kept_tokens() < 7 * 256 + 4 * 64, "some have left"
        assert served.resident_bytes_peak <= served.budget_bytes


def test_tokens_of_kept_chunks_are_under_the_limit_of_all(bundle, tokenizer):
    """--max-kv-tokens 400 holds a request of 204 tokens and 192 kept ones: each prompt replaces the last."""
    model = moepack.load(bundle, policy="static:bf16")
    with serving(model, tokenizer, Options(NAME, limits=Limits(step_tokens=256, kv_tokens=400))) as server:
        for start in (1, 2, 3):
            prompt = [start] * 200
            assert usage(server, prompt, max_tokens=4)[1] == 0
            assert server.server.engine.kept_tokens() == 192
        assert usage(server, [3] * 200, max_tokens=4)[1] == 192 and usage(server, [2] * 200, max_tokens=4)[1] == 0


def test_the_default_is_a_part_of_the_budget(bundle, monkeypatch):
    model = load_for_logits(bundle, policy="uniform", device_memory=8_000_000, prefill_tokens=64)
    with model.moepack:
        assert Engine(model, STEP, None).most_kept == 1_000_000
        assert Engine(model, STEP, 123_456).most_kept == 123_456
        assert "64 tokens take 65536 bytes, and the most is 1234" in str(Engine(model, STEP, 1234).why_not_kept)
        monkeypatch.setattr(engine_module, "KEPT", 500_000)
        assert Engine(model, STEP, None).most_kept == 500_000
