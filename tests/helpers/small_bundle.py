"""A bundle by hand, a quarter of a second to write: shapes that leave room for padding everywhere, biases, a raw tile,
escapes with patches, every version, dense matrices in three. No model serves it."""

import json
from pathlib import Path

import numpy as np
from released_values import random_released
from safetensors.numpy import save_file
from support import random_matrix

from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.manifest import Allocation, Manifest
from moepack.pack.safetensors_file import make_header
from moepack.pack.spec import DenseMatrix, ExpertLayer, Matrix, Version, dense_layers
from moepack.pack.tables import TABLES, metadata
from moepack.pack.writer import BundleWriter

EXPERTS, WINDOWS = 3, 2
MATRICES = (Matrix("gate_up", 18, 37, True), Matrix("down", 37, 9, True))
LAYERS = tuple(ExpertLayer(i, f"model.layers.{i}.mlp.experts", EXPERTS, MATRICES) for i in (1, 4))
VERSIONS = tuple(Version.of(name, 32) for name in ("bf16", "w8", "w4", "w3", "w2", "w1"))
DENSE = (
    DenseMatrix(1, "model.layers.1.self_attn.q_proj", Matrix("weight", 18, 37, True)),
    DenseMatrix(1, "model.layers.1.self_attn.o_proj", Matrix("weight", 37, 18)),
    DenseMatrix(5, "model.layers.5.mlp.up_proj", Matrix("weight", 20, 70)),
    DenseMatrix(None, "lm_head", Matrix("weight", 50, 33)),
)
DENSE_VERSIONS = tuple(Version.of(name, 32) for name in ("bf16", "w8", "w4"))


def lossless(seed: int, matrices: tuple[Matrix, ...] = MATRICES) -> list[LosslessMatrix]:
    """Weights like a trained matrix's, with a few rare exponents, which are escapes; every third expert's are any bits,
    in raw tiles."""
    rng = np.random.default_rng(seed)
    out = []
    for m in matrices:
        values = rng.normal(0, 0.02, (m.rows, m.cols)).astype(np.float32)
        values.reshape(-1)[rng.choice(values.size, 5, replace=False)] = [1e30, 1e-30, 1e20, 0.0, 1e10]
        bias = rng.normal(0, 1, m.rows).astype(np.float32)
        weight, bits = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (values, bias))
        if seed % 3 == 0:
            weight = rng.integers(0, 1 << 16, weight.shape).astype(np.uint16)
        out.append(LosslessMatrix(weight, bits if m.bias else None))
    return out


def affine(version: Version, seed: int, matrices: tuple[Matrix, ...] = MATRICES) -> list[AffineMatrix]:
    """Random codes."""
    return [random_matrix(m, version.at(i), seed + i) for i, m in enumerate(matrices)]


def extent(version: Version, seed: int, matrices: tuple[Matrix, ...] = MATRICES) -> tuple[np.ndarray, int]:
    """An extent, and its payload."""
    if version.released:
        return version.encode(matrices, [random_released(m, version, seed + i) for i, m in enumerate(matrices)])
    return version.encode(matrices, (lossless(seed, matrices) if version.plain else affine(version, seed, matrices)))


def statistics(index: int, versions: int = len(VERSIONS)) -> dict[str, np.ndarray]:
    """A layer's tables."""
    rng = np.random.default_rng(index)
    names = [f"{loss}{error}" for loss in ("mse", "relative", "gated") for error in ("", "_error")]
    losses = {k: rng.random((EXPERTS, versions), np.float32) for k in names}
    return losses | {
        "method": np.minimum(np.arange(versions), 1).astype(np.uint8)[None].repeat(EXPERTS, 0),
        "tokens": rng.integers(0, 99, EXPERTS),
        "gate_sum": rng.random(EXPERTS, np.float32),
        "prefill_counts": rng.integers(0, 9, (WINDOWS, EXPERTS)).astype(np.int32),
        "decode_counts": rng.integers(0, 9, (WINDOWS, EXPERTS)).astype(np.int32),
        "prefill_gates": rng.random((WINDOWS, EXPERTS), np.float32),
        "coactivation": rng.integers(0, 99, (EXPERTS, EXPERTS)),
        "reuse": np.full((), 0.25, np.float32),
    }


def dense_losses() -> dict[str, np.ndarray]:
    """The dense matrices' tables."""
    rng = np.random.default_rng(7)
    shape = (len(DENSE), len(DENSE_VERSIONS))
    losses = {f"dense.{k}": rng.random(shape, np.float32) for k in ("relative", "mse")}
    return losses | {
        "dense.method": np.ones(shape, np.uint8),
        "dense.signal": rng.random(len(DENSE), np.float32),
        "dense.tokens": np.full(len(DENSE), 512),
    }


def released_versions(name: str, group_size: int) -> tuple[Version, ...]:
    """A released version, and those that may stand beside it."""
    return Version.of(name, group_size), Version.of("w3", 32), Version.of("w2", 32)


def write_small_bundle(path: Path, versions: tuple[Version, ...] = VERSIONS, dtype: str = "BF16") -> Path:
    """Write it; leaves the layer files beside it in `made`."""
    with BundleWriter(path) as writer:
        experts = [(v, x, 100 * x.index, [MATRICES] * EXPERTS) for v in versions for x in LAYERS]
        layers = dense_layers(DENSE)
        dense = [(v, x, 1000 + x.first, [(m.matrix,) for m in x.matrices]) for v in DENSE_VERSIONS for x in layers]
        for version, layer, seed, shapes in (*experts, *dense):
            name = layer.file(version.name)
            with LayerFileWriter(path.with_name("made") / name, version.name, layer) as file:
                for e, matrices in enumerate(shapes):
                    file.add(*extent(version, seed + e, matrices))
            assert file.entry is not None
            writer.adopt(name, path.with_name("made") / name, file.entry)
        tables = {f"layers.{x.index}.{k}": v for x in LAYERS for k, v in statistics(x.index, len(versions)).items()}
        tables |= dense_losses()
        columns = {"dense_versions": ",".join(v.name for v in DENSE_VERSIONS)}
        save_file(tables, writer.path(TABLES), metadata([v.name for v in versions], ("none", "rtn")) | columns)
        (writer.root / "config.json").write_text(
            json.dumps({"model_type": "qwen3_moe", "quantization_config": {"quant_method": "moepack"}})
        )
        tripwire = f"{LAYERS[0].module}.down_proj"
        (writer.root / "model.safetensors").write_bytes(
            make_header({"a.weight": ("BF16", (4, 2)), tripwire: ("BF16", (1,)), "b": ("F32", ())}, {})
            + np.arange(8, dtype=np.uint16).tobytes() + bytes(2) + np.float32(1.5).tobytes()
        )  # fmt: skip
        for name in (TABLES, "config.json", "model.safetensors"):
            writer.add(name)
        model = {"model_type": "qwen3_moe", "architecture": "Qwen3MoeForCausalLM", "expert_dtype": dtype}
        table = tuple(tuple(v.name for v in versions[:EXPERTS]) for _ in LAYERS)
        chosen = Allocation("by hand", table, ("w4", "bf16", "w8", "w8"))
        writer.finish(
            Manifest(
                {**model, "decoder_layers": 6}, LAYERS, versions, {}, {}, {}, chosen,
                dense=DENSE, dense_versions=DENSE_VERSIONS,
            )
        )  # fmt: skip
    return path
