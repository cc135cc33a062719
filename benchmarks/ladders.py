"""Which versions a ladder should have, and how layers should share a budget, by divergence at equal bytes.

    python -m benchmarks.ladders [--checkpoint MODEL --calibration FILE... --data FILE...]

Builds a bundle with losses by gates, and one with losses by their reach to the logits. Of each the map is taken with
which `hotness` begins, at budgets between every expert at the lowest version and every one at the best. The ends of the
ladder are chosen for all layers at once (the default), or every version is on it, so that each layer finds its own
ends. Layers share the bytes evenly (the default with losses by gates) or by loss (the default with reach). Experts may
be absent. Shown are the divergence from the exact model on other text than calibration's, its ratio to that of the
first map with a 95 % interval over windows, and how many experts are at each version. Without arguments: the model and
texts in examples/.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import Target, built, finish, model_arguments, texts
from benchmarks.decoding import Mean
from benchmarks.formats.measure import ratio_of
from benchmarks.peers.quality import LENGTH, divergence_of, log_probabilities, replaced
from moepack.calibrate.text.windows import calibration_windows, load_tokenizer
from moepack.export.values import Values
from moepack.pack.reader import Bundle, open_bundle
from moepack.runtime.patches import quiet_libraries
from moepack.runtime.planning.plan import Plan, block_bytes, make_plan
from moepack.runtime.policies.hotness import HotnessOptions
from moepack.runtime.policies.placements import ABSENT, Placement

VERSIONS = "bf16, w4, w3, w2, w1"
SHARES = (0.05, 0.1, 0.2, 0.4)  # of the way from the lowest version to the best
FIRST = "layers evenly"


def ways(best: str, least: str) -> dict[str, HotnessOptions]:
    """The options of each way; the first is what the others are compared with."""
    even = HotnessOptions(reserve=1, share="even")
    by_loss = replace(even, share="loss")
    return {
        FIRST: even,
        "layers by loss": by_loss,
        "every version, layers by loss": replace(by_loss, hi=best, lo=least),
        "or absent": replace(even, hi=best, lo=str(ABSENT)),
        "or absent, layers by loss": replace(by_loss, hi=best, lo=str(ABSENT)),
    }


def first_map(plan: Plan) -> list[list[str]]:
    """The placements of all experts before any token, [layers][experts]."""
    rooms, out = plan.capacity(), []
    for ladder, tokens, room in zip(plan.ladders(), plan.traffic, rooms, strict=True):
        placed = ladder.fill(np.asarray(tokens, np.float64), room)
        out.append([str(plan.ladder[v]) for v in placed.tolist()])
    return out


def main() -> None:
    """Parse arguments, build, plan, measure, print."""
    parser = model_arguments(__doc__, 384)
    parser.add_argument("--windows", type=int, default=96, help=f"windows of {LENGTH} tokens to measure on")
    args = parser.parse_args()
    quiet_libraries()
    _, data = texts(args)
    samples, windows, shares = (16, 4, SHARES[:1]) if args.quick else (args.samples, args.windows, SHARES)
    ids = calibration_windows(data, load_tokenizer(args.checkpoint), windows, LENGTH, 0).ids
    with tempfile.TemporaryDirectory() as work:
        bundles = {
            weight: open_bundle(built(args, Path(work) / weight, VERSIONS, samples=samples, more=_weighed(weight)))
            for weight in ("gates", "logits")
        }
        rows = _rows(args.checkpoint, bundles, ids, shares)
    worst = {way: max(r["over evenly"] for r in rows if (r["losses"], r["way"]) == way) for way in _kinds(rows)}
    kind = min(worst, key=lambda way: worst[way])
    target = Target(f"worst ratio of the best way ({kind[1]}, {kind[0]})", worst[kind], 1.0, "lower")
    finish(f"divergence of {args.checkpoint.name} from its exact self", list(rows[0]), rows, [target], args.json)


def _weighed(weight: str) -> str:
    return f"\nallocation: {{average_bits: 4, weight: {weight}}}"


def _kinds(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["losses"], row["way"]) for row in rows))


def _rows(checkpoint: Path, bundles: dict[str, Bundle], ids: Tensor, shares: Sequence[float]) -> list[dict[str, Any]]:
    """One row a budget, kind of losses and way."""
    from transformers import AutoModelForCausalLM

    bundle = bundles["gates"]
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    weights = [w for layer in model.model.layers for w in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj)]
    reference, out = log_probabilities(model, ids), list[dict[str, Any]]()

    @cache
    def values(version: str, position: int, expert: int) -> tuple[Tensor, Tensor]:
        one, two = (v.exact.float() for v in Values.of_expert(bundle, version, position, expert))
        return one, two

    def divergence(table: list[list[str]]) -> list[float]:
        made = [w.clone() for w in weights]
        for position, row in enumerate(table):
            for expert, name in enumerate(row):
                both = (torch.zeros(()),) * 2 if name == str(ABSENT) else values(name, position, expert)
                for own, value in zip(made[2 * position : 2 * position + 2], both, strict=True):
                    own[expert] = value
        with replaced([w.data for w in weights], made):
            return divergence_of(model, ids, reference)

    names = [v.name for v in bundle.versions]
    high, low = (sum(_bytes(bundle, name)) for name in (names[0], names[-1]))
    for share in shares:
        first = list[float]()
        for losses, of in bundles.items():
            for way, options in ways(names[0], names[-1]).items():
                plan = make_plan(of, options, 0, room := int(low + share * (high - low)))
                # Staging and blocks for demotions are kilobytes beside gigabytes, but not of small models
                table = first_map(replace(plan, budget=room + plan.fixed + plan.reserve))
                found = divergence(table)
                first = first or found
                ratio, half = ratio_of(found, first)
                counts = Counter(name for row in table for name in row)
                row = {"budget": f"{share:.0%}", "losses": losses, "way": way, "KL, mnat": 1e3 * Mean.of(found).value}
                row |= {"over evenly": ratio, "+-": half, "ladder": f"{plan.ladder[0]} to {plan.ladder[-1]}"}
                row["experts"] = ", ".join(f"{counts[n]} {n}" for n in (*names, str(ABSENT)) if counts[n])
                out.append(row)
                print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), flush=True)
    return out


def _bytes(bundle: Bundle, version: str) -> list[int]:
    blocks = [block_bytes(bundle, at, Placement(bundle.manifest.version(version))) for at in range(len(bundle.layers))]
    return [layer.experts * size for layer, size in zip(bundle.layers, blocks, strict=True)]


if __name__ == "__main__":
    main()
