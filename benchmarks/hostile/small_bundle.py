"""A bundle by hand, a quarter of a second to write: shapes that leave room for padding everywhere, biases, a raw tile,
escapes with patches, every version, dense matrices in three. No model serves it."""

import json
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from benchmarks.common import Row
from benchmarks.limited.bundle import put_layer
from benchmarks.random_matrices import Coded, coded
from moepack.pack.codec.bits import Buffer
from moepack.pack.codec.lossless import LosslessMatrix
from moepack.pack.manifest import Allocation, Manifest
from moepack.pack.safetensors_file import make_header
from moepack.pack.spec import DenseMatrix, ExpertLayer, Matrix, Version, dense_layers
from moepack.pack.tables import TABLES, metadata
from moepack.pack.writer import BundleWriter

Tables = dict[str, npt.NDArray[np.generic]]
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


def with_codes(version: Version, seed: int, matrices: tuple[Matrix, ...] = MATRICES) -> list[Coded]:
    """Random codes."""
    return [coded(m, version.at(i), seed + i) for i, m in enumerate(matrices)]


def extent(version: Version, seed: int, matrices: tuple[Matrix, ...] = MATRICES) -> tuple[Buffer, int]:
    """An extent, and its payload."""
    return version.encode(matrices, lossless(seed, matrices) if version.plain else with_codes(version, seed, matrices))


def statistics(index: int, versions: int = len(VERSIONS)) -> Tables:
    """A layer's tables."""
    rng = np.random.default_rng(index)
    names = [f"{loss}{error}" for loss in ("mse", "relative", "gated") for error in ("", "_error")]
    losses: Tables = {k: rng.random((EXPERTS, versions), np.float32) for k in names}
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


def dense_losses() -> Tables:
    """The dense matrices' tables."""
    rng = np.random.default_rng(7)
    shape = (len(DENSE), len(DENSE_VERSIONS))
    losses: Tables = {f"dense.{k}": rng.random(shape, np.float32) for k in ("relative", "mse")}
    return losses | {
        "dense.method": np.ones(shape, np.uint8),
        "dense.signal": rng.random(len(DENSE), np.float32),
        "dense.tokens": np.full(len(DENSE), 512),
    }


# Versions that hold a released checkpoint, with group sizes.
RELEASED = (
    ("mxfp4", 32), ("nvfp4", 16), ("mxfp8", 32), ("fp8", 128), ("fp8", 32), ("fp8row", 0),
    ("int4", 32), ("int8", 128), ("int4fp16", 128), ("int8fp16", 32),
)  # fmt: skip


def released_versions(name: str, group_size: int) -> tuple[Version, ...]:
    """A released version, and those that may stand beside it."""
    return Version.of(name, group_size), Version.of("w3", 32), Version.of("w2", 32)


def write_small_bundle(path: Path, versions: tuple[Version, ...] = VERSIONS, dtype: str = "BF16") -> Path:
    """Write it."""
    with BundleWriter(path) as writer:
        aside = path.with_name("aside")
        for version in versions:
            for layer in LAYERS:
                extents = (extent(version, 100 * layer.index + e) for e in range(EXPERTS))
                put_layer(writer, aside, version, layer, extents)
        for version in DENSE_VERSIONS:
            for part in dense_layers(DENSE):
                extents = (extent(version, 1000 + i, (m.matrix,)) for i, m in enumerate(part.matrices, part.first))
                put_layer(writer, aside, version, part, extents)
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
        model: Row = {"model_type": "qwen3_moe", "architecture": "Qwen3MoeForCausalLM", "expert_dtype": dtype}
        table = tuple(tuple(v.name for v in versions[:EXPERTS]) for _ in LAYERS)
        chosen = Allocation("by hand", table, ("w4", "bf16", "w8", "w8"))
        writer.finish(
            Manifest(
                {**model, "decoder_layers": 6}, LAYERS, versions, {}, {}, {}, chosen,
                dense=DENSE, dense_versions=DENSE_VERSIONS,
            )
        )  # fmt: skip
    return path
