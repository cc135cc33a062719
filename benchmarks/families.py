"""Which Mixture-of-Experts families of transformers moepack builds and serves, and why it refuses the others.

    python -m benchmarks.families [--only NAME ...] [--json FILE]

The list is transformers' own: every model that generates text and whose code has experts. Of each a random model is
made, as small as its configuration allows, saved as a checkpoint, built (rounding to nearest), loaded and held against
the plain model: logits in float32, in a budget too, and every parameter outside the experts, towers for images and
sound among them.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, finish

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "families.json"
RECIPE = """
versions: [bf16, w4]
quantize: {method: rtn, group_size: 32, loss_tokens: 32}
calibration: {samples: 2, length: 32, batch_size: 2}
"""
QUICK = ("qwen3_moe", "llama4", "qwen3_vl_moe", "dbrx")
CLOSE = 1e-3  # of the logits' norm; weights are the same, sums are in another order
_HAS_EXPERTS = re.compile(r"use_experts_implementation|^class \w*(Experts|MoE|Moe|MOE|SparseMoeBlock)\w*\(", re.M)
# By any of the names that families have for it, what a configuration is made small with.
SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 16, "vocab_size": 4096, "max_position_embeddings": 512,
    "unpadded_vocab_size": 4096,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 8, "num_local_experts": 8,
    "n_routed_experts": 8, "moe_num_experts": 8, "num_shared_experts": 1, "n_shared_experts": 1,
    "shared_expert_intermediate_size": 48, "moe_shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "router_aux_loss_coef": 0.0,
    "moe_topk": 2, "moe_k": 2, "moe_top_k": 2, "moe_num_shared_experts": 1, "num_dense_layers": 1,
    "n_layers": 2, "num_layers": 2, "n_heads": 4, "kv_n_heads": 2, "ffn_hidden_size": 96, "expert_ffn_hidden_size": 48,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "mamba_n_heads": 4, "mamba_d_head": 32,
    "mamba_d_state": 16, "mamba_chunk_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 16,
    "n_groups": 1, "chunk_size": 16, "linear_head_dim": 16, "linear_num_heads": 4, "router_hidden_size": 32,
    "o_groups": 2, "o_lora_rank": 32,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2,
    "num_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "out_hidden_size": 64, "image_size": 32, "patch_size": 16,
}  # fmt: skip
_QWEN4: dict[str, Any] = {
    "num_hidden_layers": 4, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 32,
    "indexer_compress_ratio": 4, "hc_lowrank": 16, "ple_layer_ids": [1], "heads_per_ngram": 2,
    "ngram_vocab_size_base": 100, "split_ngram_parts": 2,
}  # fmt: skip
_FOUR = {"num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}
_SHARED = {**_FOUR, "indexer_types": ["full", "shared", "full", "shared"]}  # a choice of tokens serves two layers
_GEMMA4: dict[str, Any] = {
    "enable_moe_block": True, "top_k_experts": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 4096,
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2,
    "sliding_window": 16,
}  # fmt: skip
_INKLING2: dict[str, Any] = {
    "num_hidden_layers": 4, "n_layers_per_attn_res_block": 2, "layer_types": ["hybrid_sliding", "hybrid"] * 2,
    "sliding_window_size": 16, "vision_config": {"text_hidden_size": 64},
}  # fmt: skip
_INKLING2_LOOP = {**_INKLING2, "loop_layer_index_start": 2, "loop_layer_index_end": 4, "loop_num_passes": 2}
# What is small in another way, by model_type; for a model with towers, of its text configuration, of another part under
# its name, and under "" of the whole.
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "max_seq_len": 512,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {"num_key_value_heads": 1},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots3_note": {
        "vision_config": {
            "mlp_layer_types": ["dense"],
            "per_layer_config": {},
            "adapter_in_dim": 32,
            "adapter_out_dim": 64,
        },
        "audio_config": {"whisper_adapter_in_dim": 32, "whisper_adapter_out_dim": 64},
    },
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [48, 32],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
    },
    "flint": {"mlp_only_layers": []},
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm5_next": {
        **_FOUR,
        "qk_rope_head_dim": 0,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention", "indexed_attention"],
        "indexer_types": ["full", "full", "shared", "full"],
        "index_kpool": 4,
    },
    "glm_moe_dsa": _SHARED,
    "glm4v_moe": {
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "hy_v4": _SHARED,
    "hy_v4_vl": {
        **_SHARED,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    },
    "inkling2": _INKLING2,
    "inkling2_loop": _INKLING2_LOOP,
    "inkling2_loop_text": {k: v for k, v in _INKLING2_LOOP.items() if k != "vision_config"},
    "inkling2_text": {k: v for k, v in _INKLING2.items() if k != "vision_config"},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4": {"num_experts_per_tok": 1, "intermediate_size_mlp": 96},
    "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 96},
    "longcat_flash": {"zero_expert_num": 4},
    "mistral_large4": {
        **_FOUR,
        "indexer_types": ["full", "full", "shared", "full"],
        "kv_source_layers": [0, 0, 0, 3],
        "no_rope_layers": [1, 1, 1, 0],
    },
    "mimo_v2_flash": {"num_key_value_heads": 2},
    "muse_spark": {
        "audio_config": {"hidden_sizes": [16] * 4, "depths": [1] * 4, "num_hidden_layers": 4, "out_hidden_size": 64},
        "": {"projector_hidden_size": 64, "out_hidden_size": 64},
    },
    "qwen3_5_moe": {"num_hidden_layers": 4},
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_omni_moe": {"": {"enable_audio_output": False}},
    "qwen4_exp": _QWEN4,
    "qwen4_exp_text": _QWEN4,
    "step3p7": {
        "num_hidden_layers": 3,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 16,
        "share_expert_dim": 48,
        "swiglu_limits": [0.0, 0.0, 0.05],
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "num_hidden_layers": 3,
        "layer_types": ["hybrid", "hybrid_sliding", "hybrid"],
        "sliding_window": 16,
    },
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of transformers: its `model_type`, and the class that generates text, if there is one."""

    model_type: str
    architecture: str


def walk() -> list[Family]:
    """Every model of transformers whose code has experts."""
    import transformers
    from transformers.models.auto import configuration_auto as configurations
    from transformers.models.auto import modeling_auto as models

    makes_text: dict[str, str] = {}
    for table in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):  # with its tower first
        for model_type, name in getattr(models, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).items():
            makes_text.setdefault(model_type, name if isinstance(name, str) else name[0])
    root = Path(inspect.getfile(transformers)).parent / "models"
    found, seen = [], set()
    for model_type, name in makes_text.items():
        folder = configurations.model_type_to_module_name(model_type)
        source = "".join(p.read_text() for p in sorted((root / folder).glob("modeling_*.py")))
        if _HAS_EXPERTS.search(source):
            found.append(Family(model_type, name))
            seen.add(folder)
    return sorted(found, key=lambda f: f.model_type)


def small(model_type: str) -> Any:
    """The configuration of a small model."""
    return _small(_by_name(model_type), SMALL, OWN.get(model_type, {}))


def _by_name(model_type: Any) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]  # its `get` knows of none
    except KeyError:
        return None


def _small(kind: Any, values: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    known = {f.name for f in dataclasses.fields(kind)}
    parts = getattr(kind, "sub_configs_defaults", {})
    given: dict[str, Any] = {}
    for name, spec in parts.items():
        part = _by_name(spec.model_type) or spec.config_class
        if dataclasses.is_dataclass(part) and name in known:
            text = name in ("text_config", "thinker_config")
            its = {n: v for n, v in own.items() if n not in (*parts, "")} if text else own.get(name, {})
            made = _small(part, SMALL if text else TOWER, its)
            given[name] = made.to_dict()
    reached = known | set(getattr(kind, "attribute_map", {}))
    given |= {n: v for n, v in values.items() if n in reached and not (parts and n not in _PLAIN)}
    return kind(**{**given, **(own.get("", {}) if parts else own)})


_PLAIN = ("pad_token_id", "bos_token_id", "eos_token_id")  # what a configuration of parts has of its own


def save(config: Any, path: Path, tokenizer: Path) -> Any:
    """A random model of a configuration, saved as a checkpoint that a user would download."""
    import torch

    from moepack.families.model_class import auto_class

    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "experts" in name:
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # a token's experts, from a table that only a checkpoint has
                buffer.copy_(torch.rand(len(buffer), 8).topk(buffer.shape[1]).indices)
    model.to(torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tokenizer / name).read_bytes())
    return model


def attempt(family: Family, folder: Path) -> dict[str, str]:
    """What comes of a family: "works", "refused" and why, or "no small model" where transformers makes none."""
    from moepack.calibrate.stream import quiet_transformers
    from moepack.families.model_class import auto_class
    from moepack.pack.errors import MoepackError

    row = {"model_type": family.model_type, "class": family.architecture}
    checkpoint, example = folder / "checkpoint", ROOT / "examples"
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        try:
            config = small(family.model_type)
            config.architectures = [family.architecture]
            try:
                auto_class(config)
            except ValueError as error:
                return row | {"outcome": "refused", "why": _line(error, folder)}
            save(config, checkpoint, example / "mini-qwen3-moe")
        except Exception as error:  # whatever a family's own code raises
            return row | {"outcome": "no small model", "why": _line(error, folder)}
        try:
            why, experts = _served(checkpoint, folder / "bundle", example)
            return row | {"outcome": "works", "why": why, "experts": experts}
        except MoepackError as error:
            return row | {"outcome": "refused", "why": _line(error, folder)}
        except Exception as error:
            return row | {"outcome": "broken", "why": f"{type(error).__name__}: {_line(error, folder)}"}


def layout(stream: Any) -> str:
    """How a checkpoint has its experts, from which follow the released formats that are read of such a model."""
    from moepack.calibrate.experts import parameter_names

    index, layer = next(iter(stream.expert_layers.items()))
    module = stream.experts_module(index)
    matrices = [f"{layer.module}.{weight}" for weight, _ in parameter_names(module).values()]
    weights = [key for name in matrices for key in stream.weights_of(name)]
    if stream._expert_parts(index, range(1)) is None:
        return "joined"
    if all(len(stream.checkpoint.shape(key)) == 2 for key in weights):
        return "apart"
    if module.is_transposed:
        return "turned"
    return "stacked" if all(key.endswith(".weight") for key in weights) else "stacked, no `.weight`"


def _line(error: Exception, folder: Path) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text.replace(f"{folder}/checkpoint: ", "").replace(f"{folder}/bundle: ", "")[:200]


def _served(checkpoint: Path, bundle: Path, example: Path) -> tuple[str, str]:
    """Build, load and compare; what is noteworthy, and how the checkpoint has its experts."""
    import torch

    import moepack
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.stream import StreamedModel
    from moepack.families.model_class import auto_class
    from moepack.pack.errors import InputError
    from moepack.pipeline.recipe import parse_recipe

    moepack.build(checkpoint, bundle, parse_recipe(RECIPE, "walk"), [example / "text" / "calibration.jsonl"])
    stream = StreamedModel(open_checkpoint(checkpoint))
    plain = auto_class(stream.checkpoint.config).from_pretrained(checkpoint, dtype=torch.float32)
    if not _calibrates(stream, plain):
        raise AssertionError("calibration does not see the model's own hidden states")
    ours = moepack.load(bundle, dtype=torch.float32, policy="static:bf16")
    ids = torch.randint(1, 4000, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        want, got = plain(input_ids=ids).logits, ours(input_ids=ids).logits
    if type(ours).__mro__[1].__name__ != type(plain).__name__:
        raise AssertionError(f"was loaded as {type(ours).__mro__[1].__name__}")
    apart = float((got - want).norm() / want.norm())
    if not apart <= CLOSE:
        raise AssertionError(f"logits differ by {apart:.2g} of their norm")
    experts = tuple(f"{layer.module}." for layer in moepack.open(bundle).layers)
    held = dict(ours.named_parameters())
    other = 0
    for name, parameter in plain.named_parameters():
        if not name.startswith(experts):
            other += 1
            if not torch.equal(held[name].float(), parameter.float()):
                raise AssertionError(f"{name} differs")
    try:
        apart = _in_a_budget(bundle, plain, ids[:1])
    except InputError as error:
        why = _line(error, bundle.parent).removesuffix(": serve it without a budget")
        return f"not in a budget: {why}", layout(stream)
    if not apart <= CLOSE:
        raise AssertionError(f"in a budget, logits differ by {apart:.2g} of their norm")
    return "", layout(stream)


def _in_a_budget(bundle: Path, plain: Any, ids: Any) -> float:
    """The largest relative difference of logits in a budget, over a prompt and the tokens after it with a cache."""
    import torch

    import moepack
    from moepack.families.arguments import cache_in, with_cache

    given: dict[str, Any] = {
        "policy": "static:bf16", "dtype": "float32", "prefill_tokens": 16, "kv_tokens": 32, "batch": 1,
        "all_logits": True,
    }  # fmt: skip
    ours, apart = moepack.load(bundle, device_memory=1 << 30, **given), []  # no small model needs more
    caches: list[dict[str, Any]] = [{}, {}]
    with ours.moepack, torch.inference_mode():
        for part in (ids[:, :16], *ids[:, 16:].split(1, dim=1)):
            outs = [m(input_ids=part, use_cache=True, **c) for m, c in zip((plain, ours), caches, strict=True)]
            caches = [with_cache(m, cache_in(out)) for m, out in zip((plain, ours), outs, strict=True)]
            want, got = (out.logits for out in outs)
            apart.append(float((got - want).norm() / want.norm()))
    return max(apart)


def _calibrates(stream: Any, plain: Any) -> bool:
    """Whether what goes through the layers one by one is what goes through the plain model's, for two texts."""
    import torch

    from moepack.calibrate.forward import CalibrationPass

    ids, want = torch.randint(1, 4000, (2, 24), generator=torch.Generator().manual_seed(2)), []
    walk = CalibrationPass(stream, ids, 1, torch.float32)
    stream.load(None)
    stream.to_compute(None, torch.float32)
    walk.start()
    for i in range(len(stream.layers)):
        stream.load(i)
        stream.to_compute(i, torch.float32)
        walk.run_layer(i)
    last = plain.get_submodule(f"{stream.prefix}.{len(stream.layers) - 1}")
    hook = last.register_forward_hook(lambda module, args, out: want.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        for one in ids.split(1):
            plain(input_ids=one, use_cache=False)
    hook.remove()
    return all(float((a - b).norm()) <= CLOSE * float(b.norm()) for a, b in zip(walk.hidden, want, strict=True))


def all_rows(families: Iterable[Family]) -> Iterator[dict[str, str]]:
    """What comes of each, one after another."""
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            yield attempt(family, Path(folder))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", help="of these model types")
    args = parser.parse_args()
    rows = []
    wanted = args.only or (QUICK if args.quick else [f.model_type for f in walk()])
    for row in all_rows(f for f in walk() if f.model_type in wanted):
        print(json.dumps(row), flush=True)
        rows.append(row)
    finish("Families", ["model_type", "class", "outcome", "experts", "why"], rows, [], args.json)


if __name__ == "__main__":
    main()
