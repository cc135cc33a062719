"""A decoder layer in one call: the bits of its parts one by one, and what is left to the layer's own code."""

import copy

import pytest
import torch
from support import RTN
from tiny_models import build_tiny, random_model, serve_linears
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers.models.qwen3_moe import modeling_qwen3_moe

import moepack

pytest.importorskip("moepack.runtime.kernels.affine_native", exc_type=OSError)
from moepack.runtime.dense import borrowed, decoder_layers, norms, projections
from moepack.runtime.kernels.token_native import DecoderLayer
from moepack.runtime.kv.growing import grow_in_place, with_room
from moepack.server.batching.engine import Engine, StepInput

CALLS = ("attends", "goes_on", "up_to_experts")
LINEAR = "attends_linearly"
IDS = torch.randint(1, 60, (2, 14), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def lines(monkeypatch):
    """The number of layers in each of the kernel's calls."""
    seen = []
    own = decoder_layers.run_layers

    def run(ready):
        seen.append(len(ready))
        own(ready)

    monkeypatch.setattr(decoder_layers, "run_layers", run)
    return seen


@pytest.fixture
def calls(monkeypatch):
    """How often each of the kernel's ways was called."""
    made = dict.fromkeys((*CALLS, LINEAR), 0)
    for name in made:
        own = getattr(DecoderLayer, name)

        def call(*given, own=own, name=name):
            made[name] += 1
            return own(*given)

        monkeypatch.setattr(DecoderLayer, name, call)
    return made


def opened(path, monkeypatch, layers=True, **how):
    with monkeypatch.context() as patch:
        if not layers:
            patch.setattr(decoder_layers, "serve_layers", lambda model: {})
        return moepack.load(path, dtype=torch.bfloat16, **{"policy": "static:w4", **how})


def passes(model, ids, cache, **given):
    with torch.inference_mode():
        return model(input_ids=ids, past_key_values=cache, use_cache=True, **given).logits


class Listening(TorchDispatchMode):
    """Hears of torch's operations, and changes nothing."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return operation(*args, **(kwargs or {}))


def logits(model):
    """Logits of a prompt, of tokens one by one, of some at once, after a cut, of a copied cache, and with padding."""
    out = []
    for ids in (IDS[:1], IDS):
        cache = DynamicCache(config=model.config)
        for part in (ids[:, :5], *ids[:, 5:9].split(1, 1), ids[:, 9:12]):
            out.append(passes(model, part, cache))
        if not any(getattr(layer, "is_sliding", False) or hasattr(layer, "conv_states") for layer in cache.layers):
            cache.crop(-4)
        other = copy.deepcopy(cache)
        out += [passes(model, ids[:, 12:13], kept) for kept in (cache, other)]
        out += [passes(model, ids[:, 13:], kept) for kept in (other, cache)]
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for end, part in ((5, IDS[:, :5]), (6, IDS[:, 5:6]), (7, IDS[:, 6:7])):
        out.append(passes(model, part, cache, attention_mask=mask[:, :end]))
    with Listening():  # the experts' own code runs, on every processor
        out.append(passes(model, IDS[:, 7:9], cache, attention_mask=mask[:, :9]))
    return out + packed(model)


LONG = torch.randint(1, 60, (2, 60), generator=torch.Generator().manual_seed(1))


def packed(model):
    """Logits of the server's passes: of a prompt, of tokens one by one, of two sequences at once, and of one again."""
    engine = Engine(model, 16)
    slots = [engine.add(5), engine.add(3)]
    both = range(2)
    out = []
    for begin, end, which in ((0, 5, [0]), (5, 6, [0]), (6, 7, [0]), (0, 4, [1]), *((n, n + 1, both) for n in (7, 8))):
        given = [LONG[n, slots[n].length : slots[n].length + end - begin].tolist() for n in which]
        out += engine.run([StepInput(slots[n], tokens) for n, tokens in zip(which, given, strict=True)])
    engine.remove(slots[1])
    for token in LONG[0, 9:].tolist():
        out += engine.run([StepInput(slots[0], [token])])
    engine.remove(slots[0])
    model.config._attn_implementation = engine._native
    return out


# By family: which ways its two layers' passes of few tokens go
FAMILIES = {
    "qwen3_moe": set(CALLS),
    "gpt_oss": set(CALLS),
    "deepseek_v2": set(CALLS),
    "deepseek_v3": set(CALLS),
    "kimi_linear": set(CALLS),
    "qwen3_next": {"goes_on", "up_to_experts", LINEAR},
    "granitemoe": set(),
}
# How many of a family's layers one call runs: whole ones that follow one another
LINES = {
    "qwen3_moe": 2,
    "gpt_oss": 2,
    "deepseek_v2": 3,
    "deepseek_v3": 3,
    "kimi_linear": 1,
    "qwen3_next": 1,
    "granitemoe": 0,
}
HYBRID = {  # four layers, of which the last attends to all
    "shared_expert_intermediate_size": 256, "num_hidden_layers": 4, "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
}  # fmt: skip
LATENT = {"deepseek_v2": None, "deepseek_v3": 128, "kimi_linear": None}  # with ranks of queries


@pytest.mark.numeric
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_the_parts(family, tmp_path, demo_model, text, monkeypatch, calls, lines):
    latent = family in LATENT
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8 if latent else 4}
    if latent:
        sizes |= {"moe_intermediate_size": 256, "kv_lora_rank": 128, "q_lora_rank": LATENT[family]}
        sizes |= {"qk_rope_head_dim": 32, "head_dim": 32}
    if family == "qwen3_next":
        sizes |= HYBRID
    if family == "gpt_oss":
        sizes["sliding_window"] = 8  # in its first layer: shorter than what is read
    path = build_tiny(family, tmp_path, RTN, demo_model, text, **sizes)
    plain = logits(opened(path, monkeypatch, layers=False))
    assert not any(calls.values())
    model = opened(path, monkeypatch)
    got = logits(model)
    assert {name for name, count in calls.items() if count} == FAMILIES[family]
    assert all(map(torch.equal, got, plain))
    if family == "gpt_oss":
        cache, before = DynamicCache(config=model.config), calls["attends"]
        for part in (IDS[:1, :12], IDS[:1, 12:13]):
            passes(model, part, cache)
        assert calls["attends"] - before == 2, "a layer with a window, too"
    assert max(lines, default=0) == LINES[family]


class Counter:
    """Adds up what routers choose, and their gates."""

    def __init__(self):
        self.seen = []

    def add(self, position, routing):
        self.seen.append((position, routing.index.clone(), routing.gates.float()))


def test_routing_is_counted_and_others_interfere(bundle, monkeypatch, calls):
    """Watchers see the same choices; hooks, other modules and other weights bring the layer's own code back."""
    plain, model = (opened(bundle, monkeypatch, layers) for layers in (False, True))
    seen = []
    for of in (plain, model):
        counter = Counter()
        of.moepack.count_routing(counter)
        logits(of)
        seen.append(counter.seen)
    assert len(seen[0]) == len(seen[1]) > 50
    for (at, index, gates), (here, own, mine) in zip(*seen, strict=True):
        assert at == here and torch.equal(index, own) and torch.equal(gates, mine)
    layer = model.model.layers[1]
    wanted = logits(plain)

    def alone():
        calls.update(dict.fromkeys(CALLS, 0))
        out = logits(model)
        return all(map(torch.equal, out, wanted)), sum(calls.values())

    same, whole = alone()
    assert same
    share = whole // len(model.model.layers)
    for module in (layer.mlp.gate, layer.self_attn.k_proj, layer.mlp.experts):
        heard = []
        hook = module.register_forward_hook(lambda *given, heard=heard: heard.append(1))
        assert alone() == (True, whole - share) and heard
        hook.remove()
    own = layer.self_attn.o_proj
    layer.self_attn.o_proj = nn.Linear(own.in_features, own.out_features, bias=False, dtype=torch.bfloat16)
    assert alone() == (False, whole - share)
    layer.self_attn.o_proj = own
    assert alone() == (True, whole)
    layer.post_attention_layernorm.weight.data = layer.post_attention_layernorm.weight * 2
    assert alone() == (False, whole - share)


def nothing(x, turn, cache):
    return x, turn


def other_memory(x, turn, cache):
    x.data = x * 2
    return x, turn


def other_values(x, turn, cache):
    cache.layers[3].values = cache.layers[3].values * 2
    return x, turn


BETWEEN = {
    "nothing": nothing,
    "a change in place": lambda x, turn, cache: (x.mul_(2), turn),
    "other memory": other_memory,
    "another tensor": lambda x, turn, cache: (x * 2, turn),
    "other angles": lambda x, turn, cache: (x, (turn[1], turn[0])),
    "angles changed in place": lambda x, turn, cache: (x, (turn[0].mul_(-1), turn[1])),
    "other values": other_values,
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_stands_between_layers_counts(mode, bundle, monkeypatch, lines):
    """Layers that one call ran ahead run again, with the same caches, where a model does something between them."""
    plain, model = (opened(bundle, monkeypatch, layers) for layers in (False, True))

    def through(of, between):
        cache = DynamicCache(config=of.config)
        out = []
        for token in range(12):
            grow_in_place(cache, 0)
            x = torch.randn(1, 1, of.config.hidden_size, generator=torch.Generator().manual_seed(token)).bfloat16()
            turn = of.model.rotary_emb(x, torch.tensor([[token]]))
            with mode(), of._moepack_wrapper.alone():
                for layer in of.model.layers:
                    x = layer(x, position_embeddings=turn, attention_mask=None, cache=cache)
                    x, turn = BETWEEN[between if token == 9 else "nothing"](x, turn, cache)
            out.append(x)
        return [*out, *(held for layer in cache.layers for held in (layer.keys, layer.values))]

    layers = len(model.model.layers)
    for between in BETWEEN:
        for layer in model.model.layers:
            layer._moepack_layer.apart = 0
        lines.clear()
        assert all(map(torch.equal, through(model, between), through(plain, between))), between
        assert max(lines) == layers, "one call runs all"
        assert min(lines[-2:]) < layers or between == "nothing", "what was in vain is not done again soon"


def other_state(state):
    state.data = state * 2


STATES = {
    "nothing": lambda x, cache: x,
    "a change in place": lambda x, cache: x.mul_(2),
    "another tensor": lambda x, cache: x * 2,
    "a state changed in place": lambda x, cache: (cache.layers[2].recurrent_states[0].mul_(2), x)[1],
    "other memory of a state": lambda x, cache: (other_state(cache.layers[2].recurrent_states[0]), x)[1],
    "another window": lambda x, cache: (cache.layers[1].conv_states.update({0: cache.layers[1].conv_states[0] * 2}), x)[
        1
    ],
}


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_layers_that_attend_linearly_are_made_ready_and_run_when_they_are_called(
    mode, tmp_path, demo_model, text, monkeypatch, calls
):
    """Checks of all layers are made at once, before the first one's call; states change in a layer's own call alone."""
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, **HYBRID}
    path = build_tiny("qwen3_next", tmp_path, RTN, demo_model, text, **sizes)
    plain, model = (opened(path, monkeypatch, layers) for layers in (False, True))

    def through(of, between, called=4):
        cache = DynamicCache(config=of.config)
        with mode():
            of(input_ids=IDS[:1, :5], cache=cache)
        out = []
        for token in range(5, 14):
            x = torch.randn(1, 1, of.config.hidden_size, generator=torch.Generator().manual_seed(token)).bfloat16()
            turn = of.model.rotary_emb(x, torch.tensor([[token]]))
            with mode(), of._moepack_wrapper.alone():
                for layer in of.model.layers[: called if token == 9 else 4]:
                    x = layer(x, position_embeddings=turn, attention_mask=None, cache=cache)
                    x = STATES[between if token == 9 else "nothing"](x, cache)
            out.append(x)
        for layer in cache.layers[:3]:
            out += [layer.conv_states[0], layer.recurrent_states[0]]
        return out

    for between, called in (*((between, 4) for between in STATES), ("nothing", 1), ("nothing", 2)):
        for layer in model.model.layers:
            layer._moepack_layer.apart = 0
        calls[LINEAR] = 0
        assert all(map(torch.equal, through(model, between, called), through(plain, between, called))), between
        assert calls[LINEAR] >= 9 * 3 - 3


def test_hooks_of_layers_and_layers_that_come_twice(bundle, monkeypatch, lines):
    """Hooks see and change what stands between layers; a model may go through its layers again."""
    plain, model = (opened(bundle, monkeypatch, layers) for layers in (False, True))
    layers = len(model.model.layers)

    def same(expected):
        lines.clear()
        assert all(map(torch.equal, *([*decoded(of)] for of in (model, plain))))
        assert lines[-len(expected) :] == expected

    def decoded(of):
        cache = DynamicCache(config=of.config)
        for token in IDS[0]:
            yield passes(of, token[None, None], cache)

    same([layers])
    for register in ("register_forward_pre_hook", "register_forward_hook"):
        hooks = [
            getattr(of.model.layers[2], register)(lambda module, *given: (given[-1][0] * 2, *given[-1][1:]))
            if register.endswith("pre_hook")
            else of.model.layers[2].register_forward_hook(lambda module, given, out: out * 2)
            for of in (model, plain)
        ]
        same([2, 2] if register.endswith("pre_hook") else [3, 1])
        for hook in hooks:
            hook.remove()
    same([layers])
    for of in (model, plain):
        of.model.layers = nn.ModuleList([*of.model.layers, *of.model.layers])
        of.config.num_hidden_layers = of.model.config.num_hidden_layers = 2 * layers
    lines.clear()
    assert all(map(torch.equal, *([*decoded(of)] for of in (model, plain)))) and max(lines) == layers


def test_layers_that_are_never_called_are_not_run_ahead(bundle, monkeypatch, lines):
    """An early exit (assisted decoding's) calls the first layers alone, and pays for these; a padded batch for each."""
    monkeypatch.setattr(decoder_layers, "APART", 3)
    model = opened(bundle, monkeypatch)
    every = model.model.layers
    ends = []

    def decode(cache=None):
        cache = DynamicCache(config=model.config) if cache is None else cache
        ends.clear()
        for token in LONG[0, :12]:
            passes(model, token[None, None], cache)
            ends.append([*lines])
            lines.clear()
        return ends[-1]

    cache = DynamicCache(config=model.config)
    assert decode(cache) == [4]
    model.model.layers = every[:2]
    assert decode(cache) == [2] and ends.count([4]) <= 12 // (1 + decoder_layers.APART) + 1, "in vain once, and seldom"
    model.model.layers = every
    assert decode() == [4] and [2, 2] in ends, "and again after a while"
    cache = DynamicCache(config=model.config)
    decode(cache)
    model.model.layers = nn.ModuleList([every[0], *every[2:]])
    decode(cache)
    assert sum(ends[0]) > 3 and all(sum(each) == 3 for each in ends[1:]), "of a layer in the middle, in vain once"
    model.model.layers = every
    cache = DynamicCache(config=model.config)
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    for end in range(5, 9):
        lines.clear()
        passes(model, IDS[:, :end] if end == 5 else IDS[:, end - 1 : end], cache, attention_mask=mask[:, :end])
    assert sum(lines) <= 2 * len(every), "no layer is computed twice"
    assert decode() == [4]


def test_layers_that_copy_their_caches_do_so_one_after_another(bundle, monkeypatch):
    """Of the layers that one call runs only the first may hold keys twice, before its cache lets go the old ones."""
    model = opened(bundle, monkeypatch)
    cache = DynamicCache(config=model.config)
    passes(model, IDS[:1, :8], cache)
    own = decoder_layers.run_layers
    copied = []
    taken = []
    monkeypatch.setattr(decoder_layers, "with_room", lambda layer: taken.append(layer.has_place()) or with_room(layer))
    monkeypatch.setattr(
        decoder_layers, "run_layers", lambda ready: (copied.append([*taken]), taken.clear(), own(ready))
    )
    for token in LONG[0, 8:40]:
        passes(model, token[None, None], cache)
    assert all(all(rest) for _, *rest in copied) and not all(first for first, *_ in copied)


def test_changed_attributes_and_left_out_arguments(bundle, monkeypatch, calls):
    """A router that chooses fewer experts does so in passes of any length; a layer has its own defaults."""
    plain, model = (opened(bundle, monkeypatch, layers) for layers in (False, True))
    for of in (plain, model):
        of.model.layers[0].mlp.gate.top_k = 1
        of.model.layers[1].self_attn.scaling /= 2
    assert all(map(torch.equal, logits(model), logits(plain)))
    x = torch.randn(1, 2, model.config.hidden_size, generator=torch.Generator().manual_seed(0)).bfloat16()
    turn = model.model.rotary_emb(x, torch.arange(2)[None])
    with torch.no_grad():
        made = [of.model.layers[2](x, position_embeddings=turn, cache=None) for of in (plain, model)]
    assert torch.equal(*made)
    before = dict(calls)
    with torch.no_grad():
        model.model.layers[2](x, position_embeddings=turn, past_key_values=DynamicCache(config=model.config))
    assert calls == before


def test_what_one_pass_asks_for_does_not_stay(bundle, monkeypatch, calls):
    """transformers' hooks of outputs stay in the model; a class changed later, or a factor, is run as it is."""
    model = opened(bundle, monkeypatch)
    cache = DynamicCache(config=model.config)
    passes(model, IDS[:1, :3], cache)
    calls.update(dict.fromkeys(CALLS, 0))
    out = passes(model, IDS[:1, 3:4], cache)
    whole = sum(calls.values())
    for asked in ({"output_hidden_states": True}, {"output_router_logits": True}):
        with torch.inference_mode():
            model(input_ids=IDS[:1, :2], **asked)
        cache.crop(-1)
        calls.update(dict.fromkeys(CALLS, 0))
        assert torch.equal(passes(model, IDS[:1, 3:4], cache), out)
        assert sum(calls.values()) == whole > 0
    block = model.model.layers[0].mlp
    kind = type(block)
    block.__class__ = type("Doubled", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    cache.crop(-1)
    assert not torch.equal(passes(model, IDS[:1, 3:4], cache), out)
    block.__class__ = kind
    block.gate.some = torch.ones(2)
    cache.crop(-1)
    assert torch.equal(passes(model, IDS[:1, 3:4], cache), out)


class Scaled(modeling_qwen3_moe.Qwen3MoeDecoderLayer):
    """Adds half of what attention returns."""

    def forward(self, hidden_states, cache=None, **given):
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), cache=cache, **given)
        hidden_states = hidden_states + attended * 0.5
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Starred(modeling_qwen3_moe.Qwen3MoeDecoderLayer):
    """Its arguments have no names."""

    def forward(self, *args, cache=None, **given):
        return super().forward(*args, cache=cache, **given)


class Cut(modeling_qwen3_moe.Qwen3MoeDecoderLayer):
    """Looks into its mask, and hands on constants."""

    def forward(self, hidden_states, attention_mask=None, cache=None, use_cache=False, **given):
        if attention_mask is not None:
            attention_mask = attention_mask[..., -4:]
        return super().forward(hidden_states, attention_mask=attention_mask, cache=cache, use_cache=False, **given)


class Told(modeling_qwen3_moe.Qwen3MoeDecoderLayer):
    """Its block is told something, which a trial would not see."""

    def forward(self, hidden_states, cache=None, kinds=None, **given):
        return super().forward(hidden_states, cache=cache, **given) * (1 if kinds is None else 2)


class Other(modeling_qwen3_moe.Qwen3MoeSparseMoeBlock):
    """Halves the experts' sum."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) * 0.5


def test_a_layer_that_does_more_keeps_its_code():
    """A factor of what is added, and a block that changes its router's choice."""
    torch.manual_seed(0)

    def changed(change):
        model, _ = random_model("qwen3_moe", torch.bfloat16, hidden_size=256)
        serve_linears(model)
        norms.serve_norms(model)
        borrowed.serve_routers(model, [n for n, _ in model.named_modules() if n.endswith(".experts")])
        borrowed.serve_attention(model)
        projections.serve_projections(model)
        change(model)
        served = decoder_layers.serve_layers(model)
        places = [vars(layer).get("_moepack_layer") for layer in model.model.layers]
        return sum(served.values()), sum(place is not None and place.router is not None for place in places)

    def as_a(kind):
        def change(model):
            for layer in model.model.layers:
                layer.__class__ = kind

        return change

    def other(model):
        for layer in model.model.layers:
            layer.mlp.__class__ = Other

    count = len(random_model("qwen3_moe", torch.bfloat16)[0].model.layers)
    assert changed(lambda model: None) == (count, count)
    assert {kind: changed(as_a(kind)) for kind in (Scaled, Told, Starred, Cut)} == dict.fromkeys(
        (Scaled, Told, Starred, Cut), (0, 0)
    )
    assert changed(other) == (count, 0)
