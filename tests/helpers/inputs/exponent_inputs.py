"""BF16 bits of every kind that the exponent codec meets, and every engine that codes them."""

from collections.abc import Iterator

import numpy as np

from moepack.pack.codec import exponent_fast


def bf16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def draw(kind: str, n: int, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    if kind == "constant":
        return np.full(n, rng.integers(1 << 16), np.uint16)
    if kind == "two":
        return rng.choice(rng.integers(0, 1 << 16, 2).astype(np.uint16), n)
    if kind == "gaussian":
        return bf16(rng.normal(0, 10.0 ** rng.integers(-6, 4), n))
    if kind == "cauchy":
        return bf16(rng.standard_cauchy(n))
    if kind == "lanes":  # lanes of very different lengths: one column block of tiny weights, as pruned models have
        values = rng.normal(0, 0.02, n)
        values[(np.arange(n) // 4) % 32 < 3] = rng.standard_cauchy(n)[(np.arange(n) // 4) % 32 < 3] ** 3
        return bf16(values)
    if kind == "nan":
        return (0x7F80 | rng.integers(0, 128, n) | rng.integers(0, 2, n) << 15).astype(np.uint16)
    return rng.integers(0, 1 << 16, n).astype(np.uint16)


KINDS = ["constant", "two", "gaussian", "cauchy", "lanes", "nan", "uniform"]


def every_engine() -> Iterator[str]:
    """Makes exponent_fast run each of its engines in turn."""
    kept = exponent_fast.engine
    try:
        exponent_fast.engine = lambda: None
        yield "NumPy"
        try:
            from moepack.pack.codec import exponent_native
        except OSError:
            return
        exponent_fast.engine = lambda: exponent_native
        for level in range(exponent_native.level + 1):
            assert exponent_native.use_level(level) == level
            yield f"C {level}"
        exponent_native.use_level()
    finally:
        exponent_fast.engine = kept
