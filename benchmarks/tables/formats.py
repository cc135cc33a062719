"""The table of released formats: what each keeps, and its bits."""

from .common import shown, table

# Version, group size, what it keeps, its bits a weight by formula.
FORMATS = (
    ("mxfp4", 32, "E2M1 codes, an E8M0 scale for 32 columns", "4 + 8/32"),
    ("nvfp4", 16, "E2M1 codes, an E4M3 scale for 16 columns, an FP32 scale for 16 rows", "4 + 8/16 + 32/(16*c)"),
    ("mxfp8", 32, "E4M3 codes, an E8M0 scale for 32 columns", "8 + 8/32"),
    ("fp8", 128, "E4M3 codes, an FP32 scale for 128 columns of 16 rows", "8 + 32/(16*128)"),
    ("fp8", 32, "the same for 32 columns", "8 + 32/(16*32)"),
    ("fp8row", 0, "E4M3 codes, an FP32 scale a row", "8 + 32/c"),
    ("int4", 32, "4-bit integers, symmetric, a BF16 scale for 32 columns", "4 + 16/32"),
    ("int4fp16", 128, "4-bit integers, an FP16 scale and a zero point for 128 columns", "4 + 16/128 + 8/128"),
    ("int8", 128, "8-bit integers, symmetric, a BF16 scale for 128 columns", "8 + 16/128"),
    ("int8fp16", 128, "8-bit integers, an FP16 scale and a zero point for 128 columns", "8 + 16/128 + 8/128"),
)  # fmt: skip
COLS = 4096  # columns of the matrix that the bits are counted for


def bits(version: str, group: int) -> float:
    """Bits a weight of a matrix of COLS by COLS in a version, scales and zero points included."""
    from moepack.pack.spec import Matrix, Version

    matrix = Matrix("weight", COLS, COLS)
    symmetric = version in ("int4", "int8")  # as compressed-tensors has them, and GPTQ has not
    sections = Version.of(version, group, symmetric=symmetric).sections((matrix,))
    return 8 * sum(s.size for s in sections) / matrix.weights


def stored(version: str, group: int) -> str:
    """Bits a weight in a file where codes are entropy-coded, about: those of normally distributed weights."""
    from moepack.pack.spec import Version
    from moepack.pipeline.dryrun.probes import sample

    own = Version.of(version, group)
    return f"about {sample(own, COLS)[0]:.2f}" if own.entropy_coded else "as many"


@shown
def formats() -> str:
    """What each version keeps, and its bits."""
    rows = []
    for version, group, keeps, formula in FORMATS:
        found = bits(version, group)
        shown = f"{found:.4f}".rstrip("0")
        rows.append([f"`{version}`", str(group) if group else "", keeps, f"`{formula}`", shown, stored(version, group)])
    return table(["version", "group", "keeps", "bits a weight in memory", f"at c = {COLS:,}", "in a file"], rows)
