"""Small released checkpoints of each format, ways to change them, and how moepack then reads them."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import Row
from moepack.calibrate.checkpoint import open_checkpoint
from moepack.calibrate.experts import bits_of
from moepack.calibrate.native import as_released
from moepack.calibrate.released.values import decode
from moepack.calibrate.stream import StreamedModel
from moepack.pack.errors import MoepackError

from .edits import Case, Subject, change, damaged, header_of, with_header

CONFIG = "config.json"
TENSORS = "model.safetensors"
Shapes = Callable[[int, int], dict[str, tuple[torch.dtype, tuple[int, ...]]]]  # of a weight's tensors, by suffix
_I32 = torch.int32
_F16 = torch.float16
_F32 = torch.float32
_U8 = torch.uint8
_E4M3 = torch.float8_e4m3fn
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_GROUPS = {"a": {"targets": ["Linear"], "weights": _INT4, "format": "pack-quantized"}}
# Format -> what config.json says, and the tensors of a weight of (rows, columns).
FORMATS: dict[str, tuple[Row, Shapes]] = {
    "fp8": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
        lambda n, c: {"weight": (_E4M3, (n, c)), "weight_scale_inv": (_F32, (n // 32, c // 32))},
    ),
    "mxfp4": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}, "expert_dtype": "fp4"},
        lambda n, c: {"weight": (torch.int8, (n, c // 2)), "scale": (torch.float8_e8m0fnu, (n, c // 32))},
    ),
    "compressed-tensors": (
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": _GROUPS}},
        lambda n, c: {
            "weight_packed": (_I32, (n, c // 8)), "weight_scale": (torch.bfloat16, (n, c // 32)),
            "weight_shape": (torch.int64, (2,)),
        },
    ),
    "modelopt": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}},
        lambda n, c: {
            "weight": (_U8, (n, c // 2)), "weight_scale": (_E4M3, (n, c // 16)), "weight_scale_2": (_F32, ()),
            "input_scale": (_F32, (1,)),
        },
    ),
    "gptq": (
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}},
        lambda n, c: {
            "qweight": (_I32, (c // 8, n)), "qzeros": (_I32, (c // 32, n // 8)), "scales": (_F16, (c // 32, n)),
        },
    ),
    "awq": (
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}},
        lambda n, c: {
            "qweight": (_I32, (c, n // 8)), "qzeros": (_I32, (c // 32, n // 8)), "scales": (_F16, (c // 32, n)),
        },
    ),
}  # fmt: skip


def whole(path: Path, name: str) -> None:
    """A Qwen3-MoE of one layer and two experts, these in a format."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    small: Row = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 32, "vocab_size": 64}
    small |= {"num_hidden_layers": 1, "num_experts": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3MoeConfig(**small, num_experts_per_tok=1, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    said, shapes = FORMATS[name]
    (path / CONFIG).write_text(json.dumps({**json.loads((path / CONFIG).read_text()), **said}))
    stored: dict[str, Tensor] = {}
    for key, tensor in load_file(path / TENSORS).items():
        if ".experts." not in key:
            stored[key] = tensor
            continue
        for suffix, (dtype, shape) in shapes(*tensor.shape).items():
            codes = dtype in (_I32, _U8, torch.int8) or suffix == "weight"
            made = (torch.randint(0, 64, (*shape, dtype.itemsize), dtype=_U8) & 0x37).view(dtype).reshape(shape)
            stored[f"{key.removesuffix('.weight')}.{suffix}"] = made if codes else torch.ones(shape).to(dtype)
    save_file(stored, path / TENSORS, {"format": "pt"})


def settings(case: Case) -> None:
    """What config.json says of the quantisation."""
    document = json.loads(case.data(CONFIG))
    said = {k: document.pop(k) for k in ("quantization_config", "expert_dtype") if k in document}
    for _ in range(case.chance.choice((1, 1, 2, 3))):
        change(said, case.chance)
    case.files[CONFIG] = json.dumps(document | said).encode()


def tensors(case: Case) -> None:
    """The header of the tensors: dtypes, shapes, places, names."""
    document, body = header_of(case.data(TENSORS))
    change(document, case.chance)
    case.files[TENSORS] = with_header(document, body)


def numbers(case: Case) -> None:
    """Bytes of codes, scales and other tensors; the file's size stays right."""
    data = bytearray(case.data(TENSORS))
    document, body = header_of(data)
    entries = [v["data_offsets"] for k, v in document.items() if ".experts." in k]
    for _ in range(case.chance.choice((1, 4, 64))):
        begin, end = case.chance.choice(entries)
        at = len(data) - len(body) + case.chance.randrange(begin, end)
        data[at] = case.chance.choice((0, 0x7F, 0x80, 0xFF, case.chance.getrandbits(8)))
    case.files[TENSORS] = bytes(data)


def files(case: Case) -> None:
    """Any bytes of one of the files."""
    name = case.chance.choice((CONFIG, TENSORS))
    case.files[name] = damaged(case.data(name), case.chance)


def attempt(root: Path, out: Path, writes: bool) -> str:
    """Read all experts as codes and as values, which must agree, and all else: "opened" or "refused"."""
    try:
        stream = StreamedModel(open_checkpoint(root))
        native = stream.native
        for layer, described in stream.expert_layers.items():
            every = range(described.experts)
            weights = stream.experts(layer, every)
            for m, codes in enumerate(stream.native_experts(layer, every) if native.released else ()):
                arrays = codes.arrays()
                for e in every:
                    mine = decode(codes.version, codes.group, **{n: a[e] for n, a in arrays.items()})
                    assert (bits_of(mine) == bits_of(weights.matrix(e, m))).all(), "its codes are not its values"
                    native.encode((described.matrices[m],), [as_released(codes, e, None)])
            stream.load(layer)
            stream.free(layer)
        stream.load(None)
        return "opened"
    except (MoepackError, OSError):
        return "refused"


KINDS: dict[Callable[[Any], None], int] = {settings: 30, tensors: 30, numbers: 30, files: 10}
SUBJECTS = tuple(Subject(f"checkpoint in {n}", partial(whole, name=n), Case, KINDS, attempt) for n in FORMATS)
