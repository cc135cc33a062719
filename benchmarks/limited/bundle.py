"""Writes the bundle of a generated model: quantises each distinct matrix once, and repeats its extents on disk.

Every layer has files of its own, so the page cache and reads count each, whatever bytes they hold. Rounding to nearest
makes the versions: any method's extents have as many bytes.
"""

import json
import platform
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor

from benchmarks.common import Row
from moepack.calibrate.forward import Observation
from moepack.calibrate.statistics import routing_statistics
from moepack.pack.codec.affine import AffineMatrix, put_rows
from moepack.pack.codec.bits import Buffer
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.codec.released import ReleasedMatrix
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.manifest import CONFIG, DENSE, TABLES, Manifest
from moepack.pack.spec import HINT, DenseLayer, DenseMatrix, ExpertLayer, Matrix, Version, dense_layers
from moepack.pack.tables import metadata, write_tables
from moepack.pack.writer import BundleWriter
from moepack.quantize import methods
from moepack.quantize.dense_matrix import row_shards
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import quantise_all

from .shapes import CONTEXT, TOPICS, Shape, text, word
from .weights import ADDED, Weights, chosen

DENSE_VERSIONS = (Version.of("w8", 128), Version.of("w4", 128))
METHOD = "rtn"
# of the text that tables are made on: tokens of a window, windows of a topic
WINDOW = 512
WINDOWS = 8
# Relative losses of an expert in the tables: those of a trained model (tiny-qwen3-moe by GPTQ), because policies weigh
# them, and random weights lose an order of magnitude more.
LOSSES = {"bf16": 0.0, "mxfp4": 0.0, "w4": 0.0020, "w2": 0.0325}
_STEPS = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])  # between the magnitudes of E2M1
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
SEED = 1000  # of the text that tables are made on; sessions have others


@dataclass(frozen=True, slots=True)
class Made:
    """A distinct matrix outside the experts: its extents and losses, by version."""

    extents: tuple[tuple[Buffer, int], ...]
    losses: tuple[tuple[float, float], ...]  # mean squared error of an output, and that over its mean square


class Maker:
    """Quantises what a generated model has, each distinct part once."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.weights = Weights(shape)
        self.versions = tuple(Version.of(name, group) for name, group in shape.groups)
        self.expert = lru_cache(maxsize=shape.distinct * shape.kinds)(self._expert)
        self.matrix = lru_cache(maxsize=4 * shape.distinct + 1)(self._matrix)

    def _tensor(self, name: str) -> Tensor:
        return torch.from_numpy(self.weights.bits(name).view(np.int16)).view(torch.bfloat16)

    def _expert(self, layer: int, kind: int) -> list[tuple[Buffer, int]]:
        """An expert's extents, by version."""
        at = f"model.layers.{layer}.mlp.experts.{kind}."
        gate, up, down = (self._tensor(f"{at}{name}_proj.weight").float() for name in ("gate", "up", "down"))
        own = torch.cat([gate, up]), down
        affine = [v for v in self.versions if not (v.released or v.entropy_coded)]
        made = [quantise_all(METHOD, w[None], None, affine) for w in own] if affine else []
        described = _experts(self.shape, layer).matrices
        values: dict[Version, Sequence[AffineMatrix | LosslessMatrix | ReleasedMatrix]] = {
            v: [m[v].matrix(0) for m in made] for v in affine
        }
        for version in self.versions:
            if version.released:
                values[version] = [mxfp4(w) for w in own]
            elif version.entropy_coded:
                values[version] = [LosslessMatrix(w.bfloat16().view(torch.uint16).numpy()) for w in own]
        return [v.encode(described, values[v]) for v in self.versions]

    def _matrix(self, name: str) -> Made:
        """A matrix outside the experts. Its inputs are taken to be white, so errors of weights stand for outputs'."""
        whole = self._tensor(f"{name}.weight")
        described = Matrix("weight", *whole.shape)
        outs = [np.zeros(v.resident_size((described,)), np.uint8) for v in DENSE_VERSIONS]
        errors = [0.0] * len(outs)
        power = 0.0
        for rows in row_shards(*whole.shape):
            weight = whole[rows.start : rows.stop].float()
            part = Matrix("weight", *weight.shape)
            power = power + float(weight.square().sum())
            made = quantise_all(METHOD, weight[None], None, DENSE_VERSIONS)
            for i, (version, out) in enumerate(zip(DENSE_VERSIONS, outs, strict=True)):
                put_rows(described, version, rows, version.encode((part,), [made[version].matrix(0)])[0], out)
                errors[i] += float((dequantise(made[version], version)[0] - weight).square().sum())
        extents = [(out, v.payload((described,), out)) for v, out in zip(DENSE_VERSIONS, outs, strict=True)]
        return Made(tuple(extents), tuple((e / described.rows, e / power) for e in errors))

    def plain(self) -> dict[str, Tensor]:
        """The tensors that have no versions, and the two by which plain transformers refuses the bundle."""
        names = ["model.embed_tokens.weight", "model.norm.weight"]
        for i in range(self.shape.layers):
            own = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm", "mlp.gate")
            names += [f"model.layers.{i}.{name}.weight" for name in own]
        tripwire = dict.fromkeys(("model.layers.0.mlp.experts.down_proj", HINT))
        return {n: self._tensor(n) for n in names} | {n: torch.zeros(1, dtype=torch.bfloat16) for n in tripwire}


def mxfp4(weight: Tensor) -> ReleasedMatrix:
    """Weights in MXFP4, as a model would be released: each goes to the nearest code.

    The scale of 32 columns is the power of two with the smaller squared error of the nearest two.
    """
    groups = weight.view(len(weight), -1, 32)
    low = torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)).floor() - 2
    errors = []
    for exponent in (low, low + 1):
        scaled = groups.abs() / torch.exp2(exponent)
        nearest = _E2M1[torch.bucketize(scaled, _STEPS)]
        errors.append(((nearest - scaled) * torch.exp2(exponent)).square().sum(-1, keepdim=True))
    exponent = torch.where(errors[1] < errors[0], low + 1, low)
    scaled = (groups / torch.exp2(exponent)).view_as(weight)
    codes = torch.bucketize(scaled.abs(), _STEPS) | (scaled < 0).int() << 3
    return ReleasedMatrix(codes.to(torch.uint8).numpy(), (exponent.squeeze(-1) + 127).to(torch.uint8).numpy())


def _experts(shape: Shape, layer: int) -> ExpertLayer:
    matrices = Matrix("gate_up", 2 * shape.inner, shape.hidden), Matrix("down", shape.hidden, shape.inner)
    return ExpertLayer(layer, f"model.layers.{layer}.mlp.experts", shape.experts, matrices)


def _dense(shape: Shape) -> tuple[DenseMatrix, ...]:
    q = shape.heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    hidden = shape.hidden
    sizes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    out = [
        DenseMatrix(i, f"model.layers.{i}.self_attn.{name}", Matrix("weight", *size))
        for i in range(shape.layers)
        for name, size in sizes.items()
    ]
    return (*out, DenseMatrix(None, "lm_head", Matrix("weight", shape.vocabulary, hidden)))


def write_bundle(shape: Shape, target: Path) -> None:
    """Write the bundle, which appears at `target` when it is whole. What a killed writer left is removed first."""
    maker = Maker(shape)
    dense = _dense(shape)
    layers = tuple(_experts(shape, i) for i in range(shape.layers))
    with BundleWriter(target) as writer:
        aside = writer.root / ".aside"  # for files that move in
        aside.mkdir()
        save_file(maker.plain(), writer.path(DENSE), {"format": "pt"})
        writer.add(DENSE)
        for part in dense_layers(dense):
            made = [maker.matrix(maker.weights.source(m.module)) for m in part.matrices]
            for column, version in enumerate(DENSE_VERSIONS):
                put_layer(writer, aside / "layer", version, part, (m.extents[column] for m in made))
        for layer in layers:
            print(f"layer {layer.index} of {shape.layers}", flush=True)
            kinds = [maker.expert(layer.index % shape.distinct, k) for k in range(shape.kinds)]
            for column, version in enumerate(maker.versions):
                extents = (kinds[e % shape.kinds][column] for e in range(shape.experts))
                put_layer(writer, aside / "layer", version, layer, extents)
        _tables(maker, dense, writer.path(TABLES), aside)
        writer.add(TABLES)
        config = {**shape.config(), "quantization_config": {"quant_method": "moepack"}}
        writer.path(CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        writer.add(CONFIG)
        for name, words in tokenizer(shape).items():
            writer.path(name).write_text(words)
            writer.add(name)
        model: Row = {"architecture": "Qwen3MoeForCausalLM", "model_type": "qwen3_moe"}
        model |= {"decoder_layers": shape.layers, "expert_dtype": shape.released}
        provenance: Row = {"checkpoint": {"name": shape.name}, "method": METHOD}
        provenance["calibration"] = {"samples": TOPICS * WINDOWS, "length": WINDOW, "sources": ["generated"]}
        provenance["tools"] = {"python": platform.python_version()}
        shutil.rmtree(aside)
        writer.finish(
            Manifest(model, layers, maker.versions, {}, {}, provenance, dense=dense, dense_versions=DENSE_VERSIONS)
        )


def tokenizer(shape: Shape) -> dict[str, str]:
    """The files of a tokenizer that has a word for every id, so that what a model says is a text."""
    words = Tokenizer(WordLevel({word(i): i for i in range(shape.vocabulary)}, unk_token=word(0)))
    words.pre_tokenizer = WhitespaceSplit()
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT}
    return {"tokenizer.json": words.to_str(), "tokenizer_config.json": json.dumps(config, indent=2) + "\n"}


def put_layer(
    writer: BundleWriter,
    aside: Path,
    version: Version,
    layer: ExpertLayer | DenseLayer,
    extents: Iterable[tuple[Buffer, int]],
) -> None:
    """Write a layer's file at `aside`, and move it into the bundle."""
    with LayerFileWriter(aside, version.name, layer) as file:
        for extent, payload in extents:
            file.add(extent, payload)
    assert file.entry is not None
    writer.adopt(layer.file(version.name), aside, file.entry)
    aside.unlink()


def _tables(maker: Maker, dense: Sequence[DenseMatrix], path: Path, aside: Path) -> None:
    shape = maker.shape
    number = methods.numbered().index(METHOD)
    pairs = {}
    ids = [text(topic, WINDOW, SEED + i) for i in range(WINDOWS) for topic in range(TOPICS)]
    about = metadata([v.name for v in maker.versions], methods.numbered())
    embedded = maker.weights.embedding(np.array(ids).reshape(-1))
    for i in range(shape.layers):
        experts, gates = chosen(maker.weights, i, embedded)
        seen = Observation(torch.empty(0), torch.from_numpy(experts.astype(np.int32)), torch.from_numpy(gates), WINDOW)
        counted = routing_statistics(seen, shape.experts)
        squared = (counted["gate_sum"] / counted["tokens"].clamp(min=1)).square()
        relative = torch.tensor([[LOSSES[v.name] for v in maker.versions]] * shape.experts)
        losses = {"mse": relative.clone(), "relative": relative}  # of outputs of mean square 1
        losses["gated"] = losses["mse"] * squared[:, None]
        losses |= {f"{name}_error": torch.zeros_like(table) for name, table in losses.items()}
        losses["method"] = torch.full(losses["mse"].shape, number, dtype=torch.uint8)
        pairs[i] = aside / f"statistics-{i}", aside / f"losses-{i}"
        save_file(counted, pairs[i][0])
        save_file(losses, pairs[i][1], about)
    rows = torch.tensor([maker.matrix(maker.weights.source(m.module)).losses for m in dense])
    facts = {"mse": rows[..., 0].contiguous(), "relative": rows[..., 1].contiguous()}
    facts["method"] = torch.full(facts["mse"].shape, number, dtype=torch.uint8)
    facts["signal"] = torch.full((len(dense),), ADDED**2)
    facts["tokens"] = torch.full((len(dense),), len(ids) * WINDOW, dtype=torch.int64)
    save_file(facts, aside / "dense")
    write_tables(path, pairs, (aside / "dense", [v.name for v in DENSE_VERSIONS]))
