"""Tables of what was measured on a GPU, from results/gpu-day.json."""

from benchmarks.common import Row

from .common import results, shown, table

TOKENS = (1, 16, 512, 2048)
VERSIONS = ("bf16", "w8", "w4", "w3", "w2", "w1", "nvfp4", "mxfp4")


def _rows(*stages: str) -> list[Row]:
    return [r for r in results("gpu-day")["rows"] if r["stage"] in stages and r["value"] is not None]


@shown
def gpu_layers() -> str:
    """A layer's microseconds, ours and torch's in BF16, by version and tokens."""
    found = {r["row"]: r for r in _rows("layers")}
    rows = []
    for version in VERSIONS:
        at = [found[f"layer, {version}, {n} tokens"] for n in TOKENS]
        cells = [f"{r['value']:.0f}, {r['more']['torch BF16 us']:.0f}" for r in at]
        rows.append([version, *cells])
    return table(["version", *[f"{n:,} token{'s' * (n > 1)}" for n in TOKENS]], rows)


@shown
def gpu_measured() -> str:
    """The rows that have no limit to hold."""
    rows = []
    for r in _rows("machine", "coded", "served", "large"):
        if r["limit"] is not None:
            continue
        more = r.get("more", {}).get("tokens/s")
        shown = f"{r['value']:,.4g} {r['unit']}" + (f" ({more:.4g} tokens/s)" if more else "")
        rows.append([f"{r['stage']}: {r['row'].removeprefix('w4, dense w8: ')}", shown])
    return table(["row", "measured"], rows)
