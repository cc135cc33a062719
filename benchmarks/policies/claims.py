"""The tables of the policies' own papers, on the model at hand: what each claims, and what is measured here.

Rows for `benchmarks.policies`, which has the command line. Every row names its table.
"""

import gc
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import Row, Target
from benchmarks.decoding import Decoded, decode
from moepack.runtime.trace import read_trace

from .session import PLENTY, Session

Rows = list[Row]
LINK = 16_000  # megabytes a second of PCIe 3.0 with 16 lanes, dymoe's testbed


def similarity(session: Session, work: Path) -> tuple[Rows, list[Target]]:
    """Cosine of the experts that a prompt chose and those that its decoding did, by layer, the mean over all windows
    (context-aware-cxl-ndp, figure 4); beside it that of a prompt and the next window's decoding."""
    model = session.load("static:bf16")
    trace = work / "similarity.jsonl"
    model.moepack.trace(trace)
    decode(model, session.texts, session.prompt)
    model.moepack.close()
    steps = np.array([record.counts for record in read_trace(trace).records], float)  # [steps, layers, experts]
    windows = steps.reshape(-1, session.length - session.prompt, *steps.shape[1:])
    # [windows, layers, experts]
    prompts = windows[:, 0]
    decoded = windows[:, 1:].sum(1)
    shifted = np.roll(decoded, -1, 0)
    rows = list[Row]()
    for p in range(steps.shape[1]):
        own = statistics.fmean(activation_similarity(a, b) for a, b in zip(prompts[:, p], decoded[:, p], strict=True))
        other = statistics.fmean(activation_similarity(a, b) for a, b in zip(prompts[:, p], shifted[:, p], strict=True))
        rows.append({"table": "prefill: similarity", "what": f"layer {p}", "own": own, "other text's": other})
    mean = {name: statistics.fmean(float(r[name]) for r in rows) for name in ("own", "other text's")}
    found = Target("prefill: similarity of a prompt's experts and its decoding's (0.89)", mean["own"], 0.89, "higher")
    return [*rows, {"table": "prefill: similarity", "what": "all", **mean}], [found]


def activation_similarity(prefill: Sequence[float], decoding: Sequence[float]) -> float:
    """Return the cosine of two counts of a layer's experts, from 0 to 1; 0 where either counted nothing."""
    a = np.array(prefill, np.float64)
    b = np.array(decoding, np.float64)
    size = math.sqrt(float(a @ a)) * math.sqrt(float(b @ b))
    return float(a @ b) / size if size else 0.0


def selector(session: Session, best: Decoded) -> tuple[Rows, list[Target]]:
    """Half of each layer's experts at bf16 on the device, the rest on the host at 3 or 2 bits on average, each width
    chosen or all alike (context-aware-cxl-ndp, table 3)."""
    k = session.experts // 2
    rows = list[Row]()
    targets = list[Target]()
    for bits in (3, 2):
        pair = {
            f"{bits} bits": f"prefill:bits={bits},k={k}",
            f"{bits} bits, no selector": f"prefill:bits={bits},k={k},selector=no",
        }
        mine = _table(session, best, "prefill: bits of the rest", pair)
        rows += mine
        ratio = mine[0]["KL, mnat"] / max(mine[1]["KL, mnat"], 1e-9)
        targets.append(Target(f"prefill, {bits} bits: KL with the selector over without", ratio, 1, "lower"))
    return rows, targets


def retention(session: Session, best: Decoded) -> tuple[Rows, list[Target]]:
    """Critical experts at 4 bits and the others at 2 or left out, by retention; beside as many critical ones chosen at
    random (dymoe, table 2 and figure 3)."""
    rows = list[Row]()
    targets = list[Target]()
    for low, name in (("w2", "4/2"), ("absent", "4/0")):
        for share in (0.75, 0.9, 1.0):
            pair = {
                f"{name}, r={share}, by {by}": f"importance:hi=w4,lo={low},r={share},by={by},reuse=no,prefetch=no"
                for by in ("importance", "counts", "random")[: 3 if share < 1 else 1]
            }
            mine = _table(session, best, "importance: retention", pair)
            rows += mine
            if share < 1:
                ratio = mine[0]["KL, mnat"] / mine[-1]["KL, mnat"]
                label = f"importance {name}, r={share}: KL over that of random experts"
                targets.append(Target(label, ratio, 1, "lower"))
    return rows, targets


def prefetch(session: Session, best: Decoded) -> tuple[Rows, list[Target]]:
    """Loading on demand at equal bytes, over a link of PCIe's rate: `lru` against `importance`, in caches of a third
    and of two thirds of all experts at 4 bits; and how often the next layer's router was foretold."""
    rows = list[Row]()
    targets = list[Target]()
    least = session.least("importance:hi=w4,lo=w2")
    for share in (1 / 3, 2 / 3):
        budget = least + int(share * session.bytes_at("w4")) - session.layer_bytes("w4")
        shown = f"a cache of {share:.0%}"
        low = f"importance:hi=w4,lo=w2,rate={LINK}"
        names = {f"{shown}: lru": f"lru:hi=w4,lo=absent,rate={LINK}"}
        names |= {f"{shown}: importance, r={r}": f"{low},r={r}" for r in (1, 0.9, 0.75)}
        names[f"{shown}: importance, r=0.75, no prefetch"] = f"{low},r=0.75,prefetch=no"
        mine = _table(session, best, "importance: bytes", names, budget)
        rows += mine
        lru = mine[0]
        chosen = mine[2]
        apart = 100 * abs(chosen["NLL, all texts"] - lru["NLL, all texts"])
        label = f"importance, r=0.9, {shown}"
        targets.append(Target(f"{label}: MB waited for over lru's", chosen["MB demand"] / lru["MB demand"], 1, "lower"))
        targets.append(Target(f"{label}: perplexity apart from lru's, %", apart, 0.1, "lower"))
        hidden = chosen["MB in time"] / max(chosen["MB in time"] + chosen["MB late"], 1e-9)
        targets.append(Target(f"{label}: in time, of what was fetched ahead and needed", hidden, 0.8, "higher"))
    model = session.load("importance:hi=w4,lo=w2")
    decode(model, session.texts, session.prompt, best)
    manager = model.moepack.manager
    assert manager is not None and manager.prediction is not None
    rates = manager.prediction.rates()
    model.moepack.close()
    rows += [
        {"table": "importance: prediction", "what": f"layer {p}", "foretold": rate}
        for p, rate in enumerate(rates)
        if rate is not None
    ]
    return rows, targets


def residency(session: Session, best: Decoded) -> tuple[Rows, list[Target]]:
    """Time a token by alpha, the share of experts whose coded bytes stay on the device (fluxmoe, figure 6).

    Each row has the bytes of the window, two layers' experts in BF16, and of its share of coded bytes. So nothing
    beyond the window stays decoded. All rows have the same bits.
    """
    least = session.least("paged")
    coded = session.coded_bytes()
    rows: Rows = []
    for alpha in (0.05, 0.25, 0.5, 0.75, 1.0):
        policies = {f"alpha={alpha}": f"paged:alpha={alpha},interval=1e9"}
        rows += _table(session, best, "paged: alpha", policies, least + int(alpha * coded))
    return rows, [Target("paged: KL to all bf16", max(r["KL, mnat"] for r in rows), 0, "lower")]


def _table(session: Session, best: Decoded, name: str, policies: dict[str, str], budget: int = PLENTY) -> Rows:
    """Perplexity and divergence under policies, a row each; without a budget given everything fits."""
    rows = []
    for shown, policy in policies.items():
        got, counted = session.run(policy, budget, best)
        row = session.row(policy, got, counted, best)
        row |= {"MB in time": counted["prefetch_in_time"] / 1e6, "MB late": counted["prefetch_late"] / 1e6}
        nll = statistics.fmean(x for values in got.nll.values() for x in values)
        rows.append({"table": name, "what": shown, **row, "NLL, all texts": nll})
        gc.collect()
    return rows
