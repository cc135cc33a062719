"""What `w3`, `w2` and `w1` are worth below a released version, by divergence from it at equal bytes of experts.

    python -m benchmarks.released [--format nvfp4] --checkpoint MODEL --calibration FILE --data FILE

Rounds a BF16 checkpoint's experts to a released format (checkpoint.py), builds a bundle, and serves it in float32. Each
share of the released experts' bytes is spent by: `greedy` over several sets of versions; the busiest experts of
calibration as released and all others at one version below; a mix of two neighbouring versions that asks for nothing;
`hotness` over the same sets. Every text is a session of its own. Pages' padding and the reserve of `hotness` come on
top: of large experts they are next to nothing, of these a tenth. Without arguments: the model and texts in examples/.
"""

from __future__ import annotations

import json
import operator
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import moepack
from benchmarks.common import Target, built, finish, model_arguments, texts
from moepack.calibrate.text.windows import load_tokenizer, windows
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import PAGE, Version, align
from moepack.pipeline.allocate import bundle_costs, expected_losses, named
from moepack.reports.evaluate import Divergence, divergences
from moepack.reports.intervals import MeanInterval, clustered
from moepack.runtime.allocation.knapsack import greedy, uniform
from moepack.runtime.patches import quiet_libraries
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.policies.contract import Versions

from .checkpoint import FORMATS, release

PLENTY = 1 << 40  # bytes: a budget that nothing comes near
SHARES = (95, 90, 85, 80, 75, 70, 60)  # per cent of the released experts' bytes
LENGTH = 512  # tokens of a window
BELOW = ("w3", "w2", "w3/w2", "w3/w2/w1")  # what stands below the released version, in sets
DEFAULT = "greedy, native/w3/w2"
TIMING = "interval=0.1,rate=0"  # seconds: about a pass of one window; these sessions take some


@dataclass
class Case:
    """One way to spend a share of the bytes: a map of versions, or options of a policy that changes them."""

    share: float  # per cent, that was used
    allocation: str
    served: str | LoadOptions
    found: list[Divergence] = field(default_factory=list)  # by text


class Spender:
    """A bundle, and the maps and budgets that shares of its released experts' bytes make."""

    def __init__(self, bundle: Bundle, work: Path) -> None:
        self.bundle, self.native = bundle, bundle.versions[0]
        self._work, self._maps = work, 0
        self._costs = bundle_costs(bundle)
        self.whole = self._bytes([[self.native.name] * layer.experts for layer in bundle.layers])

    def _size(self, version: Version, position: int) -> int:
        """Bytes of one expert, without padding."""
        return sum(s.size for s in version.sections(self.bundle.layers[position].matrices))

    def _bytes(self, table: Sequence[Sequence[str]], padded: bool = False) -> int:
        """Bytes of all experts under a map; `padded` to pages, as memory holds them."""
        known = {v.name: v for v in self.bundle.versions}
        page = PAGE if padded else 1
        return sum(align(self._size(known[n], p), page) for p, row in enumerate(table) for n in row)

    def share(self, table: Sequence[Sequence[str]]) -> float:
        """Per cent of the released experts' bytes that a map takes."""
        return 100 * self._bytes(table) / self.whole

    def cases(self, share: float) -> list[Case]:
        """Each way to spend so many per cent that the least version of its set allows."""
        room, out = self.whole * share / 100, list[Case]()
        tables: dict[str, Versions] = {}
        for below in BELOW:
            versions = [self.native, *(v for v in self.bundle.versions if v.name in below.split("/"))]
            columns = [self.bundle.versions.index(v) for v in versions]
            sizes = [[self._size(v, p) for v in versions] for p, c in enumerate(self._costs) for _ in c.tokens]
            if sum(row[-1] for row in sizes) > room:
                continue
            losses = [[row[c] for c in columns] for layer in self._costs for row in expected_losses(layer, "gates")]
            tables[f"greedy, native/{below}"] = named(greedy(sizes, losses, room), versions, self._costs)
            if len(versions) == 2:
                busiest = greedy(sizes, [[0.0, n + 1] for layer in self._costs for n in layer.tokens], room)
                tables[f"busiest native, others {below}"] = named(busiest, versions, self._costs)
            if below == "w3/w2":
                tables["uniform, native/w3/w2"] = named(uniform(sizes, room), versions, self._costs)
            options = self._live(below, tables[f"greedy, native/{below}"])
            out.append(Case(self.share(tables[f"greedy, native/{below}"]), f"hotness, native/{below}", options))
        mapped = [Case(self.share(table), name, self._static(table)) for name, table in tables.items()]
        return sorted([*mapped, *out], key=lambda case: case.allocation != DEFAULT)

    def _static(self, table: Versions) -> str:
        self._maps += 1
        file = self._work / f"map-{self._maps}.json"
        file.write_text(json.dumps({"versions": table}))
        return f"static:{file}"

    def _live(self, below: str, like: Versions) -> LoadOptions:
        """`hotness` in the bytes of a map, after its fixed bytes and its reserve."""
        between = "yes" if "/" in below else "no"
        policy = f"hotness:hi={self.native.name},lo={below.split('/')[-1]},between={between},{TIMING}"
        options: dict[str, Any] = {
            "policy": policy,
            "dtype": "float32",
            "batch": 1,
            "prefill_tokens": LENGTH,
            "all_logits": False,
        }
        model = moepack.load(self.bundle.path, **options, device_memory=PLENTY)
        plan = model.moepack.manager.plan
        model.moepack.close()
        return LoadOptions(**options, device_memory=plan.fixed + plan.reserve + self._bytes(like, padded=True))


def from_bf16(checkpoint: Path, bundle: Bundle, text: str, count: int) -> Divergence:
    """How far the released version is from the BF16 checkpoint that it was rounded from, by window."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    served = moepack.load(bundle.path, policy=f"static:{bundle.versions[0].name}", dtype=torch.float32)
    sums = []
    with torch.inference_mode(), served.moepack:
        for ids in windows(text, load_tokenizer(checkpoint), LENGTH, count).split(1):
            best, got = (torch.log_softmax(m(ids).logits[0, :-1].double(), -1) for m in (plain, served))
            sums.append(float((best.exp() * (best - got)).sum()))
    return Divergence((LENGTH - 1.0,) * len(sums), tuple(sums))


def _pooled(found: Sequence[Divergence]) -> MeanInterval:
    return clustered([x for d in found for x in d.sums], [n for d in found for n in d.counts])


def _row(asked: str, case: Case, names: Sequence[str], default: Case | None) -> dict[str, Any]:
    """One line: thousandths of a nat by text and over all, and the difference from the default on the same text."""
    row: dict[str, Any] = {"asked": asked, "allocation": case.allocation, "bytes, %": case.share}
    parts = {name: _pooled([d]) for name, d in zip(names, case.found, strict=True)} | {"KL": _pooled(case.found)}
    for name, got in parts.items():
        row |= {name: 1e3 * got.mean, f"{name} 95 %": f"{1e3 * got.low:.3g}-{1e3 * got.high:.3g}"}
    if default is not None and default is not case:
        pairs = zip(case.found, default.found, strict=True)
        less = _pooled([Divergence(a.counts, tuple(map(operator.sub, a.sums, b.sums))) for a, b in pairs])
        base = parts["KL"].mean - less.mean
        row |= {"over default, %": 100 * less.mean / base}
        row |= {"its 95 %": f"{100 * less.low / base:+.0f} to {100 * less.high / base:+.0f}"}
    return row


def measured(spender: Spender, shares: Sequence[int], data: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Rows of all cases at all shares, and of each version alone."""
    asked: list[tuple[str, Case]] = []
    for name in [v.name for v in spender.bundle.versions[1:]]:
        table = [[name] * layer.experts for layer in spender.bundle.layers]
        asked.append(("", Case(spender.share(table), f"all {name}", f"static:{name}")))
    asked += [(f"{share} %", case) for share in shares for case in spender.cases(share)]
    for text in data:
        found = divergences(spender.bundle.path, [text], [c.served for _, c in asked], length=LENGTH, samples=count)
        for (_, case), got in zip(asked, found, strict=True):
            case.found.append(got)
    defaults = {share: case for share, case in asked if case.allocation == DEFAULT}
    return [_row(share, case, [Path(t).stem for t in data], defaults.get(share)) for share, case in asked]


def targets(rows: Sequence[dict[str, Any]]) -> list[Target]:
    """What the default is held to: the divergence of other ways over its own, summed over all shares."""
    own = {r["asked"]: r["KL"] for r in rows if r["allocation"] == DEFAULT}
    out = []
    for name, better in (
        ("busiest native, others w2", "higher"),
        ("uniform, native/w3/w2", "higher"),
        ("hotness, native/w3/w2", "lower"),
    ):
        found = {r["asked"]: r["KL"] for r in rows if r["allocation"] == name and r["asked"] in own}
        if found:
            ratio = sum(found.values()) / sum(own[share] for share in found)
            out.append(Target(f"{name}: KL over that of {DEFAULT}", ratio, 1, better))
    return out


def main() -> None:
    """Parse arguments, release, build, serve, print."""
    parser = model_arguments(__doc__, 384)
    parser.add_argument("--format", choices=FORMATS, default="mxfp4", help="what the experts are released in")
    parser.add_argument("--bundle", type=Path, help="one that is built already, of this checkpoint in this format")
    parser.add_argument("--windows", type=int, default=16, help=f"of {LENGTH} tokens to evaluate on, a text")
    parser.add_argument("--shares", type=int, nargs="+", default=SHARES, help="per cent of the released bytes")
    args = parser.parse_args()
    quiet_libraries()
    if args.quick:
        args.samples, args.windows, args.shares = 16, 2, (80,)
    _, data = texts(args)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if args.bundle is None:
            checkpoint = release(args.checkpoint, work / "checkpoint", args.format)
            args.bundle = built(args, work / "bundle", "native, w3, w2, w1", checkpoint=checkpoint)
        bundle = open_bundle(args.bundle)
        spender = Spender(bundle, work)
        itself = Case(100, "native, from BF16", "", [from_bf16(args.checkpoint, bundle, t, args.windows) for t in data])
        rows = [_row("", itself, [Path(t).stem for t in data], None)]
        rows += measured(spender, args.shares, data, args.windows)
    title = f"{args.checkpoint.name} released in {args.format}: divergence from it, thousandths of a nat a token"
    columns = list(dict.fromkeys(name for row in rows for name in row))
    finish(title, columns, rows, targets(rows), args.json, {"format": args.format})


if __name__ == "__main__":
    main()
