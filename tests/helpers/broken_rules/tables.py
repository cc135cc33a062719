"""Edits of the calibration tables."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .names import Do


def table(name: str, change: Callable[[Any], Any]) -> Do:
    def edit(arrays, metadata):
        changed = change(arrays[name])
        arrays.pop(name)
        if changed is not None:
            arrays[name] = changed

    return lambda v: v.tables(edit)


def named(key: str, value: str | None) -> Do:
    return lambda v: v.tables(lambda a, m: m.pop(key) if value is None else m.update({key: value}))


def without_w1(arrays, metadata):
    metadata.update(versions="bf16,w8,w4,w3,w2")
    arrays.update({k: x[:, :5] for k, x in arrays.items() if x.shape == (3, 6)})


def one(value: float) -> Callable[[Any], Any]:
    def change(array):
        array.reshape(-1)[-1] = value
        return array

    return change


ERRORS = ("mse_error", "relative_error", "gated_error")
NUMBERS = dict.fromkeys(("mse", "relative", "gated", *ERRORS, "gate_sum", "prefill_gates", "reuse"), float)
COUNTS = ("tokens", "prefill_counts", "decode_counts", "coactivation")
TABLE_EDITS: dict[str, tuple[Do, str]] = {
    f"no {name}": (table(f"layers.4.{name}", lambda a: None), "tables") for name in (*NUMBERS, *COUNTS, "method")
}
for _name in ("relative", "mse", "method", "signal", "tokens"):
    TABLE_EDITS[f"no dense.{_name}"] = (table(f"dense.{_name}", lambda a: None), "tables")
for _name in NUMBERS:
    for _value in (float("nan"), float("inf"), -1.0):
        TABLE_EDITS[f"{_name} {_value}"] = (table(f"layers.1.{_name}", one(_value)), "number")
TABLE_EDITS |= {f"{name} -1": (table(f"layers.1.{name}", one(-1)), "number") for name in COUNTS}
TABLE_EDITS |= {
    "float64": (table("layers.1.mse", lambda a: a.astype(np.float64)), "tables"),
    "errors of another shape": (table("layers.1.gated_error", lambda a: a[:, :4]), "tables"),
    "errors in float64": (table("layers.4.relative_error", lambda a: a.astype(np.float64)), "tables"),
    "a method without a name": (table("layers.1.method", one(2)), "tables"),
    "experts": (table("layers.1.tokens", lambda a: a[:2]), "tables"),
    "a column less": (table("layers.1.mse", lambda a: a[:, :4]), "tables"),
    "windows that differ": (table("layers.1.decode_counts", lambda a: a[:1]), "tables"),
    "no columns named": (named("versions", None), "tables"),
    "a column w9": (named("versions", "bf16,w8,w4,w3,w2,w9"), "tables"),
    "a column twice": (named("versions", "bf16,w8,w4,w4,w2,w1"), "tables"),
    "columns out of order": (named("versions", "w4,bf16,w8,w3,w2,w1"), "tables"),
    "no column of w1": (lambda v: v.tables(without_w1), "tables"),
    "dense.relative nan": (table("dense.relative", one(float("nan"))), "number"),
    "dense.mse -1": (table("dense.mse", one(-1)), "number"),
    "dense.signal inf": (table("dense.signal", one(float("inf"))), "number"),
    "dense.tokens -1": (table("dense.tokens", one(-1)), "number"),
    "a dense method without a name": (table("dense.method", one(2)), "tables"),
    "a dense matrix less": (table("dense.relative", lambda a: a[:3]), "tables"),
    "a dense column less": (table("dense.mse", lambda a: a[:, :2]), "tables"),
    "no dense columns named": (named("dense_versions", None), "tables"),
    "dense columns out of order": (named("dense_versions", "w8,bf16,w4"), "tables"),
    "no column of a dense w4": (named("dense_versions", "bf16,w8,w3"), "tables"),
    "no methods named": (named("methods", None), "tables"),
    "a method with an escape": (named("methods", "none,\x1b[31m"), "tables"),
    "a method twice": (named("methods", "rtn,rtn"), "tables"),
    "an empty method": (named("methods", "none,"), "tables"),
}  # fmt: skip
