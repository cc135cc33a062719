"""Find a bundle or checkpoint by its name, check the options for it, and load it for a command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from moepack.pack.errors import InputError
from moepack.pack.hub_name import on_hub
from moepack.pack.manifest import MANIFEST
from moepack.runtime.planning.options import LoadOptions

from .progress import Reporter


class Source(NamedTuple):
    """A model's directory, or the Hub id of a bundle, which is downloaded while the bundle is loaded."""

    path: str | Path
    is_bundle: bool


def locate(path: str | Path) -> Source:
    """Find a bundle or checkpoint by its directory or Hub id. A checkpoint on the Hub is downloaded.

    Raises:
        InputError: if `path` is neither a directory nor on the Hub, or the checkpoint is incomplete.
    """
    if Path(path).exists():
        is_bundle = (Path(path) / MANIFEST).is_file()
        if not is_bundle:
            from moepack.calibrate.checkpoint import check_kind

            check_kind(path)
        return Source(path, is_bundle)
    name = str(path)
    if on_hub(name, MANIFEST, "config.json") == MANIFEST:
        return Source(name, True)
    from moepack.calibrate.checkpoint import open_checkpoint

    return Source(open_checkpoint(name).path, False)


def check(source: Source, options: LoadOptions) -> None:
    """Raise InputError unless the options fit the model. Loads no model, and mostly does not import torch."""
    path, is_bundle = source
    if not is_bundle and (options.policy, options.dense, options.in_budget) != (None, None, False):
        raise InputError(f"{path}: not a bundle: a policy, dense versions and a memory budget need one")
    if not is_bundle and options.max_tpot is not None:
        raise InputError(f"--max-tpot needs a bundle, and {path} is not one")
    from moepack.pack.reader import open_bundle
    from moepack.runtime.load import check_bundle, check_device
    from moepack.runtime.planning.config import check_config, read_config

    if is_bundle and Path(path).is_dir():
        check_bundle(path, options)
        check_device(options.device)
        read_config(path, open_bundle(path).manifest)
        return
    if is_bundle:
        options.with_environment().parsed_policy()
    check_device(options.device)
    check_config(path)


def load_model(source: Source, options: LoadOptions, progress: Callable[[int, int], None] | None = None) -> Any:
    """Load a bundle or a plain checkpoint as a transformers model. `progress` is as in `moepack.load`."""
    from moepack.calibrate.stream import quiet_transformers
    from moepack.runtime.load import from_pretrained, load_bundle

    with quiet_transformers():
        if source.is_bundle:
            return load_bundle(source.path, options, progress)
        from moepack.calibrate.checkpoint import open_checkpoint
        from moepack.families.model_class import auto_class

        opened = open_checkpoint(source.path)
        kind = auto_class(opened.config)
        return from_pretrained(kind, opened.path, dtype=options.torch_dtype, device_map=options.device)


def load_shown(source: Source, options: LoadOptions, reporter: Reporter) -> Any:
    """Load as `load_model` does, as a stage that a reporter shows."""
    reporter.stage("load", 1)
    reporter.step(Path(source.path).name)
    fetched = not Path(source.path).exists()
    with reporter.hub_bars() if fetched else contextlib.nullcontext():
        return load_model(source, options, reporter.bytes)


def read_template(file: Path | None) -> str | None:
    """Read a chat template from `file`; None without a file. Raises InputError if it cannot be read."""
    try:
        return None if file is None else file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
