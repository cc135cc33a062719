"""What the comparison is held to: rows in, targets out. Measures nothing."""

from collections.abc import Sequence

from benchmarks.common import Row, Target

# moepack's encoding, and the one of llama.cpp that has at least as many bits, whose divergence it is held to.
EQUAL_BITS = (("w8", "Q8_0"), ("w4", "Q4_K"), ("w4", "IQ4_NL"), ("w3", "Q3_K"), ("w3", "IQ3_S"), ("w2", "Q2_K"))
# The same as users run them, attention quantised as well.
PEERS = ("llama.cpp", "ik_llama.cpp")
MIXES = {"w4": "Q4_K_M", "w2": "Q2_K mix"}
SERVED = tuple((f"{experts}, dense {dense}", mix) for experts, mix in MIXES.items() for dense in ("w8", "w4"))


def judged(rows: Sequence[Row]) -> list[Target]:
    """The targets, of rows that each say their part."""
    return [*_models(rows), *_quality(rows)]


def _models(rows: Sequence[Row]) -> list[Target]:
    """The best of moepack's rows of a version beside the best of each peer."""
    best: dict[str, float] = {}
    for row in rows:
        if row["part"] != "models":
            continue
        version = row["side"].partition(",")[0]
        for over in (f"{what} over {peer}'s best" for peer in PEERS for what in ("decode", "prefill")):
            if over in row:
                name = f"{version}, as served, {row['threads']} threads: {over}"
                best[name] = max(best.get(name, 0.0), row[over])
    return [Target(name, value, 1.0, "higher") for name, value in best.items()]


def _quality(rows: Sequence[Row]) -> list[Target]:
    out = []
    found = {(r["model"], r["encoding"]): r for r in rows if r["part"] == "quality"}
    for model in dict.fromkeys(m for m, _ in found):
        for ours, theirs in (*EQUAL_BITS, *SERVED):
            mine = found.get((model, ours))
            other = found.get((model, theirs))
            if mine is None or other is None:
                continue
            for what in ("error", "KL, mnat"):
                if what in mine:
                    name = f"{model}: {what.partition(',')[0]} of {ours} over {theirs}'s"
                    out.append(Target(name, mine[what] / other[what], 1.0, "lower"))
    for row in rows:
        if row["part"] == "quality" and row["encoding"] == "w4, dense w8":
            name = f"{row['model']}: what dense w8 adds to the divergence of w4, %"
            out.append(Target(name, row["added, %"], 5.0, "lower"))
    return out
