"""All policies on one model, one bundle and the same bytes of device memory, in one run.

    python -m benchmarks.policies --checkpoint MODEL --calibration FILE... --data FILE...

Builds one bundle with `bf16`, `w4`, `w3`, `w2` and `w1`. The texts of `--data` are read one after another in one
session: of each window a prompt at once, and then token by token, its own tokens being put in, so that all policies
decode the same tokens. At each of three budgets, between all experts at `w2` and all at `bf16`: perplexity; divergence
from the model served all at `bf16`, with the 95 % interval of its mean over windows; time to first token and time per
output token; bytes copied while serving, those that a pass waited for and those fetched ahead; and the peak of device
memory. Then the tables of the policies' own papers (claims.py). Without arguments: the model and texts in examples/.
"""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import moepack
from benchmarks.common import Row, built, finish, model_arguments, show, texts
from benchmarks.decoding import Decoded, Text
from moepack.calibrate.text.windows import windows
from moepack.families.tokenizer import load_tokenizer
from moepack.pack.reader import open_bundle
from moepack.pipeline.allocate import bundle_costs, expected_losses, named
from moepack.runtime.allocation.knapsack import greedy
from moepack.runtime.patches import quiet_libraries

from .claims import prefetch, residency, retention, selector, similarity
from .session import Session

SHARES = (0.05, 0.3, 0.6)  # of the way from all w2 to all bf16
POLICIES = {
    "uniform": "uniform",
    "random": "random",
    "lru, bf16 over w2": "lru:hi=bf16,lo=w2",
    "lru, w4 or nothing": "lru:hi=w4,lo=absent",
    "hotness": "hotness:interval=0.2",
    "prefill, 3 bits": "prefill:bits=3",
    "prefill, 2 bits": "prefill:bits=2",
    "importance, 4/2": "importance:hi=w4,lo=w2",
    "importance, 4/0": "importance:hi=w4,lo=absent",
    "paged": "paged",
}
WINDOWS = 12  # that are served, a file


def best_map(bundle: Path, room: int, work: Path) -> str:
    """The static policy that calibration's losses make of these bytes."""
    opened = open_bundle(bundle)
    costs = bundle_costs(opened)
    sizes = [
        [v.resident_size(layer.matrices) for v in opened.versions]
        for layer in opened.layers
        for _ in range(layer.experts)
    ]
    losses = [row for layer in costs for row in expected_losses(layer, "gates")]
    file = work / "map.json"
    file.write_text(json.dumps({"versions": named(greedy(sizes, losses, room), opened.versions, costs)}))
    return f"static:{file}"


def at_budgets(session: Session, best: Decoded, shares: Sequence[float], work: Path) -> list[Row]:
    """Rows of all policies at all budgets, equal bytes of device memory in each."""
    low, low_counted = session.run("static:w2", reference=best)
    high = session.load("static:bf16")
    span = high.moepack.resident_bytes_peak - low_counted["peak"]
    high.moepack.close()
    del high
    rows = [session.row("all w2", low, low_counted, best)]
    for share in shares:
        budget = low_counted["peak"] + int(share * span)
        shown = f"{share:.0%}"
        static = best_map(session.bundle, budget - low_counted["fixed"], work)
        for name, policy in {"static, by loss": static, **POLICIES}.items():
            row: Row = {"budget": shown, "policy": name, "budget MB": budget / 1e6}
            try:
                got, counted = session.run(policy, budget, best)
            except moepack.BudgetExceeded:
                rows.append({**row, "least MB": session.least(policy) / 1e6})
                continue
            rows.append(session.row(name, got, counted, best) | row)
    return rows


def main() -> None:
    parser = model_arguments(__doc__)
    args = parser.parse_args()
    quiet_libraries()
    prompt, tokens, count, samples = (48, 16, 2, 32) if args.quick else (128, 64, WINDOWS, 192)
    shares = SHARES[1:2] if args.quick else SHARES
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bundle = built(args, work / "bundle", "bf16, w4, w3, w2, w1", samples)
        tokenizer = load_tokenizer(bundle)
        served = [Text(Path(n).stem, windows(n, tokenizer, prompt + tokens, count)) for n in texts(args)[1]]
        session = Session(bundle, served, prompt)
        best, counted = session.run("static:bf16")
        rows = [session.row("all bf16", best, counted, best), *at_budgets(session, best, shares, work)]
        claims, targets = similarity(session, work)
        for measure in () if args.quick else (selector, retention, prefetch, residency):
            more, others = measure(session, best)
            claims = [*claims, *more]
            targets = [*targets, *others]
    show("the papers' tables", claims)
    finish(f"policies on {args.checkpoint.name}", rows, targets, args.json, {"claims": claims})


if __name__ == "__main__":
    main()
