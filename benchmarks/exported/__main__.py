"""Whether what other libraries read of exports says what the bundle says: greedy texts and perplexity.

    python -m benchmarks.exported [--checkpoint MODEL] [--to TARGET ...]

A bundle with symmetric zero points is built and exported at 4 bits. Texts are continued by 64 tokens, the likeliest at
each: by the bundle under `static:w4` in FP32, and by the library from the export. Where the library would choose
another token behind our text, our two logits must be level: a gap of at most LEVEL, or two steps of BF16 where the
library's own logits are BF16. Its perplexity must lie in the 95 % interval of ours.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.common import Target, built, finish, model_arguments, texts
from benchmarks.decoding import Mean
from benchmarks.peers import environments
from moepack.export import Wanted, export

from . import readers
from .readers import OfTorch, behind, losses

READER = {
    "checkpoint": "transformers", "compressed-tensors": "transformers", "gptq": "gptqmodel", "gguf": "llama.cpp",
}  # fmt: skip
ROUNDED = ("gptq",)  # whose library computes in BF16, logits as well
LEVEL = 0.05  # of two logits: the likelihoods are within 5 % of each other
PROMPTS, PROMPT, TEXT, WINDOWS, WINDOW = 20, 12, 64, 24, 128
COLUMNS = (
    "target",
    "read by",
    "same texts",
    "same tokens",
    "widest gap",
    "level",
    "perplexity",
    "+-",
    "theirs",
    "more, %",
)


@dataclass(frozen=True)
class Said:
    """What the bundle itself says: see readers.py for the shapes."""

    prompts: npt.NDArray[np.int64]
    texts: npt.NDArray[np.int64]
    windows: npt.NDArray[np.int64]
    logits: npt.NDArray[np.float32]
    losses: npt.NDArray[np.float64]


def said(bundle: Path, windows: npt.NDArray[np.int64], prompts: int, text: int) -> Said:
    """What a bundle says at w4: the beginnings of windows [n, tokens] are the prompts."""
    import moepack

    model = moepack.load(bundle, policy="static:w4", dtype=torch.float32)
    own, begun = OfTorch(model), windows[:prompts, :PROMPT]
    made = np.array([own.greedy(p.tolist(), text) for p in begun])
    out = Said(begun, made, windows, behind(own, begun, made), losses(own, windows))
    model.moepack.close()
    return out


def compared(bundle: Path, target: str, python: Path, ours: Said, work: Path) -> dict[str, Any]:
    """Export to a target, have its library read that, and compare: a row."""
    export(bundle, work / target, target, Wanted("4", scales="fp32" if target == "compressed-tensors" else "bf16"))
    asked, answer = work / "asked.npz", work / "answer.npz"
    np.savez(asked, prompts=ours.prompts, texts=ours.texts, windows=ours.windows)
    command = [str(python), readers.__file__, READER[target], str(work / target), str(asked), str(answer)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{READER[target]} does not read it:\n{done.stdout[-2000:]}")
    found = np.load(answer)
    chosen, logits = found["logits"].argmax(-1), ours.logits
    top = np.take_along_axis(logits, ours.texts[..., None], -1)[..., 0]
    gaps = top - np.take_along_axis(logits, chosen[..., None], -1)[..., 0]
    level = np.maximum(LEVEL, np.abs(top) / 64) if target in ROUNDED else np.full_like(top, LEVEL)
    over = np.where(chosen != ours.texts, gaps - level, -np.inf)
    widest = np.unravel_index(over.argmax(), over.shape)  # the first token, whose gap is 0, where none differs
    mean, more = Mean.of(ours.losses.tolist()), Mean.of((found["losses"] - ours.losses).tolist())
    return {
        "target": target, "read by": READER[target],
        "same texts": int((found["greedy"] == ours.texts).all(-1).sum()), "texts": len(ours.texts),
        "same tokens": int((chosen == ours.texts).sum()), "tokens": chosen.size,
        "widest gap": float(gaps[widest]), "level": float(level[widest]),
        "perplexity": float(np.exp(mean.value)), "+-": float(np.exp(mean.value) * mean.half),
        "theirs": float(np.exp(found["losses"].mean())), "more, %": 100 * more.value,
        "half intervals off": abs(more.value) / mean.half,
    }  # fmt: skip


def interpreter(target: str) -> Path | None:
    """What runs a target's library; None if it is not installed."""
    from importlib.util import find_spec

    if READER[target] == "llama.cpp" and find_spec("llama_cpp") is None:
        return environments.installed(environments.LLAMA, environments.cache())
    needs = {"checkpoint": "transformers", "compressed-tensors": "compressed_tensors", "gptq": "gptqmodel"}
    return Path(sys.executable) if find_spec(needs.get(target, "llama_cpp")) is not None else None


def judged(rows: list[dict[str, Any]]) -> list[Target]:
    """What is asked of the rows."""
    gaps = [
        Target(f"{r['target']}: widest gap of a token that differs", r["widest gap"], r["level"], "lower") for r in rows
    ]
    return gaps + [
        Target(f"{r['target']}: perplexity, in half intervals", r["half intervals off"], 1.0, "lower") for r in rows
    ]


def main() -> None:
    """Parse arguments, build, compare, print."""
    from moepack.calibrate.text.windows import calibration_windows, load_tokenizer

    parser = model_arguments(__doc__, 128)
    parser.add_argument("--to", nargs="+", default=tuple(READER), choices=tuple(READER))
    args = parser.parse_args()
    count = 6 if args.quick else WINDOWS
    windows = calibration_windows(texts(args)[1], load_tokenizer(args.checkpoint), count, WINDOW, 0).ids.numpy()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        bundle = built(args, work / "bundle", "bf16, w4", method=f"{args.method}, zeros: symmetric")
        ours = said(bundle, windows, min(count, PROMPTS), TEXT)
        for target in args.to:
            if (python := interpreter(target)) is None:
                print(f"{target}: {READER[target]} is not installed")
            else:
                rows.append(compared(bundle, target, python, ours, work))
    shown = [
        {**r, "same texts": f"{r['same texts']}/{r['texts']}", "same tokens": f"{r['same tokens']}/{r['tokens']}"}
        for r in rows
    ]
    finish(f"exports of {args.checkpoint.name} at w4", COLUMNS, shown, judged(rows), args.json)


if __name__ == "__main__":
    main()
