"""How long it takes from the start of a command to its first token, and what of that is importing, or the disk.

    python -m benchmarks.start [BUNDLE]
    python -m benchmarks.start BUNDLE --memory SIZE    tokens a second under `hotness:lo=stored`: predicted and measured

`moepack generate` of one token, in a process of its own each time that finds its bytecode, beside a process that
imports torch and the model's class from transformers and does nothing else, with and without the libraries that
moepack leaves out (runtime/patches.py). Processor time is printed beside the clock's: on a shared machine they differ.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import EXAMPLES, Row, Target, arguments, build, finish
from benchmarks.decoding import Reading
from benchmarks.serve import RECIPE

IMPORTS = "import torch, transformers.models.qwen3_moe.modeling_qwen3_moe"
COMMAND = "moepack generate, one token"
POLICY = "hotness:lo=stored"
TOKENS = 128  # that are decoded to measure a rate
WARM = 32  # of these, before the clock
BOUND = 5.0  # seconds to the first token
NEAR = 0.25  # how far a prediction may be from what is measured


def timed(command: list[str]) -> tuple[float, float]:
    """Seconds by the clock, and of processors, that a command takes."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    seconds = time.perf_counter() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("bundle", nargs="?", help="without it a small one is built")
    parser.add_argument("--memory", help="predict tokens a second in this limit, and measure them")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        bundle = args.bundle or str(build(EXAMPLES / "mini-qwen3-moe", Path(work) / "bundle", RECIPE))
        if args.memory:
            rows, targets = predicted(bundle, args.memory)
            finish(f"{POLICY} in {args.memory}", rows, targets, args.json)
            return
        rows = measured(bundle, 1 if args.quick else 5)
    first = next(row["s"] for row in rows if row["what"] == COMMAND)
    targets = [Target("seconds to the first token", first, BOUND, "lower")]
    finish(f"from start to token, {os.cpu_count()} processors", rows, targets, args.json)


def measured(bundle: str, repeat: int) -> list[Row]:
    """Medians of each way, in turns."""
    left_out = f"from moepack.runtime.patches import leave_out; leave_out('serve'); {IMPORTS}"
    generate = [sys.executable, "-m", "moepack", "generate", bundle, "--prompt", "The", "--max-new-tokens", "1"]
    ways = {
        "importing torch and the model's class": [sys.executable, "-c", IMPORTS],
        "the same, without what serving leaves out": [sys.executable, "-c", left_out],
        COMMAND: generate,
        "the same under hotness in a budget": [*generate, "--device-memory", "40MB"],
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(1 + repeat):
        for name, command in ways.items():
            row = timed(command)
            found[name] += [row] * (turn > 0)  # the first writes bytecode, and fills the system's cache
    medians = {name: [statistics.median(seconds) for seconds in zip(*of, strict=True)] for name, of in found.items()}
    return [{"what": name, "s": clock, "processor s": processor} for name, (clock, processor) in medians.items()]


def predicted(bundle: str, memory: str) -> tuple[list[Row], list[Target]]:
    """What `plan` predicts for decoding one sequence, and what decoding a text token by token takes then."""
    import torch

    import moepack
    from moepack.calibrate.text.windows import windows
    from moepack.families.tokenizer import load_tokenizer
    from moepack.reports.plan import plan
    from moepack.runtime.planning.options import LoadOptions

    ids = windows(str(EXAMPLES / "text" / "evaluation.jsonl"), load_tokenizer(Path(bundle)), TOKENS, 1)[0].tolist()
    own: Row = {"memory": memory, "policy": POLICY, "kv_tokens": TOKENS + 64, "prefill_tokens": 16, "all_logits": False}
    found = plan(bundle, LoadOptions(**own))
    model = moepack.load(bundle, **own)
    run = Reading(model)
    began = (0.0, 0.0, 0.0, 0.0)
    with model.moepack as serving, torch.inference_mode():

        def now() -> tuple[float, float, float, float]:
            waited = serving.manager.waited if serving.manager is not None else 0.0
            return time.perf_counter(), time.thread_time(), waited, serving.counters()["demand_bytes"]

        for number, token in enumerate(ids):
            began = now() if number == WARM else began
            run(torch.tensor([[token]]))
        took, busy, waited, fetched = ((b - a) / (TOKENS - WARM) for a, b in zip(began, now(), strict=True))
    rate = 1 / took
    parts = found.seconds_per_token
    assert parts is not None and found.expected_tokens_per_second is not None
    ms = {"ms memory": 1e3 * parts.memory, "ms processor": 1e3 * parts.processor, "ms disk": 1e3 * parts.disk}
    forecast: Row = {"what": "predicted", "tokens/s": found.expected_tokens_per_second, **ms}
    forecast["MB fetched"] = (found.fetched_bytes_per_token or 0) / 1e6
    got: Row = {"what": "measured", "tokens/s": rate, "ms disk": 1e3 * waited}
    got |= {"MB fetched": fetched / 1e6, "ms of this thread": 1e3 * busy}
    off = abs(found.expected_tokens_per_second / rate - 1)
    return [forecast, got], [Target("the prediction is off by", off, NEAR, "lower")]


if __name__ == "__main__":
    main()
