"""What quantising costs in time and in output error, ours against gptqmodel, hqq and rounding, in one run.

    python -m benchmarks.quantise [--checkpoint MODEL --calibration FILE... --data FILE...]

Two sets of experts: generated ones of Qwen3-30B-A3B's shapes with correlated inputs, and those of a checkpoint, with
the moments a build would give them. Every method gets the same moments and the same group size; errors are relative
output errors on tokens that no moments were made from. w1 of the methods that have none is signs times the group's mean
magnitude (`rtn`'s). Times are medians, methods taking turns; gptqmodel runs once a width. With one thread
(OMP_NUM_THREADS=1) the times mean most on a machine that others use too.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.common import EXAMPLES, Row, Target, arguments, finish, texts
from moepack.pack.spec import Version
from moepack.quantize.grid import dequantise
from moepack.quantize.methods import quantise_all
from moepack.quantize.moments import NEGLIGIBLE, PRIOR, second_moments, shrink

METHODS = ("gptq", "gptqmodel", "hqq", "rtn")
WIDTHS = ("w4", "w3", "w2", "w1")
GROUP = 64
LENGTH = 256  # tokens of a window
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
    path: Path, calibration: list[str], data: list[str], windows: tuple[int, int], every: int = 1
) -> Iterator[Case]:
    """Every so many experts of every layer, a matrix at a time, as a build sees them.

    `windows` says how many of LENGTH tokens are read of each of the two lists of texts.
    """
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.experts import hidden
    from moepack.calibrate.forward import CalibrationPass
    from moepack.calibrate.stream import StreamedModel
    from moepack.calibrate.text.windows import calibration_windows
    from moepack.families.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    learn = calibration_windows(calibration, tokenizer, windows[0], LENGTH, 0).ids
    held = calibration_windows(data, tokenizer, windows[1], LENGTH, 0).ids
    stream = StreamedModel(open_checkpoint(path))
    walk = CalibrationPass(stream, torch.cat([learn, held]), 16, torch.float32)
    stream.load(None)
    stream.to_compute(None, torch.float32)
    walk.start()
    stream.free(None)
    cut = learn.numel()
    for index in range(len(stream.layers)):
        _, experts = stream.split(index, stream.load(index))
        stream.to_compute(index, torch.float32)
        seen = walk.run_layer(index)
        module = stream.experts_module(index)
        parts: list[list[list[Tensor]]] = [[], []]
        for e in range(0, experts.layer.experts if experts else 0, every):
            assert experts is not None and seen is not None
            weight = [experts.matrix(e, m).float() for m in range(2)]
            bias = experts.bias(e, 0)
            token = torch.where(seen.experts == e)[0]
            own = token[token < cut]
            others = token[token >= cut]
            layer = torch.linspace(0, cut - 1, min(cut, 4096)).long()
            made = []
            for tokens in (own, layer, others):
                x = seen.inputs[tokens].float()
                act = hidden(module, x, weight[0], None if bias is None else bias.float())
                made.append((second_moments(x), second_moments(act)))
            for m in range(2):
                prior = PRIOR * weight[m].shape[1]
                few = len(own) < NEGLIGIBLE * prior
                moments = shrink(made[0][m], len(own), made[1][m], prior) if few else made[0][m]
                parts[m].append([weight[m], moments, made[2][m], torch.tensor(len(others))])
        for cases in parts:
            if cases:
                yield Case(*(torch.stack(tensors) for tensors in zip(*cases, strict=True)))
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
    """Parse arguments, quantise, measure, print."""
    parser = arguments(__doc__)
    parser.add_argument("--checkpoint", type=Path, default=EXAMPLES / "mini-qwen3-moe")
    parser.add_argument("--calibration", action="append", help="text to make moments from")
    parser.add_argument("--data", action="append", help="text to measure on")
    parser.add_argument("--windows", type=int, default=384, help="windows of 256 tokens, of each")
    args = parser.parse_args()
    versions = [Version.of(v, GROUP) for v in WIDTHS]
    shapes = ((256, 512), (512, 256)) if args.quick else ((1536, 2048), (2048, 768))
    calibration, data = texts(args)
    windows, every = (48, 4) if args.quick else (args.windows, 1)
    warm = generated(64, 128)
    measure(warm, versions, 1, {}, {})

    rows: list[Row] = []
    held: list[Target] = []

    def add(name: str, cases: Callable[[], Iterator[Case]], runs: int, is_generated: bool) -> None:
        errors: Errors = {}
        seconds: dict[str, float] = {}
        for case in cases():
            measure(case, versions, runs, errors, seconds)
        rows.extend(summarise(name, errors, seconds))
        held.extend(targets(name, errors, seconds, is_generated))

    for r, c in shapes:
        add(f"generated {r}x{c}", functools.partial(lambda *shape: iter([generated(*shape)]), r, c), RUNS, True)
    name = args.checkpoint.name
    add(name, lambda: of_checkpoint(args.checkpoint, calibration, data, (windows, windows), every), 1, False)
    title = f"Relative output error on held-out tokens (geometric means), groups of {GROUP}; time of w4 + w3 + w2"
    columns = ["experts", "method", *WIDTHS, "seconds", "ours is x faster"]
    finish(title, columns, rows, held, args.json)


if __name__ == "__main__":
    main()
