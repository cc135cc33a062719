"""What plans measure and keep in the user's cache, so that a second plan imports neither torch nor transformers.

Importing them, and building and running a skeleton, takes most of a plan's time. Only plans read the cache; loading
always measures. Keys have everything on which numbers depend: model, workload, machine, programs.
"""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from moepack.pack.manifest import CONFIG
from moepack.pack.processors import processors
from moepack.pack.reader import Bundle
from moepack.pack.spec import Version
from moepack.pack.trials import processor
from moepack.pack.user_files import remembered

from .fixed import Activations, KvShape, MeasuredNeeds, ModelSizes, described
from .options import LoadOptions, Workload

MOST = 1 << 50  # the largest valid number
DAY = 86_400.0  # seconds for which a rate is kept: another program may have slowed the machine
VARIABLES = ("MOEPACK_", "ATEN_", "ONEDNN_", "OMP_", "MKL_")  # settings on which torch's threads and kernels depend


def model_sizes(bundle: Bundle, options: LoadOptions, dense: Sequence[Version]) -> ModelSizes:
    """Return what a plan takes from the bundle's model, from the cache if the same was measured before.

    `dense` are the versions of its dense matrices. A model with code of its own (`auto_map`) is always measured: its
    code may change under the same name.

    Raises:
        InputError: for a configuration that transformers rejects, and as `measure.measure`.
    """
    workload = options.workload
    make = partial(_measure, bundle, options, dense)
    if b"auto_map" in (bundle.path / CONFIG).read_bytes():
        return make()
    manifest = bundle.manifest
    model = manifest.files[CONFIG].sha256, dict(manifest.model), described(bundle), dense
    device = options.device.partition(":")[0]
    key = model, device, str(options.dtype), asdict(workload), threads(), _here()
    return remembered("plans", key, partial(_read, workload), make)


def threads() -> int:
    """Return the number of threads on which torch computes."""
    if "torch" in sys.modules:
        return _torch_threads()
    found: int = remembered("threads", _here(), _size, _torch_threads)
    return found


def rate(what: object, measure: Callable[[], float | None]) -> float | None:
    """Return a rate of this machine, as it was measured in the last day; `what` names it."""
    return remembered("rates", (what, threads(), _here()), _rate, measure, DAY)


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _here() -> tuple[object, ...]:
    """Return what tells this machine, its settings and its programs apart from others."""
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(VARIABLES))
    versions = version("torch"), version("transformers"), sys.version
    return platform.node(), processor(), processors(), variables, versions, _sources()


def _sources() -> list[tuple[str, int, int]]:
    """Return the name, size and time of every file of the runtime and the families, which tell more than a version."""
    from moepack import families

    folders = Path(__file__).resolve().parents[1], Path(families.__file__).resolve().parent
    files = [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in (".py", ".so")]
    found = [(p.name, p.stat()) for p in files]
    return [(name, s.st_size, s.st_mtime_ns) for name, s in found]


def _measure(bundle: Bundle, options: LoadOptions, dense: Sequence[Version]) -> ModelSizes:
    import torch

    from moepack.families.model_class import top_k

    from .config import longest_context
    from .measure import measure
    from .token_cost import looked_up

    config = served_config(bundle, options)
    needs = measure(bundle, config, config.dtype, torch.device(options.device), options.workload, dense)
    return ModelSizes(needs, looked_up(config), top_k(config), longest_context(config) or 0)


def served_config(bundle: Bundle, options: LoadOptions) -> Any:
    """Return the configuration of the model that is served, whose `dtype` is that of its dense tensors."""
    import torch

    from .config import read_config

    config: Any = read_config(bundle.path, bundle.manifest)
    asked = options.torch_dtype
    config.dtype = (config.dtype or torch.float32) if asked == "auto" else asked
    return config


def _read(workload: Workload, kept: Any) -> ModelSizes:
    """Return what a document holds. Raises ValueError, TypeError or KeyError unless it holds valid numbers."""
    needs = kept["needs"]
    shape = needs["passes"]
    parts = tuple((_size(a), _size(b), None if c is None else _size(c)) for a, b, c in needs["kv"]["parts"])
    passes, lengths = ((_size(a), _size(b)) for a, b in (shape["passes"], shape["lengths"]))
    a, b, c, d = (float(_size(x, float)) for x in shape["corners"])
    activations, *others = (_size(needs[name]) for name in ("activations", "kept", "embedding", "dense"))
    found = MeasuredNeeds(workload, KvShape(parts), activations, Activations(passes, lengths, (a, b, c, d)), *others)
    return ModelSizes(found, *(_size(kept[name]) for name in ("looked_up", "top_k", "context")))


def _rate(value: Any) -> float | None:
    return None if value is None else float(_size(value, float))


def _size(value: Any, kind: type = int) -> Any:
    """Return `value` if it is a number of bytes or tokens, or a rate; raise ValueError for anything else."""
    if type(value) not in (int, kind) or not math.isfinite(value) or not 0 <= value <= MOST:
        raise ValueError("not a size")
    return value
