"""What lowers a version's divergence in building, and what does not, in one run.

    python -m benchmarks.tried [--checkpoint MODEL --calibration FILE... --data FILE...]

Every expert is quantised at one version, in one way after another (`ways.WAYS`). Shown are the divergence from the
exact model, its ratio to that of the first way (a build's) with a 95 % interval over windows of text, the same to the
divergence of `w4` to `w1` at as many bits (between two widths log-linear), if all of them are measured, and the
seconds that the way took. Without arguments: the model and texts in examples/.
"""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import torch

from benchmarks.common import Target, finish, model_arguments, texts
from benchmarks.decoding import Mean
from benchmarks.formats.measure import at_bits, ratio_of
from benchmarks.formats.schemes import GROUP, TODAY, of_version
from benchmarks.peers.quality import LENGTH, divergence_of, log_probabilities, replaced
from moepack.calibrate.text.windows import calibration_windows, load_tokenizer
from moepack.pack.spec import SCALE_BITS, Version
from moepack.runtime.patches import quiet_libraries

from .ways import WAYS, Way, of_model


def main() -> None:
    """Parse arguments, quantise, measure, print."""
    parser = model_arguments(__doc__, 384)
    parser.add_argument("--windows", type=int, default=96, help=f"windows of {LENGTH} tokens to measure on")
    parser.add_argument("--versions", nargs="+", default=["w4", "w3", "w2", "w1"])
    parser.add_argument("--scale-bits", nargs="+", type=int, choices=SCALE_BITS, default=SCALE_BITS[:1])
    parser.add_argument(
        "--ways", nargs="+", type=int, default=list(range(6)), help="by number; 0 is the build's, 6 AutoRound's"
    )
    args = parser.parse_args()
    quiet_libraries()
    calibration, data = texts(args)
    samples, windows = (16, 6) if args.quick else (args.samples, args.windows)
    versions = ["w2"] if args.quick else args.versions
    ways = [WAYS[i] for i in ([0, 1, 3] if args.quick else args.ways)]
    tokenizer = load_tokenizer(args.checkpoint)
    learn, ids = (
        calibration_windows(t, tokenizer, n, 256, 0).ids for t, n in ((calibration, samples), (data, windows))
    )
    rows = _rows(args.checkpoint, learn, ids, list(product(args.scale_bits, versions)), ways)
    if not rows:
        raise SystemExit(f"no way measures {', '.join(versions)}")
    best = min((r["over as built"] for r in rows if r["way"] != ways[0].name), default=1.0)
    target = Target("divergence of the best way over a build's", best, 0.98, "lower")
    what = f"divergence of {args.checkpoint.name} from its exact self, every expert at one version"
    finish(what, list(rows[-1]), rows, [target], args.json)


def _rows(
    checkpoint: Any, learn: torch.Tensor, ids: torch.Tensor, versions: list[tuple[int, str]], ways: list[Way]
) -> Any:
    """One row a version, by the bits of its scales and its name, and way."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    reference, out = log_probabilities(model, ids), list[dict[str, Any]]()
    weights = [w for layer in model.model.layers for w in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj)]
    anchors: dict[str, tuple[float, list[float]]] = {}  # bits a weight, divergence by window, of today's as built
    first, by_window = list[float](), list[list[float]]()
    for (scale_bits, name), way in product(sorted(versions, key=lambda v: v[1] not in TODAY), ways):
        if way.library is not None and (name not in TODAY[:3] or scale_bits < 16):
            continue  # neither mixed widths nor one bit
        began = time.perf_counter()
        group = GROUP if name in TODAY else 0  # others' default
        values = of_model(checkpoint, learn, Version.of(name, group, scale_bits=scale_bits), way)
        seconds = time.perf_counter() - began
        with replaced([w.data for w in weights], [v for pair in values for v in pair]):
            found = divergence_of(model, ids, reference)
        first = found if way is ways[0] else first
        bits = _bits(name, group, scale_bits, weights[0], weights[1])
        if way.library is not None:  # scales of 16 bits, zero points of as many as codes
            bits = int(name[1:]) + (16 + int(name[1:])) / GROUP
        if name in TODAY and way is ways[0] and scale_bits == 16:
            anchors[name] = bits, found
        row: dict[str, Any] = {
            "version": name,
            "scale bits": scale_bits,
            "way": way.name,
            "bits/weight": bits,
            "KL, mnat": 1e3 * Mean.of(found).value,
        }
        row["over as built"], row["+-"] = ratio_of(found, first)
        by_window.append(found)
        out.append(row | {"seconds": seconds})
        print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in out[-1].items()), flush=True)
    for row, found in zip(out, by_window, strict=True) if set(TODAY) <= anchors.keys() else ():
        beside = at_bits(sorted(anchors.values()), row["bits/weight"])
        row["over today's at these bits"], row["today +-"] = ratio_of(found, beside)
    return out


def _bits(name: str, group: int, scale_bits: int, *weights: torch.Tensor) -> float:
    """Bits a weight of a version of experts with these matrices [experts, rows, cols]."""
    sides = of_version("moepack", name, group, scale_bits=scale_bits).sides
    sizes = [side.size(w.shape[2]) * w[0].numel() for side, w in zip(sides, weights, strict=True)]
    return sum(sizes) / sum(w[0].numel() for w in weights)


if __name__ == "__main__":
    main()
