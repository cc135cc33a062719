"""Which kernel runs what: a table of (device, version, tokens an expert) to kernel, filled by a short autotune.

A CPU multiplies an expert straight from its packed bytes up to some number of tokens, and from there on in tiles of
unpacked weights: its own for BF16 activations on a processor that multiplies BF16, else torch's matrix product. Where
that turns depends on the machine, so it is measured once and kept in a file of the user's cache. Decides nothing about
which version an expert has.
"""

from __future__ import annotations

import functools
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from moepack.pack.spec import LOSSLESS, ExpertLayer, Version
from moepack.runtime.kernels.forms import KERNELS

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import LayerForms

# Tokens up to which an expert runs from its own bytes, by the dtype of activations and the name of its encoding, used
# until `autotune` has measured this machine.
DEFAULTS = {f"float32 {name}": k.float32 for name, k in KERNELS.items()}
DEFAULTS |= {f"bfloat16 {name}": k.bfloat16 for name, k in KERNELS.items()}
BESIDE_AMX = {f"bfloat16 {name}": k.beside_amx for name, k in KERNELS.items()}
TILE = 256  # rows unpacked for torch at a time: 1 MiB of BF16 at 2048 columns, half a core's second-level cache
CANDIDATES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def backend(device: torch.device) -> str:
    """What runs experts on a device: "native" (affine.c), "triton", or "reference" (plain torch)."""
    if device.type == "cpu":
        return "native" if _native() is not None else "reference"
    if device.type == "cuda":
        try:
            from moepack.runtime.kernels import affine_triton  # noqa: F401
        except ImportError:
            return "reference"
        return "triton"
    return "reference"


@functools.cache
def _native() -> Any:
    try:
        from moepack.runtime.kernels import affine_native
    except (ImportError, OSError):
        return None
    return affine_native


def native_layer(layer: ExpertLayer, versions: Sequence[Version], device: torch.device) -> LayerForms | None:
    """What the compiled CPU kernels read of a layer; None elsewhere, or where they were not compiled."""
    native = _native() if device.type == "cpu" else None
    return None if native is None else native.LayerForms(layer.matrices, versions)


def direct_limit(dtype: torch.dtype, version: Version) -> int:
    """The most tokens with which an expert in a version still runs straight from its own bytes."""
    return _limits()[f"{str(dtype).removeprefix('torch.')} {version.name}"]


def kept_bytes(layer: ExpertLayer, tokens: int, top_k: int) -> int:
    """The most bytes that the compiled CPU kernels keep between passes of so many tokens; 0 without them."""
    native, slots, threads = _native(), tokens * top_k, torch.get_num_threads()
    if native is None:
        return 0
    first, second = layer.matrices
    sizes: list[int] = [
        native.kept_bytes(m, layer.experts, slots, activations, tokens, threads)
        for m, activations in ((first, tokens), (second, slots))
    ]
    return max(sizes)


@functools.cache
def direct_limits(dtype: torch.dtype, versions: tuple[Version, ...]) -> npt.NDArray[np.int64]:
    """`direct_limit` of each version, int64 [versions]: not to be written to."""
    return np.array([direct_limit(dtype, v) for v in versions], np.int64)


@functools.cache
def _limits() -> dict[str, int]:
    try:
        kept = json.loads(_file().read_text())
        limits = {name: int(kept["limits"][name]) for name in DEFAULTS}
        if kept["machine"] == _machine() and all(n in CANDIDATES for n in limits.values()):
            return limits
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return defaults()


def defaults() -> dict[str, int]:
    """The limits without a measurement."""
    native = _native()
    return DEFAULTS | (BESIDE_AMX if native is not None and native.LEVELS[native.level] == "amx" else {})


def _file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "moepack" / "kernels.json"


def _machine() -> str:
    native = _native()
    level = "none" if native is None else native.LEVELS[native.level]
    return f"{platform.machine()} {platform.node()} {level} torch {torch.__version__} {torch.get_num_threads()} threads"


def autotune() -> dict[str, int]:
    """Measure where unpacking begins to pay, for each dtype of activations; keep it for later runs. Some seconds.

    Returns:
        the limits, by dtype and encoding; the defaults where there are no compiled kernels.
    """
    if _native() is None:
        return defaults()
    from .autotune import measure_limit

    limits = {}
    for name in DEFAULTS:
        dtype, encoding = name.split()
        limits[name] = measure_limit(getattr(torch, dtype), encoding, CANDIDATES)
    try:
        _file().parent.mkdir(parents=True, exist_ok=True)
        part = _file().with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps({"machine": _machine(), "limits": limits}) + "\n")
        part.replace(_file())
    except OSError:
        pass  # a home that cannot be written: measured again next time
    forget()
    return limits


def forget() -> None:
    """Read what was measured from its file again."""
    _limits.cache_clear()
    direct_limits.cache_clear()


def table() -> list[dict[str, str]]:
    """The backend table: a row for each device, version and range of tokens, with the kernel that runs it."""
    native, rows = _native(), []
    if native is None:
        rows.append({"device": "cpu", "version": "all", "tokens": "any", "kernel": "dequantise, torch (not compiled)"})
    else:
        level = native.LEVELS[native.level]
        for name, limit in _limits().items():
            dtype, version = name.split()
            many = "torch matmul" if version == LOSSLESS else "unpack tiles, torch matmul"
            if native.has_tiles(getattr(torch, dtype)):
                many = f"tiles, {level}"
            for tokens, kernel in ((f"1-{limit}", f"fused, {level}"), (f"{limit + 1}-", many)):
                rows.append({"device": f"cpu, {dtype}", "version": version, "tokens": tokens, "kernel": kernel})
    if torch.cuda.is_available():
        kind = backend(torch.device("cuda"))
        for tokens, tile in (("1-16", "decode"), ("17-", "prefill")):
            rows.append({"device": "cuda", "version": "all", "tokens": tokens, "kernel": f"{kind}, {tile} tiles"})
    return rows
