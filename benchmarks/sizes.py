"""How large bundles of released models are: as released, in lossless BF16, and at w4, w3 and w2.

    python -m benchmarks.sizes [--only NAME ...] [--json FILE]

Bytes follow from the configurations in examples/configs/: no weight is read. What stands beside the experts counts in
BF16, as a bundle holds it. Bytes of lossless BF16 and of FP8 codes are scaled from Gaussian values, all others exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.common import EXAMPLES, arguments, finish

if TYPE_CHECKING:
    from moepack.pack.spec import Matrix, Version

CONFIGS = EXAMPLES / "configs"
SHOWN = (
    "gpt-oss-20b", "qwen3.6-35b-a3b", "gpt-oss-120b", "qwen3.8-flash-next", "deepseek-v4-flash", "glm-5.3", "kimi-k2.5"
)  # fmt: skip
LOSSY = {"w4": 128, "w3": 128, "w2": 64}  # group sizes, as recipes for large models have them


def row(folder: Path) -> dict[str, Any]:
    """A model's bytes in GB: beside its experts, and of all experts in each version."""
    from moepack.calibrate.outline import open_outline
    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.spec import Version

    outline = open_outline(folder)
    assert outline is not None and outline.native is not None
    stream = StreamedModel(outline.checkpoint, "cpu")
    layers = list(stream.expert_layers.values())
    plain = sum(x.experts * sum(2 * (m.weights + m.rows * m.bias) for m in x.matrices) for x in layers)
    everything = sum(stream.part_bytes(part) for part in (None, *range(len(stream.layers))))
    found: dict[str, Any] = {"model": folder.name, "native": outline.native.name, "beside, GB": everything - plain}
    named: dict[str, Version] = {"native": outline.native, "bf16": Version.of("bf16")}
    named |= {name: Version.of(name, group) for name, group in LOSSY.items()}
    for name, version in named.items():
        found[f"experts {name}, GB"] = sum(x.experts * _extent(version, x.matrices) for x in layers)
    return {key: round(value / 1e9, 2) if key.endswith("GB") else value for key, value in found.items()}


def _extent(version: Version, matrices: Sequence[Matrix]) -> int:
    """Bytes of an expert in its file."""
    from moepack.pipeline.dryrun.ahead import sample

    sizes = version.stored_sizes(matrices)
    if sizes is not None:
        return sizes[0]
    bits, _ = sample(version, matrices[0].cols)
    return int(bits * sum(m.weights for m in matrices) / 8)


def main() -> None:
    """Count and show."""
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=SHOWN, help="these models")
    args = parser.parse_args()
    names = args.only or (SHOWN[:2] if args.quick else SHOWN)
    rows = [row(CONFIGS / name) for name in names]
    finish("bytes by configuration", list(rows[0]), rows, [], args.json)


if __name__ == "__main__":
    main()
