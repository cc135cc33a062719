"""What a cache in fewer bits costs and gains: loss beside a version of experts, bytes, and the time of a decoded token.

    python -m benchmarks.cache [--checkpoint MODEL --data FILE...]

The loss is the divergence from the lossless version with a plain cache, in float32, so that it is not rounding; the row
`w4` has a plain cache and all experts in 4 bits. "as relative loss" is the mean relative loss of experts that would add
as much divergence, in proportion to w4's: what `--kv auto` weighs (runtime/kv/forms.py). Times are of one attention
layer of a released model's shape, with random weights and a cache that is filled in at random: attention reads it all
the same. All forms take turns in one run on one thread, and are medians of processor time, which other programs on the
machine do not lengthen.
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from benchmarks.common import Row, Target, built, finish, in_turns, model_arguments, texts
from moepack.pack.reader import open_bundle
from moepack.reports.evaluate import evaluate
from moepack.runtime.dense import linears
from moepack.runtime.dense.borrowed import serve_attention
from moepack.runtime.dense.latent import serve_latents
from moepack.runtime.dense.norms import serve_norms
from moepack.runtime.dense.projections import serve_projections
from moepack.runtime.kernels.kv_rows import row_bytes
from moepack.runtime.kv.forms import FORMS, PLAIN_KV
from moepack.runtime.kv.growing import grow_in_place, layer_bits, new_cache
from moepack.runtime.patches import quiet_libraries
from moepack.runtime.planning.decided import relative_loss
from moepack.runtime.planning.options import LoadOptions

ROUNDS = 15
WINDOW = 2048  # tokens
HEAD = 128  # numbers of a key of most released models
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


def filled(model: Any, depth: int) -> Any:
    """A cache of `depth` tokens of random keys and values, as this layer's code keeps them."""
    cache = DynamicCache(config=model.config)
    module = model.model.layers[0].self_attn
    x = torch.randn(1, 2, model.config.hidden_size).bfloat16()
    turn = model.model.rotary_emb(x, torch.arange(2)[None])
    mask = torch.ones(1, 1, 2, 2, dtype=torch.bool).tril_()
    with torch.no_grad():
        module(hidden_states=x, position_embeddings=turn, attention_mask=mask, cache=cache)
    layer: Any = cache.layers[0]
    for name in ("keys", "values"):
        like = getattr(layer, name)
        setattr(layer, name, torch.randn(*like.shape[:-2], depth, like.shape[-1]).bfloat16())
    return cache


def one_layer(name: str) -> Any:
    """A model of one layer of LAYERS, with random weights."""
    kind, facts = LAYERS[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(COMMON | facts))
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def turns(model: Any, caches: Mapping[str, Any], depth: int) -> dict[str, list[float]]:
    """Milliseconds of a processor for a new token in a layer, by form of its cache.

    The first round, in which a cache is copied to where it has room, does not count.
    """
    x = torch.randn(1, 1, model.config.hidden_size).bfloat16()
    turned = model.model.rotary_emb(x, torch.tensor([[depth]]))
    given = {"hidden_states": x, "position_embeddings": turned, "attention_mask": None}

    def prepared(cache: Any, number: int) -> Callable[[], object]:
        return partial(model.model.layers[0].self_attn, **given, cache=cache)

    with torch.no_grad():
        took = in_turns({kv: partial(prepared, cache) for kv, cache in caches.items()}, ROUNDS, time.process_time)
    return {kv: [1e3 * seconds for seconds in times] for kv, times in took.items()}


def losses(bundle: Path, data: list[str], windows: int) -> list[Row]:
    """The divergence of each form with lossless experts, and of w4 with a plain cache."""
    rows: list[Row] = []
    tables = open_bundle(bundle).calibration()
    w4_loss, _ = relative_loss(tables, tuple(("w4",) * len(layer.tokens) for layer in tables.layers))
    for version, kv in (("w4", PLAIN_KV), *(("bf16", kv) for kv in FORMS)):
        options = LoadOptions(policy=f"static:{version}", kv=kv, dtype="float32")
        found = evaluate(bundle, data, options, length=WINDOW, samples=windows, kl=True)
        assert found.kl is not None and found.kl_interval is not None
        bits = [16.0 if n == 16 else 8 * row_bytes(HEAD, n) / HEAD for n in FORMS[kv]]
        rows.append(
            {"experts": version, "kv": kv, "bits a number": statistics.mean(bits), "KL": found.kl}
            | {"95 %": "{:.2g}-{:.2g}".format(*found.kl_interval), "perplexity": found.perplexity}
        )
        rows[-1]["as relative loss"] = found.kl / rows[0]["KL"] * w4_loss
    return rows


def times(name: str, depth: int) -> list[Row]:
    """A decoded token's time in one layer, by form."""
    model = served(one_layer(name)).eval()
    plain = filled(model, depth)
    caches = {}
    for kv in FORMS:
        caches[kv] = new_cache(model, layer_bits(model, kv))
        caches[kv].update(plain.layers[0].keys, plain.layers[0].values, 0)
        grow_in_place(caches[kv], depth + 2 * ROUNDS)
    took = turns(model, caches, depth)
    rows = []
    for kv, cache in caches.items():
        layer: Any = cache.layers[0]
        size = layer.keys.nbytes + layer.values.nbytes
        faster = statistics.median(a / b for a, b in zip(took[PLAIN_KV], took[kv], strict=True))
        rows.append(
            {"layer": name, "depth": depth, "kv": kv, "cache MB": size / 1e6, "ms": statistics.median(took[kv])}
        )
        rows[-1]["16 bits / this"] = faster
    return rows


def main() -> int:
    """Print both tables; the exit status is 1 if a target is missed."""
    parser = model_arguments(__doc__)
    args = parser.parse_args()
    quiet_libraries()
    windows, samples = (4, 32) if args.quick else (16, 384)
    with tempfile.TemporaryDirectory() as work:
        bundle = built(args, Path(work) / "bundle", "bf16, w4", samples)
        rows = losses(bundle, texts(args)[1], windows)
    torch.set_num_threads(1)
    depth = 1024 if args.quick else 16384
    timed = [row for name in LAYERS for row in times(name, depth)]
    experts, loss = rows[0]["KL"], {row["kv"]: row["KL"] for row in rows[1:]}
    targets = [
        Target("KL of --kv 8 over that of w4", loss["8"] / experts, 0.1, "lower"),
        Target("bytes of --kv 8 over 16 bits", row_bytes(HEAD, 8) / (2 * HEAD), 0.53, "lower"),
    ]
    finish("A cache in fewer bits", [*rows, *timed], targets, args.json)
    return int(not all(target.met for target in targets) and not args.quick)


if __name__ == "__main__":
    sys.exit(main())
