"""A bundle by hand, a quarter of a second to write: shapes that leave room for padding everywhere, biases, a raw tile,
escapes with patches, five versions. No model serves it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from support import random_matrix

from moepack.pack.affine import AffineMatrix, encode_affine
from moepack.pack.layer_file import LayerFileWriter
from moepack.pack.lossless import LosslessMatrix, encode_lossless
from moepack.pack.manifest import Allocation, Manifest
from moepack.pack.safetensors_file import make_header
from moepack.pack.spec import ExpertLayer, Matrix, Version, affine_payload, expert_file
from moepack.pack.tables import TABLES, metadata
from moepack.pack.writer import BundleWriter

EXPERTS, WINDOWS = 3, 2
MATRICES = (Matrix("gate_up", 18, 37, True), Matrix("down", 37, 9, True))
LAYERS = tuple(ExpertLayer(i, f"model.layers.{i}.mlp.experts", EXPERTS, MATRICES) for i in (1, 4))
VERSIONS = tuple(Version.of(name, 32) for name in ("bf16", "w4", "w3", "w2", "w1"))


def lossless(seed: int) -> list[LosslessMatrix]:
    """Weights like a trained matrix's, with a few rare exponents, which are escapes; every third expert's are any bits,
    in raw tiles."""
    rng = np.random.default_rng(seed)
    out = []
    for m in MATRICES:
        values = rng.normal(0, 0.02, (m.rows, m.cols)).astype(np.float32)
        values.reshape(-1)[rng.choice(values.size, 5, replace=False)] = [1e30, 1e-30, 1e20, 0.0, 1e10]
        bias = rng.normal(0, 1, m.rows).astype(np.float32)
        weight, bits = ((x.view(np.uint32) >> 16).astype(np.uint16) for x in (values, bias))
        if seed % 3 == 0:
            weight = rng.integers(0, 1 << 16, weight.shape).astype(np.uint16)
        out.append(LosslessMatrix(weight, bits))
    return out


def affine(version: Version, seed: int) -> list[AffineMatrix]:
    """Random codes."""
    return [random_matrix(m, version, seed + i) for i, m in enumerate(MATRICES)]


def statistics(index: int) -> dict[str, np.ndarray]:
    """A layer's tables."""
    rng = np.random.default_rng(index)
    names = [f"{loss}{error}" for loss in ("mse", "relative", "gated") for error in ("", "_error")]
    losses = {k: rng.random((EXPERTS, len(VERSIONS)), np.float32) for k in names}
    return losses | {
        "method": np.minimum(np.arange(len(VERSIONS)), 1).astype(np.uint8)[None].repeat(EXPERTS, 0),
        "tokens": rng.integers(0, 99, EXPERTS),
        "gate_sum": rng.random(EXPERTS, np.float32),
        "prefill_counts": rng.integers(0, 9, (WINDOWS, EXPERTS)).astype(np.int32),
        "decode_counts": rng.integers(0, 9, (WINDOWS, EXPERTS)).astype(np.int32),
        "prefill_gates": rng.random((WINDOWS, EXPERTS), np.float32),
        "coactivation": rng.integers(0, 99, (EXPERTS, EXPERTS)),
        "reuse": np.full((), 0.25, np.float32),
    }


def write_small_bundle(path: Path) -> Path:
    """Write it; leaves the layer files beside it in `made`."""
    with BundleWriter(path) as writer:
        for version in VERSIONS:
            for layer in LAYERS:
                name = expert_file(version.name, layer.index)
                with LayerFileWriter(path.with_name("made") / name, version.name, layer) as file:
                    for e in range(EXPERTS):
                        seed = 100 * layer.index + e
                        if version.is_lossless:
                            file.add(*encode_lossless(MATRICES, lossless(seed)))
                        else:
                            extent = encode_affine(MATRICES, version, affine(version, seed))
                            file.add(extent, affine_payload(MATRICES, version))
                assert file.entry is not None
                writer.adopt(name, path.with_name("made") / name, file.entry)
        tables = {f"layers.{x.index}.{k}": v for x in LAYERS for k, v in statistics(x.index).items()}
        save_file(tables, writer.path(TABLES), metadata([v.name for v in VERSIONS], ("none", "rtn")))
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
        model = {"model_type": "qwen3_moe", "architecture": "Qwen3MoeForCausalLM", "expert_dtype": "BF16"}
        table = tuple(tuple(v.name for v in VERSIONS[:EXPERTS]) for _ in LAYERS)
        writer.finish(
            Manifest({**model, "decoder_layers": 6}, LAYERS, VERSIONS, {}, {}, {}, Allocation("by hand", table))
        )
    return path
