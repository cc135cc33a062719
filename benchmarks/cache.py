"""What a cache in fewer bits costs and gains: loss beside a version of experts, bytes, and the time of a decoded token.

    python -m benchmarks.cache [--checkpoint MODEL --data FILE...]

The loss is the divergence from the lossless version with a plain cache, in float32, so that it is not rounding; the row
`w4` has a plain cache and all experts in 4 bits. Times are one attention layer's, as in benchmarks/depth.py: all forms
take turns in one run on one thread, and are medians of processor time.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Row, Target, built, finish, model_arguments, texts
from benchmarks.depth import LAYERS, filled, one_layer, served, turns
from moepack.reports.evaluate import evaluate
from moepack.runtime.kernels.kv_rows import row_bytes
from moepack.runtime.kv.forms import FORMS, PLAIN_KV
from moepack.runtime.kv.growing import grow_in_place, layer_bits, new_cache
from moepack.runtime.patches import quiet_libraries
from moepack.runtime.planning.options import LoadOptions

ROUNDS = 15
HEAD = 128  # numbers of a key of most released models


def losses(bundle: Path, data: list[str], windows: int, length: int) -> list[Row]:
    """The divergence of each form with lossless experts, and of w4 with a plain cache."""
    rows = []
    for version, kv in (("w4", PLAIN_KV), *(("bf16", kv) for kv in FORMS)):
        options = LoadOptions(policy=f"static:{version}", kv=kv, dtype="float32")
        found = evaluate(bundle, data, options, length=length, samples=windows, kl=True)
        assert found.kl is not None and found.kl_interval is not None
        bits = [16.0 if n == 16 else 8 * row_bytes(HEAD, n) / HEAD for n in FORMS[kv]]
        rows.append(
            {"experts": version, "kv": kv, "bits a number": statistics.mean(bits), "KL": found.kl}
            | {"95 %": "{:.2g}-{:.2g}".format(*found.kl_interval), "perplexity": found.perplexity}
        )
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
    took = turns({kv: (model, cache) for kv, cache in caches.items()}, depth, ROUNDS)
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
    parser = model_arguments(__doc__, 384)
    parser.add_argument("--windows", type=int, default=64, help="windows a file")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    args = parser.parse_args()
    quiet_libraries()
    windows, samples = (4, 32) if args.quick else (args.windows, args.samples)
    with tempfile.TemporaryDirectory() as work:
        bundle = built(args, Path(work) / "bundle", "bf16, w4", samples=samples)
        rows = losses(bundle, texts(args)[1], windows, args.window)
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
