"""The demo behind `make demo`: the model in this folder, from checkpoint to served bundle, with what each width costs.

Needs nothing but this clone. Writes to demo-output/ (removed first).
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moepack.generation import generate
from moepack.reports.evaluate import evaluate
from moepack.reports.inspect import inspect
from moepack.reports.plan import plan
from moepack.runtime.patches import quiet_libraries
from moepack.runtime.planning.options import LoadOptions

HERE = Path(__file__).resolve().parent
MODEL = HERE / "mini-qwen3-moe"
TEXT = HERE / "text"
OUT = HERE.parent / "demo-output"
PROMPT = "The history of"
STILL = "hotness:hi=bf16,lo=w1,interval=1e9"  # experts stay where calibration's traffic put them
FOLLOWING = "hotness:hi=bf16,lo=w1,interval=0,rate=0,anchor=0"  # decides again after every pass
LARGER = 100_000  # bytes that the budget has beyond all experts at w1: a twentieth of what bf16 takes more
LENGTH = 256  # tokens of a window


def run(*command: str | Path) -> None:
    """Show a moepack command and run it."""
    print("$ moepack", *(str(c).replace(f"{HERE.parent}/", "") for c in command), flush=True)
    subprocess.run([sys.executable, "-m", "moepack", *map(str, command)], check=True)


def split_by_source(text: Path, folder: Path) -> dict[str, str]:
    """Write the rows of a JSON-lines file to one file a source; return the files by source, in order."""
    rows: dict[str, list[str]] = {}
    for line in text.read_text().splitlines():
        rows.setdefault(json.loads(line)["source"], []).append(line)
    files = {}
    for number, (source, lines) in enumerate(rows.items()):
        path = folder / f"text-{number}.jsonl"
        path.write_text("\n".join(lines) + "\n")
        files[source] = str(path)
    return files


def show_a_shift(bundle: Path, console: Console) -> None:
    """Serve prose, then maths, then code in one session and one budget: with experts held still, and moving.

    Raises:
        SystemExit: when no expert moved, or moving lowered the perplexity of the last text by less than 1 %.
    """
    files = split_by_source(TEXT / "evaluation.jsonl", bundle.parent)
    asked = LoadOptions(device_memory=0, policy=STILL, batch=1, prefill_tokens=LENGTH, kv_tokens=0, all_logits=False)
    budget = plan(bundle, asked).least_bytes + LARGER
    still, following = (
        evaluate(bundle, list(files.values()), LoadOptions(policy=policy, device_memory=budget, batch=1), length=LENGTH)
        for policy in (STILL, FOLLOWING)
    )
    table = Table("text", "experts held still", "experts follow the text", title=f"one session in {budget:,} bytes")
    for source, held, moved in zip(files, still.files, following.files, strict=True):
        change = f"{100 * (moved.perplexity / held.perplexity - 1):+.1f} %"
        table.add_row(source, f"{held.perplexity:.2f}", f"{moved.perplexity:.2f} ({change})")
    console.print(table)
    moves = f"{following.promotions:,} promotions, {following.demotions:,} demotions, {following.forward_waits} waits"
    peak = max(still.resident_bytes_peak, following.resident_bytes_peak)
    console.print(f"perplexity; {moves}, peak {peak:,} of {budget:,} bytes")
    if following.promotions == 0 or following.files[-1].perplexity > 0.99 * still.files[-1].perplexity:
        sys.exit("the experts did not follow the text: this is a fault of moepack")


def main() -> None:
    """Build, inspect, verify; serve every version and show what it costs; show experts that follow a shift of text."""
    quiet_libraries()
    began = time.monotonic()
    shutil.rmtree(OUT, ignore_errors=True)
    bundle = OUT / "mini-qwen3-moe-bundle"
    run("build", MODEL, "-o", bundle, "--recipe", HERE / "demo.yaml", "--calibration", TEXT / "calibration.jsonl")
    run("inspect", bundle, "--plot", OUT / "losses.png")
    run("verify", bundle, "--checkpoint", MODEL)
    facts = inspect(bundle)
    evaluation = str(TEXT / "evaluation.jsonl")
    plain = evaluate(MODEL, [evaluation], length=256)
    table = Table("version", "bytes", "bits/weight", "perplexity", "against BF16", title="what each precision costs")
    table.add_row("transformers", "", "16", f"{plain.perplexity:.3f}", "")
    texts = {}
    for name, version in facts["versions"].items():
        score = evaluate(bundle, [evaluation], LoadOptions(policy=f"static:{name}"), length=256)
        change = f"{100 * (score.perplexity / plain.perplexity - 1):+.2f} %"
        bits = f"{version['bits_per_weight']:.2f}"
        table.add_row(name, f"{version['bytes']:,}", bits, f"{score.perplexity:.3f}", change)
        texts[name] = generate(bundle, PROMPT, LoadOptions(policy=f"static:{name}"), max_new_tokens=24)
    console = Console()
    console.print(table)
    for name, text in texts.items():
        console.print(f"[bold]{name:>5}[/bold]  {PROMPT}[dim] {' '.join(text.split())}[/dim]", highlight=False)
    show_a_shift(bundle, console)
    took = time.monotonic() - began
    console.print(f"\nThe bundle and a picture of its losses are in {OUT.name}/. All of it took {took:.0f} s.")


if __name__ == "__main__":
    main()
