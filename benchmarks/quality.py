"""What each version costs in perplexity, against the plain transformers model, in one run.

    python -m benchmarks.quality --checkpoint MODEL --calibration FILE... --data FILE...

Builds a bundle of the checkpoint with `gptq`, and one rounded to nearest for comparison, and evaluates every
version on every file in float32 (so that differences of 0.1 % are not rounding). Without arguments: the model and texts
in examples/.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

from benchmarks.common import Row, Target, built, finish, model_arguments, texts
from moepack.reports.evaluate import evaluate
from moepack.reports.inspect import inspect
from moepack.runtime.patches import quiet_libraries
from moepack.runtime.planning.options import LoadOptions

WINDOWS = 256  # of 512 tokens to evaluate on, a file
LIMITS = {"bf16": 0.1, "w4": 0.6, "w3": 1.5, "w2": 6.0}  # per cent above the plain model, on each file


def main() -> None:
    """Parse arguments, build, evaluate, print."""
    parser = model_arguments(__doc__)
    args = parser.parse_args()
    quiet_libraries()
    _, data = texts(args)
    samples, windows = (64, 16) if args.quick else (384, WINDOWS)

    plain = evaluate(args.checkpoint, data, LoadOptions(dtype="float32"), samples=windows)
    names = [Path(f.file).stem for f in plain.files]
    rows: list[Row] = [
        {
            "version": "transformers",
            "bits/weight": 16.0,
            **{n: f.perplexity for n, f in zip(names, plain.files, strict=True)},
        }
    ]
    targets = []
    with tempfile.TemporaryDirectory() as work:
        for method in ("gptq", "rtn"):
            bundle = built(args, Path(work) / method, "bf16, w4, w3, w2, w1", samples, method)
            facts = inspect(bundle)
            for version, described in facts["versions"].items():
                if method != "gptq" and version == "bf16":
                    continue
                score = evaluate(
                    bundle, data, LoadOptions(policy=f"static:{version}", dtype="float32"), samples=windows
                )
                row: Row = {
                    "version": version if version == "bf16" else f"{version} {method}",
                    "bits/weight": described["bits_per_weight"],
                    "loss": facts["loss"][version],
                }
                worst = -math.inf
                for name, ours, theirs in zip(names, score.files, plain.files, strict=True):
                    rise = 100 * (ours.perplexity / theirs.perplexity - 1)
                    row[name], row[f"{name} %"] = ours.perplexity, f"{rise:+.2f}"
                    worst = max(worst, abs(rise) if version == "bf16" else rise)
                rows.append(row)
                if method == "gptq" and version in LIMITS:
                    targets.append(Target(f"{version}: worst rise in perplexity, %", worst, LIMITS[version], "lower"))
    finish(f"perplexity of {args.checkpoint.name}", rows, targets, args.json)


if __name__ == "__main__":
    main()
