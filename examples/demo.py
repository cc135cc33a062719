"""The demo behind `make demo`: the model in this folder, from checkpoint to served bundle, with what each width costs.

Needs nothing but this clone. Writes to demo-output/ (removed first).
"""

from __future__ import annotations

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
LARGER = 1_000_000  # bytes that the budget has beyond all experts at w2: about a third of what bf16 takes more


def run(*command: str | Path) -> None:
    """Show a moepack command and run it."""
    print("$ moepack", *(str(c).replace(f"{HERE.parent}/", "") for c in command), flush=True)
    subprocess.run([sys.executable, "-m", "moepack", *map(str, command)], check=True)


def main() -> None:
    """Build, inspect, verify; serve every version and show what it costs; serve high and low ones in a budget."""
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
    mixed = "hotness:hi=bf16,lo=w2"
    length = 256
    least = plan(
        bundle, LoadOptions(device_memory=0, policy=mixed, batch=4, prefill_tokens=length, all_logits=False)
    ).least_bytes
    budget = least + LARGER
    shown = ("--data", TEXT / "evaluation.jsonl", "--length", str(length))
    run("eval", bundle, *shown, "--policy", mixed, "--device-memory", str(budget))
    took = time.monotonic() - began
    console.print(f"\nThe bundle and a picture of its losses are in {OUT.name}/. All of it took {took:.0f} s.")


if __name__ == "__main__":
    main()
