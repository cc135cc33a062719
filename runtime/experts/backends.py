"""Which kernel runs what: a table of (device, version, tokens an expert) to kernel, filled by a short autotune.

A CPU multiplies an expert straight from its packed bytes up to some number of tokens, and from there on in tiles of
unpacked weights: its own for BF16 activations on a processor that multiplies BF16, else torch's matrix product. Where
that turns depends on the machine and the number of threads, so it is measured when it is first needed, in up to a
quarter of a second an encoding, and kept in a file of the user's cache. Decides nothing about which version an expert
has.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Version, encoding_of
from moepack.runtime.kernels.forms import compiled, compiled_names, kernel_of

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import LayerForms

# Tokens up to which an expert runs from its own bytes, by the dtype of activations and the name of its encoding, used
# where nothing that was measured could be kept.
DEFAULTS = {f"float32 {name}": kernel_of(name).float32 for name in compiled_names()}
DEFAULTS |= {f"bfloat16 {name}": kernel_of(name).bfloat16 for name in compiled_names()}
BESIDE_AMX = {f"bfloat16 {name}": kernel_of(name).beside_amx for name in compiled_names()}
VARIABLE = "MOEPACK_LIMITS"
AGAINST = "by_torch of normal numbers"  # what packed bytes were measured against: another name has limits measured anew
TABLES = 15  # machines, levels and numbers of threads that the file holds besides the latest
CANDIDATES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


def backend(device: torch.device) -> str:
    """What runs experts on a device: "native" (product.c), "triton", or "reference" (plain torch)."""
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
    """What the compiled CPU kernels read of a layer; None elsewhere, or where there are none for a version."""
    native = _native() if device.type == "cpu" and compiled(versions) else None
    return None if native is None else native.LayerForms(layer.matrices, versions)


def direct_limit(dtype: torch.dtype, version: Version, threads: int | None = None) -> int:
    """The most tokens with which an expert in a version still runs straight from its own bytes.

    Measured here, for one number of threads (torch's without `threads`), the first time that somebody asks.
    """
    return _limits([f"{_short(dtype)} {version.name}"], threads or torch.get_num_threads())[0]


def prepare(dtype: torch.dtype, versions: tuple[Version, ...], device: torch.device) -> None:
    """Have the limits at hand before the first pass asks for them: under a second where they are not known yet."""
    if device.type == "cpu" and _native() is not None and compiled(versions):
        direct_limits(dtype if dtype == torch.bfloat16 else torch.float32, versions)


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


def dense_kept_bytes(shapes: Sequence[tuple[int, int]], tokens: int) -> int:
    """The same of products of dense matrices [rows, cols] that share an input."""
    if _native() is None:
        return 0
    from moepack.runtime.kernels import dense_native

    return dense_native.dense_kept_bytes(shapes, tokens, torch.get_num_threads())


def unpacked_bytes(tokens: int, cols: int) -> int:
    """The most bytes that torch's products of so many tokens take beside tokens and results; 0 without kernels, where
    weights are unpacked whole."""
    if _native() is None:
        return 0
    from moepack.runtime.kernels.by_torch import bytes_beside

    return bytes_beside(tokens, cols)


def direct_limits(
    dtype: torch.dtype, versions: tuple[Version, ...], threads: int | None = None
) -> npt.NDArray[np.int64]:
    """`direct_limit` of each version, int64 [versions]: not to be written to."""
    return _direct_limits(dtype, versions, threads or torch.get_num_threads())


def dense_limits(dtype: torch.dtype, names: Sequence[str]) -> dict[torch.dtype, list[int]]:
    """`direct_limit` for the encodings of matrices of `dense_native.MatrixGroup`, as it takes them; torch's threads."""
    return {dtype: _limits([f"{_short(dtype)} {name}" for name in names], torch.get_num_threads())}


@functools.cache
def _direct_limits(dtype: torch.dtype, versions: tuple[Version, ...], threads: int) -> npt.NDArray[np.int64]:
    return np.array(_limits([f"{_short(dtype)} {v.name}" for v in versions], threads), np.int64)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def defaults() -> dict[str, int]:
    """The limits without a measurement."""
    native = _native()
    return DEFAULTS | (BESIDE_AMX if native is not None and native.LEVELS[native.level] == "amx" else {})


def _limits(names: Sequence[str], threads: int, again: bool = False) -> list[int]:
    """The limits of "<dtype> <encoding>" names on this machine; those that are not known yet are measured and kept.

    Where nothing can be kept they are the defaults: processes that each measured anew would not compute the same bits.
    """
    if _native() is None or _fixed():
        return [defaults()[name] for name in names]
    machine = _machine(threads)
    known = {} if again else _read().get(machine, {})
    if missing := [name for name in dict.fromkeys(names) if name not in known]:
        try:
            with _locked():
                if not again:  # another process may have measured meanwhile
                    known = _read().get(machine, {})
                known |= _measure([name for name in missing if name not in known], threads)
                _write(machine, known)
        except OSError:
            return [defaults()[name] for name in names]
    return [known[name] for name in names]


def _fixed() -> bool:
    """Whether MOEPACK_LIMITS asks for the limits of the table, on every machine the same.

    Raises:
        InputError: for another word than "fixed".
    """
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "fixed"):
        raise InputError(f"{VARIABLE}={asked}: it may be `fixed`, or not set")
    return bool(asked)


def _measure(names: Sequence[str], threads: int) -> dict[str, int]:
    from .autotune import measure_limit

    out = {}
    for name in names:
        dtype, encoding = name.split()
        out[name] = measure_limit(getattr(torch, dtype), encoding, CANDIDATES, threads)
    _native().release()  # what it was measured with is more than a small model's plan counts
    return out


def _file() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "moepack" / "kernels.json"


def _read() -> dict[str, dict[str, int]]:
    """What was measured, by machine and number of threads, the latest last; nothing where the file is not ours."""
    try:
        tables = json.loads(_file().read_text())["tables"]
        out = {str(m): {str(n): int(v) for n, v in limits.items()} for m, limits in tables.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    good = [m for m, limits in out.items() if all(n in DEFAULTS and v in CANDIDATES for n, v in limits.items())]
    return {m: out[m] for m in good}


def _write(machine: str, limits: dict[str, int]) -> None:
    tables = _read()
    tables.pop(machine, None)
    kept = dict(list(tables.items())[-TABLES:])
    part = _file().with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"tables": kept | {machine: limits}}, indent=1) + "\n")
    part.replace(_file())


@contextmanager
def _locked() -> Iterator[None]:
    """One process at a time measures, undisturbed, and the next finds what it kept."""
    _file().parent.mkdir(parents=True, exist_ok=True)
    with _file().with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def _machine(threads: int) -> str:
    """What a measurement holds for: the machine, the instruction set, the library's very build, torch, threads."""
    native = _native()
    level, build = ("none", "") if native is None else (native.LEVELS[native.level], native.build())
    here = f"{platform.node()} {_processor()} {level} {build}"
    return f"{here} torch {torch.__version__} {threads} threads, against {AGAINST}"


def autotune() -> dict[str, int]:
    """Measure every limit anew for torch's number of threads, and keep them: a second or two.

    Returns:
        the limits, by dtype and encoding; the defaults where there are no compiled kernels or nothing can be kept.
    """
    limits = dict(zip(DEFAULTS, _limits(list(DEFAULTS), torch.get_num_threads(), again=True), strict=True))
    forget()
    return limits


def forget() -> None:
    """Read what was measured from its file again."""
    _direct_limits.cache_clear()


def source() -> str:
    """Which limits are used here, for reports: where they come from, and for how many threads."""
    threads = torch.get_num_threads()
    if _native() is None:
        return "none: the kernels are not compiled"
    if _fixed():
        return f"defaults: {VARIABLE}=fixed"
    if _machine(threads) in _read():
        return f"measured on this machine with {threads} threads, kept in {_file()}"
    folder = next(p for p in _file().parents if p.exists())
    if not os.access(folder, os.W_OK):
        return f"defaults: {folder} cannot be written to, so nothing measured could be kept"
    return f"none yet for {threads} threads: measured when a model is loaded"


def table() -> list[dict[str, str]]:
    """The backend table: a row for each device, version and range of tokens, with the kernel that runs it."""
    native, rows = _native(), []
    if native is None:
        rows.append({"device": "cpu", "version": "all", "tokens": "any", "kernel": "dequantise, torch (not compiled)"})
    else:
        level = native.LEVELS[native.level]
        for name, limit in zip(DEFAULTS, _limits(list(DEFAULTS), torch.get_num_threads()), strict=True):
            dtype, version = name.split()
            many = "torch matmul" if encoding_of(version).plain else "unpack tiles, torch matmul"
            if native.has_tiles(getattr(torch, dtype)):
                many = f"tiles, {level}"
            for tokens, kernel in ((f"1-{limit}", f"fused, {level}"), (f"{limit + 1}-", many)):
                rows.append({"device": f"cpu, {dtype}", "version": version, "tokens": tokens, "kernel": kernel})
    if torch.cuda.is_available():
        kind = backend(torch.device("cuda"))
        for tokens, tile in (("1-16", "decode"), ("17-", "prefill")):
            rows.append({"device": "cuda", "version": "all", "tokens": tokens, "kernel": f"{kind}, {tile} tiles"})
    return rows
