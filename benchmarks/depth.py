"""One attention layer's time for a decoded token, by depth of the context: its family's own code, and ours.

    python -m benchmarks.depth [--quick] [--tokens N]

Layers have the released models' shapes and random BF16 weights. Both sides run on one thread and take turns in one run;
times are medians of processor time, which other programs on the machine do not lengthen. The prompt before is filled in
at random: attention reads it all the same. The bytes are those of the layer's weights and of its cache.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks.common import Row, Target, arguments, finish, in_turns
from moepack.runtime.dense import linears
from moepack.runtime.dense.borrowed import serve_attention
from moepack.runtime.dense.latent import serve_latents
from moepack.runtime.dense.norms import serve_norms
from moepack.runtime.dense.projections import serve_projections
from moepack.runtime.kv.growing import grow_in_place

ROUNDS = 9
COMMON = {"num_hidden_layers": 1, "vocab_size": 64, "eos_token_id": 0, "pad_token_id": 0, "bos_token_id": 0}
COMMON |= {"hidden_size": 2048, "moe_intermediate_size": 32, "max_position_embeddings": 65536}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-30B-A3B, grouped": (
        "qwen3_moe",
        {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 4},
    ),
    "DeepSeek-V2-Lite, latent": (
        "deepseek_v3",
        {
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
}
HELD = ("keys", "values")  # tensors [..., tokens, cols] of a cache's layer


def served(model: Any) -> Any:
    """Let the kernels run the model's dense half, as loading a bundle does."""
    experts = [SimpleNamespace(module=name) for name, _ in model.named_modules() if name.endswith(".experts")]
    bundle: Any = SimpleNamespace(layers=experts, manifest=SimpleNamespace(dense=()))
    linears.serve(model, bundle, (), compiled=True)
    serve_norms(model)
    serve_attention(model)
    serve_latents(model)
    serve_projections(model)
    return model


def held(cache: Any) -> dict[str, torch.Tensor]:
    """What the one layer of a cache holds, by name."""
    return {name: getattr(cache.layers[0], name) for name in HELD}


def filled(model: Any, depth: int) -> Any:
    """A cache of `depth` tokens of random keys and values, as this layer's code keeps them."""
    cache = DynamicCache(config=model.config)
    module = model.model.layers[0].self_attn
    x = torch.randn(1, 2, model.config.hidden_size).bfloat16()
    turn = model.model.rotary_emb(x, torch.arange(2)[None])
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril_()
    with torch.no_grad():
        module(hidden_states=x, position_embeddings=turn, attention_mask=mask, cache=cache)
    for name, t in held(cache).items():
        setattr(cache.layers[0], name, torch.randn(*t.shape[:-2], depth, t.shape[-1]).bfloat16())
    return cache


def one_layer(name: str) -> Any:
    """A model of one layer of LAYERS, with random weights."""
    kind, facts = LAYERS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | facts))
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def turns(sides: Mapping[str, tuple[Any, Any]], depth: int, rounds: int, tokens: int = 1) -> dict[str, list[float]]:
    """Milliseconds of a processor for `tokens` new tokens in a layer, by side, a model and its cache.

    The first round, in which a cache is copied to where it has room, does not count.
    """
    first, _ = next(iter(sides.values()))
    x = torch.randn(1, tokens, first.config.hidden_size).bfloat16()
    places = torch.arange(depth, depth + tokens)[None]
    given = {"hidden_states": x, "position_embeddings": first.model.rotary_emb(x, places)}

    def prepared(model: Any, cache: Any, number: int) -> Callable[[], object]:
        length = cache.get_seq_length() + tokens
        seen = None if tokens == 1 else torch.ones(1, 1, tokens, length, dtype=torch.bool).tril_(length - tokens)
        return partial(model.model.layers[0].self_attn, **given, attention_mask=seen, cache=cache)

    with torch.no_grad():
        took = in_turns({name: partial(prepared, *side) for name, side in sides.items()}, rounds, time.process_time)
    return {name: [1e3 * seconds for seconds in times] for name, times in took.items()}


def measured(name: str, depths: Sequence[int], tokens: int) -> list[Row]:
    """The layer's rows, by depth."""
    own = one_layer(name)
    models = {"own": own, "ours": served(copy.deepcopy(own)).eval()}
    rows = []
    for depth in depths:
        sides = {side: (model, filled(model, depth)) for side, model in models.items()}
        _, cache = sides["ours"]
        grow_in_place(cache, depth + (ROUNDS + 1) * tokens)
        took = turns(sides, depth, ROUNDS, tokens)
        weights = sum(p.nbytes for p in own.model.layers[0].self_attn.parameters())
        size = weights + sum(t.nbytes for t in held(cache).values())
        ms = {side: statistics.median(times) for side, times in took.items()}
        ratio = statistics.median(a / b for a, b in zip(took["own"], took["ours"], strict=True))
        rows.append(
            {"layer": name, "depth": depth, "own ms": ms["own"], "ours ms": ms["ours"], "own / ours": ratio}
            | {"MB": size / 1e6, "GB/s": size / 1e6 / ms["ours"]}
        )
    return rows


def main() -> int:
    """Print the table; the exit status is 1 if a target is missed."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=1, metavar="N", help="new tokens in a pass")
    args = parser.parse_args()
    torch.set_num_threads(1)
    depths = (72, 1024) if args.quick else (72, 1024, 4096, 16384)
    rows = [row for name in LAYERS for row in measured(name, depths, args.tokens)]
    last = [row for row in rows if row["depth"] == depths[-1]]
    targets = [
        Target(f"{row['layer']}, own over ours at {row['depth']:,}", row["own / ours"], 1.0, "higher") for row in last
    ]
    if not args.quick and args.tokens == 1:
        latents = [row for row in last if "latent" in row["layer"]]
        targets += [Target(f"{row['layer']}, at 16,384", row["own / ours"], 10.0, "higher") for row in latents]
    finish(f"One attention layer, {args.tokens} new tokens, one thread", rows, targets, args.json)
    return int(not all(target.met for target in targets) and not args.quick)


if __name__ == "__main__":
    sys.exit(main())
