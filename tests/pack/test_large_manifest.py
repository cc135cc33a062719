"""A generated manifest of DeepSeek-V3's size."""

from moepack.pack.layer_file import header_size
from moepack.pack.manifest import Allocation, ExpertFileEntry, FileEntry, Manifest
from moepack.pack.reader import open_bundle
from moepack.pack.spec import PAGE, ExpertLayer, Matrix, Version, expert_file

LAYERS, EXPERTS = 58, 256
MATRICES = (Matrix("gate_up", 4096, 7168, False), Matrix("down", 7168, 2048, False))


def test_58_layers_of_256_experts_at_5_versions_open(tmp_path):
    """Files with the sizes of DeepSeek-V3's, and holes for their bytes."""
    layers = tuple(ExpertLayer(3 + i, f"model.layers.{3 + i}.mlp.experts", EXPERTS, MATRICES) for i in range(LAYERS))
    versions = tuple(Version.of(name, 128) for name in ("bf16", "w4", "w3", "w2", "w1"))
    names = ("config.json", "calibration.safetensors", "model.safetensors")
    files, experts = {name: FileEntry(100, "0" * 64) for name in names}, {}
    for version in versions:
        for layer in layers:
            head, size, payload = header_size(version.name, layer), 60 * PAGE, 59 * PAGE
            if not version.plain:
                size, payload = version.resident_size(MATRICES), version.stored_sizes(MATRICES)[1]
            entry = ExpertFileEntry(head + EXPERTS * size, head, "0" * 64, EXPERTS * payload)
            experts[expert_file(version.name, layer.index)] = entry
    names = [v.name for v in versions]
    table = tuple(tuple(names[(p + e) % 5] for e in range(EXPERTS)) for p in range(LAYERS))
    model = {"model_type": "deepseek_v3", "architecture": "x", "decoder_layers": 61, "expert_dtype": "F8_E4M3"}
    manifest = Manifest(model, layers, versions, files, experts, {}, Allocation("each", table))
    (tmp_path / "manifest.json").write_bytes(manifest.to_json())
    for name, entry in (*files.items(), *experts.items()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as f:
            f.truncate(entry.size)
    bundle = open_bundle(tmp_path)
    assert len(bundle.versions) == 5 and sum(x.experts for x in bundle.layers) == LAYERS * EXPERTS
    (tmp_path / expert_file("w3", 7)).unlink()
    assert [v.name for v in open_bundle(tmp_path, skip_partial=True).versions] == ["bf16", "w4", "w2", "w1"]
