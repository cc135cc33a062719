"""Make a profile of a user's own texts: run the bundle over them and count what its routers choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from moepack.pack.errors import InputError, TargetError
from moepack.runtime.planning.options import DEFAULTS, LoadOptions
from moepack.runtime.profile import check_writable, write_profile
from moepack.shared.opening import check, load_shown, locate
from moepack.shared.progress import SILENT, Reporter


@dataclass(frozen=True, slots=True)
class Profiled:
    """The number of tokens counted, and how unevenly they were routed."""

    tokens: int
    busiest: float  # share of the routers' choices that went to the busiest tenth of each layer's experts


def make_profile(
    path: str | Path,
    data: Sequence[str],
    output: Path,
    options: LoadOptions = DEFAULTS,
    length: int = 512,
    samples: int = 256,
    reporter: Reporter = SILENT,
) -> Profiled:
    """Write the profile of these texts, in windows of `length` tokens, at most `samples` a file.

    Raises:
        InputError: if `path` is no bundle, or a text has no full window.
        TargetError: if the profile cannot be written.
    """
    from moepack.calibrate.text.documents import check_source

    from .evaluate import fitting, text_windows

    source = locate(path)
    if not source.is_bundle:
        raise InputError(f"{path}: not a bundle: it has no manifest.json")
    check_writable(output)
    for name in data:
        check_source(name)  # before torch is imported
    check(source, options)
    length = fitting(source.path, length, reporter)
    options = options.filled(prefill_tokens=length, all_logits=False, batch=1)
    with reporter.hub_bars():
        pools = text_windows(source, data, length, samples)
    model = load_shown(source, options, reporter)

    import torch

    with model.moepack as serving, torch.inference_mode():
        serving.routed()  # counts from now on
        reporter.stage("count", len(pools))
        for name, (pool, _) in pools:
            reporter.step(Path(name).name)
            reporter.inner("tokens", sum(len(window) for window in pool))
            for window in pool:
                model(input_ids=window[None], use_cache=False, logits_to_keep=1)
                reporter.advance(len(window))
        counts = serving.routed()
        try:
            write_profile(output, serving.bundle, counts)
        except OSError as error:
            raise TargetError(f"{output}: cannot be written: {error.strerror}") from None
    tokens = sum(len(window) for _, (pool, _) in pools for window in pool)
    first = sum(sum(sorted(row, reverse=True)[: max(1, len(row) // 10)]) for row in counts)
    return Profiled(tokens, first / max(1, sum(map(sum, counts))))
