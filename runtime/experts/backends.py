"""The choice of a kernel by device, version and number of tokens of an expert, with a short autotune.

Up to a limit of tokens, a CPU multiplies an expert straight from its packed bytes. Above the limit, it unpacks tiles of
weights and multiplies them in the compiled library (BF16 activations on a processor that multiplies BF16) or in torch.
The limit depends on the machine and the number of threads. It is measured when first needed, in up to a quarter of a
second for each encoding, and kept in the user's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer, Version, encoding_of
from moepack.pack.trials import best_level
from moepack.pack.user_files import cache_path, write_whole
from moepack.runtime.kernels.by_torch import bytes_beside
from moepack.runtime.kernels.forms import compiled, compiled_names, kernel_of

if TYPE_CHECKING:
    from moepack.runtime.kernels.affine_native import LayerForms

# For machines that cannot keep measurements: tokens up to which an expert runs from its packed bytes, by
# "<dtype of activations> <name of the encoding>".
DEFAULTS = {f"float32 {name}": kernel_of(name).float32 for name in compiled_names()}
DEFAULTS |= {f"bfloat16 {name}": kernel_of(name).bfloat16 for name in compiled_names()}
BESIDE_AMX = {f"bfloat16 {name}": kernel_of(name).beside_amx for name in compiled_names()}
UNLIMITED = 1 << 30  # tokens
# With AVX2 alone products of integers are faster than torch's floats with any number of tokens.
WITH_AVX2 = {f"bfloat16 {name}": UNLIMITED for name in compiled_names() if kernel_of(name).integers}
VARIABLE = "MOEPACK_LIMITS"
DENSE = "MOEPACK_DENSE_KERNELS"  # an environment variable: "off" leaves dense modules to the model's own code
AGAINST = "by_torch, up to 512 tokens"  # what packed bytes are measured against; a new name discards old measurements
TABLES = 15  # older measurements that the file keeps, of other machines, instruction sets and numbers of threads
CANDIDATES = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, UNLIMITED)


def backend(device: torch.device) -> str:
    """The kind of kernel for experts on a device: "native" (product.c), "triton", or "reference" (plain torch)."""
    if device.type == "cpu" and library() is not None:
        return "native"
    if device.type == "cuda":
        with contextlib.suppress(ImportError):
            from moepack.runtime.kernels import affine_triton  # noqa: F401

            return "triton"
    return "reference"


def serves_dense() -> bool:
    """Whether kernels may take the place of the code of modules outside the experts."""
    return os.environ.get(DENSE, "on") != "off"


@functools.cache
def library() -> Any:
    """Return the module of the compiled kernels, at the highest level that stands its trial; `None` without one."""
    try:
        from moepack.runtime.kernels import affine_native as native
    except (ImportError, OSError):
        return None
    from moepack.runtime.kernels.trial import trial

    names = dict(enumerate(native.levels()[: native.BEST + 1]))
    best = best_level(native.PATH, names, native.use_level, trial)
    if best is None:
        return None
    native.BEST = best
    return native


def native_layer(layer: ExpertLayer, versions: Sequence[Version], device: torch.device) -> LayerForms | None:
    """A layer's forms (byte offsets for the compiled CPU kernels), or `None` if these cannot run every version."""
    native = library() if device.type == "cpu" and compiled(versions) else None
    return None if native is None else native.LayerForms(layer.matrices, versions)


def prepare(dtype: torch.dtype, versions: tuple[Version, ...], device: torch.device) -> None:
    """Measure the limits that are unknown, in under a second, before the first pass needs them."""
    if device.type == "cpu" and library() is not None and compiled(versions):
        direct_limits(dtype if dtype == torch.bfloat16 else torch.float32, versions)


def kept_bytes(layer: ExpertLayer, tokens: int, top_k: int) -> int:
    """The most bytes that the compiled CPU kernels keep between passes of `tokens` tokens; 0 without these kernels."""
    native = library()
    slots = tokens * top_k
    threads = torch.get_num_threads()
    if native is None:
        return 0
    pairs = zip(layer.matrices, (tokens, slots), strict=True)  # each matrix with its number of activations
    return max(int(native.kept_bytes(m, layer.experts, slots, n, tokens, threads)) for m, n in pairs)


def dense_kept_bytes(shapes: Sequence[tuple[int, int]], tokens: int) -> int:
    """The bytes of `kept_bytes`, but for dense matrices of `shapes` [rows, cols] that share an input."""
    if library() is None:
        return 0
    from moepack.runtime.kernels import dense_native

    return dense_native.dense_kept_bytes(shapes, tokens, torch.get_num_threads())


def unpacked_bytes(tokens: int, cols: int) -> int:
    """Most bytes that torch's products of `tokens` tokens allocate, without inputs and results; 0 without kernels."""
    return 0 if library() is None else bytes_beside(tokens, cols)


def direct_limits(
    dtype: torch.dtype, versions: tuple[Version, ...], threads: int | None = None
) -> npt.NDArray[np.int64]:
    """The most tokens with which an expert runs straight from packed bytes, by version: int64 [versions], read-only.

    The limits hold for one number of threads (default: torch's). They are measured when they are first asked for.
    """
    return _direct_limits(dtype, versions, threads or torch.get_num_threads())


@functools.cache
def _direct_limits(dtype: torch.dtype, versions: tuple[Version, ...], threads: int) -> npt.NDArray[np.int64]:
    limits = np.array(dense_limits(dtype, [v.name for v in versions], threads), np.int64)
    limits.setflags(write=False)  # one array serves all callers
    return limits


def dense_limits(dtype: torch.dtype, names: Sequence[str], threads: int | None = None) -> list[int]:
    """The limits of `direct_limits`, for the encodings of the matrices of a `dense_native.MatrixGroup`."""
    short = str(dtype).removeprefix("torch.")
    return _limits([f"{short} {name}" for name in names], threads or torch.get_num_threads())


forget = _direct_limits.cache_clear  # after this call, limits are read from the file again


def defaults() -> dict[str, int]:
    """Return the limits to use when this machine was not measured."""
    native = library()
    here = {"amx": BESIDE_AMX, "avx2": WITH_AVX2}
    return DEFAULTS | ({} if native is None else here.get(native.LEVELS[native.level], {}))


def _limits(names: Sequence[str], threads: int, again: bool = False) -> list[int]:
    """The limits of "<dtype> <encoding>" names on this machine; measures and keeps unknown limits.

    If nothing can be kept, they are the defaults: separate measurements would give processes different bits.
    """
    if library() is None or _fixed():
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
    """Whether MOEPACK_LIMITS asks for the default limits. Raises InputError for a value other than "fixed"."""
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
    library().release()  # measuring keeps more memory than a small model's plan counts
    return out


def _file() -> Path:
    if (file := cache_path("kernels.json")) is None:
        raise OSError("this user has no home folder")
    return file


def _read() -> dict[str, dict[str, int]]:
    try:
        tables = json.loads(_file().read_text())["tables"]
        out = {str(m): {str(n): int(v) for n, v in limits.items()} for m, limits in tables.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return {m: x for m, x in out.items() if all(n in DEFAULTS and v in CANDIDATES for n, v in x.items())}


def _write(machine: str, limits: dict[str, int]) -> None:
    tables = _read()
    tables.pop(machine, None)
    kept = dict(list(tables.items())[-TABLES:])
    write_whole(_file(), json.dumps({"tables": kept | {machine: limits}}, indent=1) + "\n")


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Let one process at a time measure; the next process then reads what the first has measured."""
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
    """The key of a measurement: machine, instruction set, build of the library, version of torch, threads."""
    native = library()
    level, build = ("none", "") if native is None else (native.LEVELS[native.level], native.build())
    here = f"{platform.node()} {_processor()} {level} {build}"
    return f"{here} torch {torch.__version__} {threads} threads, against {AGAINST}"


def autotune() -> dict[str, int]:
    """Measure every limit again for torch's number of threads, in a second or two, and keep them.

    Returns the limits by dtype and encoding. They are the defaults without compiled kernels, or if nothing can be kept.
    """
    limits = dict(zip(DEFAULTS, _limits(list(DEFAULTS), torch.get_num_threads(), again=True), strict=True))
    forget()
    return limits


def source() -> str:
    """A sentence for reports that says where the limits come from."""
    threads = torch.get_num_threads()
    if library() is None:
        return "none: the kernels are not compiled"
    if _fixed():
        return f"defaults: {VARIABLE}=fixed"
    if _machine(threads) in _read():
        return f"measured on this machine with {threads} threads, kept in {_file()}"
    try:
        folder = next(p for p in _file().parents if p.exists())
    except OSError as error:
        return f"defaults: {error}, so nothing measured could be kept"
    if not os.access(folder, os.W_OK):
        return f"defaults: {folder} cannot be written to, so nothing measured could be kept"
    return f"none yet for {threads} threads: measured when a model is loaded"


def table() -> list[dict[str, str]]:
    """The backend table: a row for each device, version and range of tokens, with the kernel that runs it."""
    native = library()
    rows = []
    if native is None:
        rows.append({"device": "cpu", "version": "all", "tokens": "any", "kernel": "dequantise, torch (not compiled)"})
    else:
        level = native.LEVELS[native.level]
        for name, limit in zip(DEFAULTS, _limits(list(DEFAULTS), torch.get_num_threads()), strict=True):
            dtype, version = name.split()
            many = "torch matmul" if encoding_of(version).plain else "unpack tiles, torch matmul"
            if native.has_tiles(getattr(torch, dtype)):
                many = f"tiles, {level}"
            ranges = [(f"1-{limit}", f"fused, {level}"), (f"{limit + 1}-", many)]
            for tokens, kernel in ranges if limit != UNLIMITED else [("any", ranges[0][1])]:
                rows.append({"device": f"cpu, {dtype}", "version": version, "tokens": tokens, "kernel": kernel})
    if torch.cuda.is_available():
        kind = backend(torch.device("cuda"))
        for tokens, tile in (("1-8", "decode"), ("9-", "prefill")):
            rows.append({"device": "cuda", "version": "all", "tokens": tokens, "kernel": f"{kind}, {tile} tiles"})
    return rows
