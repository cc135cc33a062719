"""What quantising costs in time and in output error, ours against gptqmodel, hqq and rounding, in one run.

    python -m benchmarks.quantise [--checkpoint MODEL --calibration FILE... --data FILE...]

Two sets of experts: generated ones of Qwen3-30B-A3B's shapes with correlated inputs, and those of a checkpoint, with
the moments a build would give them. Every method gets the same moments and the same group size; errors are relative
output errors on tokens that no moments were made from. w1 of the methods that have none is signs times the group's mean
magnitude (`rtn`'s). Times are medians, methods taking turns; gptqmodel runs once a width. With one thread
(OMP_NUM_THREADS=1) the times mean most on a machine that others use too.
"""

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import Row, Target, finish, model_arguments, texts
from moepack.pack.spec import Version
from moepack.quantize.expert_batch import Settings, batch_moments
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import quantise_all
from moepack.quantize.moments import second_moments

METHODS = ("gptq", "gptqmodel", "hqq", "rtn")
WIDTHS = ("w4", "w3", "w2", "w1")
GROUP = 64
LENGTH = 256  # tokens of a window
WINDOWS = 384  # of each: to make moments from, and to measure on
RUNS = 3  # timed runs of the generated experts
ENOUGH = 64  # held-out tokens that an expert's error is measured on, at the least
Errors = dict[str, dict[str, list[float]]]  # method -> version -> one error an expert


@dataclass(frozen=True)
class Case:
    """Experts of one shape: weights [experts, rows, cols]; moments to learn from and to measure on.

    `counts` is how many tokens each has to be measured on, where that is not the same for all.
    """

    weight: Tensor
    learn: Tensor
    held_out: Tensor
    counts: Tensor | None = None

    def errors(self, values: Tensor) -> list[float]:
        """Relative output errors of other values, one for each expert that has ENOUGH tokens."""
        lost = _output(self.weight - values, self.held_out) / _output(self.weight, self.held_out)
        return (lost if self.counts is None else lost[self.counts >= ENOUGH]).tolist()


def generated(rows: int, cols: int) -> Case:
    """An expert of Gaussian and one of heavy-tailed (Student's t, 5) weights; inputs AR(1), 0.9, of spread variance."""
    g = torch.Generator().manual_seed(rows + cols)
    normal = torch.randn(2, rows, cols, generator=g)
    chi = torch.randn(5, rows, cols, generator=g).square().mean(0)
    spread = torch.exp(0.5 * torch.randn(cols, generator=g))[:, None]

    def moments() -> Tensor:
        x = torch.randn(cols, 4 * cols, generator=g)
        for c in range(1, cols):
            x[c] = 0.9 * x[c - 1] + (1 - 0.81) ** 0.5 * x[c]
        x *= spread
        return (x @ x.T / x.shape[1])[None].repeat(2, 1, 1)

    return Case(torch.stack([normal[0], normal[1] / chi.sqrt()]) * 0.02, moments(), moments())


def of_checkpoint(
    path: Path, calibration: list[str], data: list[str], windows: tuple[int, int], share: int = 1
) -> Iterator[Case]:
    """The experts of every layer, or the first of so many shares, a matrix at a time, with the moments of a build.

    `windows` says how many of LENGTH tokens are read of each of the two lists of texts.
    """
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.forward import CalibrationPass, Observation
    from moepack.calibrate.gather import gather_batch
    from moepack.calibrate.stream import StreamedModel
    from moepack.calibrate.text.windows import calibration_windows
    from moepack.families.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    learn = calibration_windows(calibration, tokenizer, windows[0], LENGTH, 0).ids
    held = calibration_windows(data, tokenizer, windows[1], LENGTH, 0).ids
    cut = learn.numel()
    settings = Settings("gptq", ())
    stream = StreamedModel(open_checkpoint(path))
    walk = CalibrationPass(stream, torch.cat([learn, held]), 16, torch.float32)
    stream.load(None)
    stream.to_compute(None, torch.float32)
    walk.start()
    stream.free(None)
    for index in range(len(stream.layers)):
        _, weights = stream.split(index, stream.load(index))
        stream.to_compute(index, torch.float32)
        seen = walk.run_layer(index)
        if weights is None:
            stream.free(index)
            continue
        assert seen is not None
        first = Observation(seen.inputs[:cut], seen.experts[:cut], seen.gates[:cut], seen.length)
        experts = range(weights.layer.experts // share)
        module = stream.experts_module(index)
        batch = gather_batch(module, weights.select(experts), experts, first, settings, torch.device("cpu"))
        moments = batch_moments(batch)
        chosen = seen.experts[cut:]
        inputs = [seen.inputs[cut:][(chosen == e).any(1)].float() for e in experts]
        counts = torch.tensor([len(x) for x in inputs])
        reads = inputs, [batch.act(e, x) for e, x in zip(experts, inputs, strict=True)]
        for weight, of_experts, x in zip(batch.weights, moments, reads, strict=True):
            learnt = torch.stack([m.mean() for m in of_experts])
            held_out = torch.stack([second_moments(own) for own in x])
            yield Case(weight, learnt, held_out, counts)
        stream.free(index)


def measure(case: Case, versions: list[Version], runs: int, errors: Errors, seconds: dict[str, float]) -> None:
    """Add a case's errors, and the time of its widths above one bit, to what there is."""
    above = [v for v in versions if v.bits > 1]
    times: dict[str, list[float]] = {m: [] for m in METHODS}
    for run in range(runs):
        for method in METHODS:
            began = time.perf_counter()
            made = quantise_all(method, case.weight, case.learn, above)
            times[method].append(time.perf_counter() - began)
            if run:
                continue
            for version in versions:
                if version not in made:
                    one_bit = method if method == "gptq" else "rtn"
                    made |= quantise_all(one_bit, case.weight, case.learn, [version])
                error = case.errors(dequantise(made[version], version))
                errors.setdefault(method, {}).setdefault(version.name, []).extend(error)
    for method in METHODS:
        seconds[method] = seconds.get(method, 0.0) + statistics.median(times[method])


def _output(weight: Tensor, moments: Tensor) -> Tensor:
    """Mean squared output of each expert."""
    return ((weight @ moments) * weight).sum((1, 2))


def summarise(name: str, errors: Errors, seconds: dict[str, float]) -> list[Row]:
    """The table's rows of one set."""
    rows = []
    for method in METHODS:
        row: Row = {"experts": name, "method": method}
        row |= {v: statistics.geometric_mean(errors[method][v]) for v in WIDTHS}
        row |= {"seconds": seconds[method], "ours is x faster": seconds[method] / seconds["gptq"]}
        rows.append(row)
    return rows


def targets(name: str, errors: Errors, seconds: dict[str, float], is_generated: bool) -> list[Target]:
    """What one set is held to."""
    ours = errors["gptq"]
    theirs = errors["gptqmodel"]
    out = []
    for v in WIDTHS[:3]:
        ratio = statistics.geometric_mean(a / b for a, b in zip(ours[v], theirs[v], strict=True))
        out.append(Target(f"{name}: {v} error over gptqmodel's", ratio, 1.02, "lower"))
    worst = max(a / b for a, b in zip(ours["w2"], theirs["w2"], strict=True))
    out.append(Target(f"{name}: w2 error over gptqmodel's, the worst expert", worst, 1.0, "lower"))
    if is_generated:
        least = min(b / a for a, b in zip(ours["w1"], errors["rtn"]["w1"], strict=True))
        out.append(Target(f"{name}: w1, signs times mean magnitude over ours, the worst expert", least, 2.0, "higher"))
        ratio = seconds["gptqmodel"] / seconds["gptq"]
        out.append(Target(f"{name}: three widths, gptqmodel's time over ours", ratio, 4.0, "higher"))
    else:
        out.append(Target(f"{name}: w1 error, mean", statistics.fmean(ours["w1"]), 0.40, "lower"))
    return out


def main() -> None:
    args = model_arguments(__doc__).parse_args()
    versions = [Version.of(v, GROUP) for v in WIDTHS]
    shapes = ((256, 512), (512, 256)) if args.quick else ((1536, 2048), (2048, 768))
    calibration, data = texts(args)
    windows, share = (48, 4) if args.quick else (WINDOWS, 1)
    measure(generated(64, 128), versions, 1, {}, {})  # loads the libraries
    sets: list[tuple[str, Iterable[Case]]] = [(f"generated {r}x{c}", [generated(r, c)]) for r, c in shapes]
    sets.append((args.checkpoint.name, of_checkpoint(args.checkpoint, calibration, data, (windows, windows), share)))
    rows: list[Row] = []
    held: list[Target] = []
    for name, cases in sets:
        is_generated = isinstance(cases, list)
        errors: Errors = {}
        seconds: dict[str, float] = {}
        for case in cases:
            measure(case, versions, RUNS if is_generated else 1, errors, seconds)
        rows += summarise(name, errors, seconds)
        held += targets(name, errors, seconds, is_generated)
    title = f"Relative output error on held-out tokens (geometric means), groups of {GROUP}; time of w4 + w3 + w2"
    finish(title, rows, held, args.json)


if __name__ == "__main__":
    main()
