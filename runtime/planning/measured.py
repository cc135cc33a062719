"""Keep a skeleton's measurements in the user's cache, so that a second plan does not repeat them.

Building and running a skeleton takes most of a plan's time. Only plans read the cache; loading always measures. A
file's name is a digest of everything on which its numbers depend. Files that cannot be read or written, or hold
anything but valid measurements, are ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moepack.pack.user_files import cache_path, read_own, write_whole

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from moepack.pack.reader import Bundle

    from .fixed import MeasuredNeeds
    from .options import Workload

FILES = 64  # the most files that are kept; the oldest are removed
LARGEST = 1 << 20  # the most bytes of a valid file
MOST = 1 << 50  # the largest valid number in a file


def measured(
    bundle: Bundle, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, workload: Workload
) -> tuple[MeasuredNeeds, int]:
    """Return the result of `fixed.measure`, from the cache if the same measurement is there.

    A model with code of its own (`auto_map`) is always measured: its code may change under the same name.
    """
    from .fixed import measure

    folder = cache_path("plans")
    if folder is None or getattr(config, "auto_map", None):
        return measure(bundle, config, dtype, device, workload)
    file = folder / f"{_key(bundle, config, dtype, device, workload)}.json"
    found = _read(file, workload)
    if found is None:
        found = measure(bundle, config, dtype, device, workload)
        _write(file, found)
    return found


def _key(bundle: Bundle, config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, workload: Workload) -> str:
    """Return the digest of everything on which measurements depend: model, workload, machine, programs."""
    import torch
    import transformers

    from .fixed import plain_config

    parts = (
        plain_config(config),
        getattr(config, "_attn_implementation", None),
        dtype,
        device.type,
        bundle.layers,
        bool(bundle.manifest.dense),
        asdict(workload),
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        sorted((k, v) for k, v in os.environ.items() if k.startswith(("MOEPACK_", "ATEN_", "ONEDNN_"))),
        (torch.__version__, transformers.__version__, sys.version),
        _sources(),
    )
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def _sources() -> list[tuple[str, int, int]]:
    """Return the name, size and time of every file of the runtime and the families, which tell more than a version."""
    from moepack import families

    folders = Path(__file__).resolve().parents[1], Path(families.__file__).resolve().parent
    found = [(p.name, p.stat()) for folder in folders for p in sorted(folder.rglob("*.py"))]
    return [(name, s.st_size, s.st_mtime_ns) for name, s in found]


def _read(file: Path, workload: Workload) -> tuple[MeasuredNeeds, int] | None:
    """Read a file's measurement; return `None` unless it is a regular file of this user with valid numbers."""
    from moepack.runtime.kv.sizes import KvShape

    from .fixed import Activations, MeasuredNeeds

    try:
        kept = json.loads(read_own(file, LARGEST))
        parts = tuple((_size(a), _size(b), None if c is None else _size(c)) for a, b, c in kept["kv"])
        passes, lengths = ((_size(a), _size(b)) for a, b in (kept["passes"], kept["lengths"]))
        a, b, c, d = (float(_size(x, float)) for x in kept["corners"])
        shape = Activations(passes, lengths, (a, b, c, d))
        activations, more, table = (_size(kept[name]) for name in ("activations", "kept", "embedding"))
        needs = MeasuredNeeds(workload, KvShape(parts), activations, shape, more, table)
        return needs, _size(kept["dense"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _size(value: Any, kind: type = int) -> Any:
    """Return `value` if it is a number of bytes or tokens; raise ValueError for anything else."""
    if type(value) not in (int, kind) or not math.isfinite(value) or not 0 <= value <= MOST:
        raise ValueError("not a size")
    return value


def _write(file: Path, found: tuple[MeasuredNeeds, int]) -> None:
    """Write a file atomically, and remove the oldest files beyond FILES. Errors of the file system are ignored."""
    needs, dense = found
    shape = needs.passes
    kept = {
        "kv": needs.kv.parts,
        "activations": needs.activations,
        "passes": shape.passes,
        "lengths": shape.lengths,
        "corners": shape.corners,
        "kept": needs.kept,
        "embedding": needs.embedding,
        "dense": dense,
    }
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(file, json.dumps(kept))
        by_age = sorted(file.parent.glob("*.json"), key=lambda p: p.stat().st_mtime)
        for old in by_age[:-FILES]:
            old.unlink(missing_ok=True)
