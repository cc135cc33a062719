"""A bundle or a checkpoint by its name, as a transformers model, for commands that run one. Decides nothing else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from moepack.pack.errors import InputError
from moepack.pack.hub_name import on_hub
from moepack.pack.manifest import MANIFEST
from moepack.runtime.planning.sizes import DEVICE_MEMORY

DTYPES = ("auto", "float32", "bfloat16", "float16")


def locate(path: str | Path) -> tuple[str | Path, bool]:
    """A bundle or checkpoint by its directory or Hub id: where transformers finds it, and whether it is a bundle.

    Of a checkpoint on the Hub the directory it was downloaded to; a bundle there keeps its id, and is fetched when it
    is loaded.

    Raises:
        InputError: when it is neither a directory nor on the Hub, or a checkpoint that is not whole.
    """
    if Path(path).exists():
        return path, (Path(path) / MANIFEST).is_file()
    name = str(path)
    if on_hub(name, MANIFEST, "config.json") == MANIFEST:
        return name, True
    from moepack.calibrate.checkpoint import open_checkpoint

    return open_checkpoint(name).path, False


def load_model(
    path: str | Path,
    is_bundle: bool,
    policy: str | None,
    device: str,
    dtype: str,
    device_memory: int | None = None,
    dense: str | None = None,
    **workload: Any,
) -> Any:
    """A bundle, or a plain checkpoint, as a transformers model; `path` and `is_bundle` as `locate` gives them.

    `workload` goes on to `moepack.load`: what it holds back in a budget, and who is told of progress.
    """
    import torch

    from moepack.calibrate.stream import quiet_transformers
    from moepack.runtime.load import from_pretrained, load

    wanted: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    if is_bundle:
        with quiet_transformers():
            return load(path, device, device_memory, policy, wanted, dense=dense, **workload)
    if workload.get("max_tpot") is not None:
        raise InputError(f"{path}: not a bundle: a bound on a token needs one")
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.families.model_class import auto_class

    opened = open_checkpoint(path)
    with quiet_transformers():
        return from_pretrained(auto_class(opened.config), opened.path, dtype=wanted, device_map=device)


def check(
    path: str | Path,
    is_bundle: bool,
    policy: str | None,
    device: str,
    dtype: str,
    device_memory: int | None,
    dense: str | None = None,
) -> None:
    """See that what was asked for can be done, before anything is loaded.

    Raises:
        InputError: when it cannot.
    """
    from moepack.pack.reader import open_bundle
    from moepack.runtime.dense.choice import choose_dense
    from moepack.runtime.load import check_device
    from moepack.runtime.planning.choice import check_policy
    from moepack.runtime.planning.config import check_config, read_config

    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is unknown: {', '.join(DTYPES)}")
    check_device(device)
    if not is_bundle and (policy, device_memory, dense) != (None, None, None):
        raise InputError(f"{path}: not a bundle: a policy, dense versions and a memory budget need one")
    if is_bundle and Path(path).is_dir():
        bundle = open_bundle(path)
        bundle.check()  # before transformers reads them
        choose_dense(dense, bundle, policy)
        if policy is not None:
            check_policy(policy, bundle, device_memory is not None or bool(os.environ.get(DEVICE_MEMORY)))
        read_config(path, bundle.manifest)
    else:
        check_config(path)


def read_template(file: Path | None) -> str | None:
    """A chat template from its file.

    Raises:
        InputError: when it cannot be read.
    """
    try:
        return None if file is None else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
