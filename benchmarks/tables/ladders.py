"""Tables of ladders of versions, and of how layers share a budget."""

from __future__ import annotations

from .common import results, table

SHOWN = (  # what losses are weighed by, the way, the column
    ("gates", "layers by loss", "by loss"),
    ("logits", "layers by loss", "by loss, with reach"),
    ("gates", "or absent", "or absent"),
    ("logits", "or absent, layers by loss", "or absent, by loss, with reach"),
)


def ladders() -> str:
    """Divergence of the maps with which `hotness` begins, over that of the default without reach."""
    out = []
    for model, name in (
        ("tiny-qwen3-moe", "tiny-qwen3-moe"),
        ("mini-qwen3-moe", "mini-qwen3-moe"),
        ("tiny-qwen3-moe, code alone", "code"),
    ):
        rows = results(f"ladders-{name}")["rows"]
        for budget in dict.fromkeys(r["budget"] for r in rows):
            of = {(r["losses"], r["way"]): r for r in rows if r["budget"] == budget}
            cells = [f"{of[losses, way]['over evenly']:.2f} ± {of[losses, way]['+-']:.2f}" for losses, way, _ in SHOWN]
            first = of["gates", "layers evenly"]
            out.append([model, budget, first["ladder"], f"{first['KL, mnat']:.3g}", *cells])
    return table(["model", "budget", "ladder", "evenly, mnat", *(shown for *_, shown in SHOWN)], out)


def shifted() -> str:
    """Divergence of `hotness` while it serves texts that calibration did not see, by budget."""
    out = []
    for losses in ("gates", "logits"):
        rows = [r for r in results(f"shifted-{losses}")["rows"] if r["policy"].startswith("hotness")]
        names = list(dict.fromkeys(r["policy"] for r in rows))
        for budget in dict.fromkeys(r["budget"] for r in rows):
            of = {r["policy"]: r for r in rows if r["budget"] == budget}
            cells = [
                f"{of[n]['KL, mnat']:.3g} ± {of[n]['+-']:.2g}" if "KL, mnat" in of[n] else "refused" for n in names
            ]
            out.append([losses, budget, *cells])
    return table(["losses by", "budget", *names], out)
