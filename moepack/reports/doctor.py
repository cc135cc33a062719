"""Report what this machine offers: libraries, quantisation methods, devices, memory, codec and disk rates."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from moepack.pack.files import advise
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.processors import processors
from moepack.quantize import methods
from moepack.quantize.methods import installed
from moepack.shared.progress import size

if TYPE_CHECKING:
    from rich.table import Table

_LIBRARIES = {
    "torch": "2.11",
    "transformers": "5.17",
    "safetensors": "0.6",
    "huggingface-hub": "1.30",
    "triton": "3.6",
    "datasets": "4",
    **{x.name: x.least for x in methods.libraries()},
}
_OPTIONAL = {"triton", "datasets", *(x.name for x in methods.libraries())}
READY = "ready"


def doctor(directory: Path | None = None) -> JsonObject:
    """Collect facts about this machine, ready for JSON. `problems` lists what keeps moepack from working.

    `methods` says whether each quantisation method is ready, or what it lacks here. `can_build` says whether the
    default method is ready. Disk rates are measured in `directory`, by default the temporary directory.
    """
    import psutil

    from moepack.pack import trials
    from moepack.quantize import trellis_search
    from moepack.runtime.experts import backends

    problems: list[str] = []
    builds = quantisers()
    libraries = {name: installed(name) for name in _LIBRARIES}
    devices = _devices()
    for name, version in libraries.items():
        least = _LIBRARIES[name]
        if version is None and name not in _OPTIONAL:
            problems.append(f"{name} is not installed: pip install moepack")
        elif version is not None and _parts(version) < _parts(least):
            problems.append(f"{name} {version} is older than {least}: pip install -U {name}")
    if devices and (why := triton_fails()) is not None:
        remedy = f"pip install 'triton>={_LIBRARIES['triton']}', and install gcc"
        problems.append(f"Triton, which runs experts on a GPU, does not run here ({why}): {remedy}")
    cpu = _cpu()
    if not trellis_search.compiled():
        problems.append(trellis_search.SLOW)
    problems += [f"{library} is not used: {why}" for library, why in trials.faults.items()]
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "libraries": libraries,
        "methods": builds,
        "can_build": builds[methods.DEFAULT] == READY,
        "cpu": cpu,
        "kernel_limits": backends.source(),
        "memory_bytes": psutil.virtual_memory().total,
        "memory_free_bytes": psutil.virtual_memory().available,
        "devices": devices,
        "host_memory": host_memory(),
        "codec": _codec(),
        "disk": disk_rates(directory or Path(tempfile.gettempdir())),
        "problems": problems,
    }


def quantisers() -> dict[str, str]:
    """Map each quantisation method to READY, or to what a build by that method lacks here.

    A build reads data sets and .parquet files through `datasets`. A method may need a library of its own, and the
    libraries of its fallbacks, the methods tried as well on experts with few tokens: moepack's own `gptq` needs hqq for
    these alone.
    """
    out = {}
    for name in methods.named():
        entry = methods.get(name)
        needs = [("datasets", " to read data sets")]
        needs += [(x.name, "") for x in (entry.library,) if x is not None]
        extra = entry.library.extra if entry.library is not None else "build"
        others = (methods.get(other).library for other in entry.fallbacks)
        needs += [(x.name, " for experts with few tokens") for x in others if x is not None]
        lacks = [library + purpose for library, purpose in needs if not installed(library)]
        out[name] = f"lacks {', '.join(lacks)}: pip install 'moepack[{extra}]'" if lacks else READY
    return out


def kernels() -> list[dict[str, str]]:
    """Measure and return the backend table: which kernel runs on each device, by version and tokens of an expert."""
    from moepack.runtime.experts import backends

    backends.autotune()
    return backends.table()


def render(facts: JsonObject) -> Table:
    """Make a table of what `doctor` returns, with sizes and rates in units."""
    from rich.table import Table

    table = Table(box=None, show_header=False)
    for name, value in facts.items():
        for label, text in _rows(name.replace("_", " "), value):
            table.add_row(label, text)
    return table


def _rows(label: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield a fact as labels and texts: a row for each entry of a mapping or a list."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _rows(f"{label}: {name.replace('_', ' ')}", inner)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from _rows(f"{label} {number}" if isinstance(inner, Mapping) else label, inner)
    elif "bytes per second" in label and isinstance(value, int | float):
        yield label.replace(" bytes per second", ""), f"{size(value)}/s"
    elif label.endswith(" bytes") and isinstance(value, int | float):
        yield label.removesuffix(" bytes"), size(value)
    elif isinstance(value, bool):
        yield label, "yes" if value else "no"
    else:
        yield label.removesuffix(" bytes"), "none" if value in (None, [], "") else str(value)


def _parts(version: str) -> tuple[int, ...]:
    return tuple(int(p) for p in version.split("+")[0].split(".") if p.isdigit())


def _cpu() -> JsonObject:
    """Return the cores, the kernels' instruction set and the best set here; both sets are None without kernels.

    Both compiled libraries are tried first, unless it is remembered what their trials found (pack/trials.py).
    """
    from moepack.pack.codec import exponent_fast
    from moepack.runtime.experts import backends

    cores = processors()
    exponent_fast.engine()
    native = backends.library()
    if native is None:
        return {"cores": cores, "isa": None, "isa_best": None}
    return {"cores": cores, "isa": native.LEVELS[native.level], "isa_best": native.levels()[-1]}


def triton_fails() -> str | None:
    """Return why Triton cannot launch kernels on this machine's GPU, or None if it can."""
    try:
        import triton

        triton.runtime.driver.active.get_current_target()  # compiles a library of Triton's where none is kept
    except Exception as error:  # of any kind: there is no Triton, no C compiler, or no driver
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def _devices() -> list[JsonObject]:
    import torch

    out = []
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        capability = f"{p.major}.{p.minor}"
        out.append({"name": p.name, "memory_bytes": total, "free_bytes": free, "compute_capability": capability})
    return out


def host_memory() -> JsonObject:
    """Report how the host would keep a GPU's extents: the mode, why each better mode fails, and limits.

    `kernels_read` is the mode of memory that the GPU's kernels read, for experts `@pinned`; null if there is none.

    Every way of pinning memory is tried on 64 MiB. Without a GPU, `mode` is "files" and nothing is tried.
    """
    import torch

    from moepack.runtime.store.cudart import Cudart
    from moepack.runtime.store.host_limit import host_limits
    from moepack.runtime.store.pinning import probe

    limits = host_limits()
    if not torch.cuda.is_available():
        return {"mode": "files", "reason": "no CUDA device: experts are read from the files", **limits}
    try:
        ways = probe(Cudart(torch.cuda.current_device()))
    except OSError as error:
        return {"mode": "staged", "reason": str(error), **limits}
    mode = next(way["mode"] for way in ways if way["works"])
    reason = "; ".join(f"not {way['mode']}: {way['reason']}" for way in ways if not way["works"])
    read = next((way["mode"] for way in ways if way.get("kernels_read")), None)
    return {"mode": mode, "kernels_read": read, "reason": reason, **limits, "ways": ways}


def _codec() -> JsonObject:
    import numpy as np

    from moepack.pack.codec import exponent_fast

    values = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    out = np.empty_like(bits)
    exponent_fast.decode_into(exponent_fast.encode(bits[:8192]), out[:8192])
    times = []
    for _ in range(3):
        began = time.perf_counter()
        coded = exponent_fast.encode(bits)
        middle = time.perf_counter()
        exponent_fast.decode_into(coded, out)
        times.append((middle - began, time.perf_counter() - middle))
    return {
        "engine": exponent_fast.engine_name(),
        "encode_bytes_per_second": bits.nbytes / min(t[0] for t in times),
        "decode_bytes_per_second": bits.nbytes / min(t[1] for t in times),
    }


def disk_rates(directory: Path) -> JsonObject:
    """Measure rates of writing (synced) and reading 64 MiB, in bytes a second. The page cache may serve the reads.

    `direct_bytes_per_second` has the rates past the page cache by the number of requests in flight; null if refused.
    """
    from moepack.runtime.store.page_file import direct_rate

    written = 64 << 20
    facts: JsonObject = {"directory": str(directory), "free_bytes": shutil.disk_usage(directory).free}
    try:
        with tempfile.NamedTemporaryFile(dir=directory) as f:
            block = os.urandom(1 << 20)
            began = time.perf_counter()
            for _ in range(written >> 20):
                f.write(block)
            f.flush()
            os.fsync(f.fileno())
            facts["write_bytes_per_second"] = written / (time.perf_counter() - began)
            advise(f.fileno(), "DONTNEED")
            f.seek(0)
            began = time.perf_counter()
            while f.read(1 << 20):
                pass
            facts["read_bytes_per_second"] = written / (time.perf_counter() - began)
            direct = {}
            for in_flight in (1, 2, 4, 8):
                advise(f.fileno(), "DONTNEED")
                direct[str(in_flight)] = direct_rate(f.fileno(), in_flight)
            facts["direct_bytes_per_second"] = direct
    except OSError as error:
        facts["error"] = error.strerror or type(error).__name__
    return facts
