"""What changing versions while serving is worth, and what it costs: quality in a budget, and TPOT, in one run.

    python -m benchmarks.residency --checkpoint MODEL --calibration FILE... --data FILE...

Builds one bundle with `bf16`, `w4`, `w3` and `w2`. One session reads the files of `--data` one after another, so the
workload shifts twice where there are three. At each of three budgets between all-w2 and all-bf16 it serves them under:

- all-w2;
- two static maps for the first file: the experts that the router chose most there, and those that save most loss there.
  Each has all the room there is, as a map needs no reserve;
- `hotness` with bf16 and w2 alone, with two versions of its own choice, and with all versions;
- `lru`, which loads what a pass needs and waits.

Then it decodes token by token, with and without swaps at the rate limit, in turns. Without arguments: the model and
texts in examples/.
"""

import tempfile
from pathlib import Path

from benchmarks.common import built, finish, model_arguments, texts
from moepack.runtime.patches import quiet_libraries

from .decoding import tpot
from .quality import WINDOWS, quality


def main() -> None:
    parser = model_arguments(__doc__)
    args = parser.parse_args()
    quiet_libraries()
    _, data = texts(args)
    samples, windows = (32, 32) if args.quick else (192, WINDOWS)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bundle = built(args, work / "bundle", "bf16, w4, w3, w2", samples)
        rows, targets = quality(bundle, data, windows, work)
        more, others = tpot(bundle, args.quick)
    finish(f"residency of {args.checkpoint.name}", [*rows, *more], [*targets, *others], args.json)


if __name__ == "__main__":
    main()
