"""Experts from their packed bytes beside torch's BF16 experts and the time that reading their bytes takes, in one run.

    python -m benchmarks.kernels [--threads N] [--checkpoint MODEL] [--version NAME ...]

A layer of Qwen3-30B-A3B's experts forward, routing to weighted sum, on a CPU: decode with 1, 4 and 16 tokens, prefill
with 512. torch's side is a loop over the experts that have tokens, two F.linear each, on resident BF16 weights. The
floor is the bytes of the experts that have tokens over the rate at which the same threads read such bytes and do
nothing else. All weights lie in huge pages where the system gives them. All sides take turns; lower quartiles, because
medians on a machine that others use are times of waiting for it, and of one thread its own time. Decode walks through
more experts than caches hold. `--checkpoint` (default: the one in examples/) is built into a bundle, rounded to
nearest, and served end to end beside transformers' own experts implementations. `--version` leaves that and torch's
side out.
"""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from benchmarks.common import EXAMPLES, Row, Target, arguments, build, finish, in_turns, lower_quartile
from benchmarks.decoding import Reading, timed
from moepack.pack.spec import ExpertLayer, Matrix

from .layers import NAMED, RELEASED, SIZES, VERSIONS, Pool, module_like, routed, torch_forward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CACHES = 512 << 20  # bytes of experts that decode walks through: more than a server's last-level cache
SHAPE = "Qwen3-30B-A3B"
SPEEDUP = {"w8": 1.2, "w4": 1.5, "w3": 1.5, "w2": 2.0, "w1": 2.0}  # over torch, at the least
# Whose time a byte a released version is held to.
BESIDE = {"mxfp4": "w4", "nvfp4": "w4", "fp8": "bf16", "mxfp8": "bf16", "fp8row": "bf16"}


Prepared = Callable[[int], Callable[[], object]]  # by a turn's number what the clock runs over


def measure(tokens: int, runs: int, caches: int, versions: Sequence[str] = ()) -> list[Row]:
    """A row for bf16 and each of `versions`; without any, for all and for a layer whose experts are in all of them."""
    from moepack.runtime.experts.cpu import forward
    from moepack.runtime.experts.handles import NOTHING, LayerCall, LayerExperts
    from moepack.runtime.kernels.affine_native import read
    from moepack.runtime.kernels.reference import plain_weights, sections_of

    hidden, inner, experts, top_k = SIZES
    mixed = not versions
    matrices = (Matrix("gate_up", 2 * inner, hidden), Matrix("down", hidden, inner))
    if tokens == 1 and mixed:
        top_k = min(experts, 2 * len(VERSIONS))  # two of each version
    index = routed(tokens, experts, top_k)
    used = sorted(set(index.reshape(-1).tolist()))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16()
    gates = torch.full(index.shape, 1 / top_k)
    pools = dict[str, Pool]()
    every = (*VERSIONS, *RELEASED, *(v for v in NAMED if v.name in versions))
    for v in [v for v in every if not versions or v.name in ("bf16", *versions)]:
        least = len(used) * 2 if tokens < 64 else len(used)
        size = v.resident_size(matrices)
        pools[v.name] = Pool(matrices, v, max(least, min(caches // size, 40 * least)))
    module = module_like()
    work: dict[str, Prepared] = {}

    def layer_of(versions: list[str]) -> Prepared:
        layer = LayerExperts(ExpertLayer(0, "experts", experts, matrices), every, torch.device("cpu"))
        for e in range(experts):
            layer.publish(e, NOTHING)

        def prepared(i: int) -> Callable[[], object]:
            for k, e in enumerate(used):
                pool = pools[versions[k]]
                layer.publish(e, layer.of.over(pool.version, pool[(i * len(used) + k) % len(pool)]))
            return partial(forward, LayerCall(module, layer.current, x, index, gates))

        return prepared

    def torch_run() -> Prepared:
        pool = pools["bf16"]
        sections = sections_of(matrices, pool.version)

        def prepared(i: int) -> Callable[[], object]:
            weights: list[Sequence[torch.Tensor]] = [()] * experts
            for k, e in enumerate(used):
                weights[e] = plain_weights(pool[(i * len(used) + k + len(used)) % len(pool)], sections)
            return partial(torch_forward, weights, x, index, gates)

        return prepared

    def reading(pool: Pool) -> Prepared:
        def prepared(i: int) -> Callable[[], object]:
            at = (np.arange(len(used)) + (i * 2 + 1) * len(used)) % len(pool)
            return partial(read, pool.addresses[at], pool.size)

        return prepared

    for name, pool in pools.items():
        work[name] = layer_of([name] * len(used))
        work[f"read {name}"] = reading(pool)
    if mixed:
        names = itertools.cycle([v.name for v in VERSIONS])
        spread = [next(names) for _ in used]
        work["mixed"] = layer_of(spread)
        work["torch"] = torch_run()
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    with torch.inference_mode():
        spent = in_turns(work, runs, clock)
    seconds = {name: lower_quartile(times) for name, times in spent.items()}
    rows = []
    for name, pool in pools.items():
        rows.append(_row(name, tokens, seconds[name], seconds.get("torch"), seconds[f"read {name}"]))
        rows[-1]["MB"] = pool.size * len(used) / 1e6
        if (peer := BESIDE.get(name)) in pools:
            own = seconds[name] / pool.size
            others = seconds[peer] / pools[peer].size
            rows[-1]["a byte's time over"] = own / others
    if mixed:
        share = {name: spread.count(name) / len(used) for name in pools}
        floor = sum(share[name] * seconds[f"read {name}"] for name in pools)
        rows.append(_row("mixed", tokens, seconds["mixed"], seconds["torch"], floor))
        rows[-1]["over uniform"] = seconds["mixed"] / sum(share[name] * seconds[name] for name in pools)
    return rows


def _row(version: str, tokens: int, ours: float, theirs: float | None, floor: float) -> Row:
    row = {"shape": SHAPE, "version": version, "tokens": tokens}
    row |= {"ours us": ours * 1e6, "bytes floor us": floor * 1e6, "over floor": ours / floor}
    return row if theirs is None else row | {"torch BF16 us": theirs * 1e6, "speed-up": theirs / ours}


def end_to_end(checkpoint: Path, runs: int, versions: Sequence[str]) -> tuple[list[Row], list[Target]]:
    """Decode and prefill tokens a second of a bundle and of transformers' experts implementations."""
    from transformers import AutoModelForCausalLM

    import moepack
    from moepack.runtime.patches import quiet_libraries

    quiet_libraries()
    models: dict[str, PreTrainedModel] = {}
    for name in ("eager", "batched_mm", "grouped_mm"):
        models[f"transformers {name}"] = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.bfloat16, experts_implementation=name
        )
    with tempfile.TemporaryDirectory() as work:
        recipe = "quantize: {method: rtn}\ncalibration: {samples: 8, length: 128, batch_size: 4}\n"
        bundle = build(checkpoint, Path(work) / "bundle", recipe)
        for version in versions:
            models[version] = moepack.load(bundle, policy=f"static:{version}")
        prompt = torch.randint(1, 4000, (512,), generator=torch.Generator().manual_seed(0)).tolist()
        parts = [prompt, *([token] for token in prompt[:16])]
        times: dict[str, list[list[float]]] = {name: [] for name in models}
        for _ in range(runs + 1):
            for name, model in models.items():
                times[name].append(timed(Reading(model, logits_to_keep=1), parts))
    rates = {
        name: {
            "decode": 1 / statistics.median(second for _, *tokens in of[1:] for second in tokens),
            "prefill": len(prompt) / statistics.median(first for first, *_ in of[1:]),
        }
        for name, of in times.items()
    }
    rows = []
    targets = []
    best = {what: max(r[what] for n, r in rates.items() if n.startswith("transf")) for what in ("decode", "prefill")}
    for name, rate in rates.items():
        rows.append({"shape": checkpoint.name, "version": name, **{f"{k} tokens/s": v for k, v in rate.items()}})
        if name in versions:
            least = {"decode": 1.0, "prefill": 0.9}
            for what, target in least.items():
                label = f"{checkpoint.name}, {name}: {what} tokens/s over transformers' fastest"
                targets.append(Target(label, rate[what] / best[what], target, "higher"))
    return rows, targets


def judged(rows: Sequence[Row]) -> list[Target]:
    """The targets that a table of layers is held to."""
    targets = []
    for r in rows:
        name = f"{r['shape']}, {r['version']}, {r['tokens']} tokens"
        if r["tokens"] == 1 and r["version"] in SPEEDUP and "speed-up" in r:
            targets.append(Target(f"{name}: over torch's BF16", r["speed-up"], SPEEDUP[r["version"]], "higher"))
            targets.append(Target(f"{name}: time over the bytes floor", r["over floor"], 2.0, "lower"))
        if r["tokens"] == 1 and "a byte's time over" in r:
            label = f"{name}: time a byte over {BESIDE[r['version']]}'s"
            targets.append(Target(label, r["a byte's time over"], 1.1, "lower"))
        if r["version"] == "mixed":
            targets.append(Target(f"{name}: time over the uniform layers'", r["over uniform"], 1.15, "lower"))
    return targets


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", action="append", type=int, help="default: 1, 4, 16 and 512")
    parser.add_argument("--version", action="append", help="default: all")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    try:
        from moepack.runtime.kernels.affine_native import LEVELS, level, openmp
    except (ImportError, OSError):
        raise SystemExit("the CPU kernels were not compiled: install moepack where there is a C compiler") from None
    rows: list[Row] = []
    for tokens in args.tokens or ((1, 16) if args.quick else (1, 4, 16, 512)):
        runs = 5
        if tokens < 64:
            runs = 8 if args.quick else 40
        rows += measure(tokens, runs, CACHES // 8 if args.quick else CACHES, args.version or ())
        gc.collect()  # gigabytes of experts
    rows = [{"instructions": LEVELS[level], **row} for row in rows]
    targets = judged(rows)
    more: list[Row] = []
    if not args.version:
        more, held = end_to_end(args.checkpoint, 2 if args.quick else 7, ("bf16", "w4", "w2", "w1"))
        targets += held
    pool = f"{args.threads} threads ({'torch' if openmp else 'own'} pool)"
    finish(f"experts' forward, {LEVELS[level]}, {pool}", rows + more, targets, args.json)


if __name__ == "__main__":
    main()
