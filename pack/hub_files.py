"""Download files of a Hub repository, several at a time, with one progress bar. Interrupting does not wait for them.

The repository is never listed: it may hold any number of other files. hub_name.py says why this is in pack/.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from .hub_errors import patiently

WORKERS = 8


def fetch_files(
    repo: str,
    sizes: Mapping[str, int],
    commit: str,
    each: Callable[[str], object] = lambda name: None,
    **options: Any,
) -> None:
    """Download files of a commit, and continue partial downloads.

    `sizes` maps names to bytes for the bar, `each` is called with the name of each finished file, and `options` are for
    `huggingface_hub.hf_hub_download`.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    if not sizes:
        return
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()
    stopped = threading.Event()
    for name in sizes:
        todo.put(name)
    counted: dict[str, object] = {"total": sum(sizes.values()), "unit": "B", "unit_scale": True}
    with tqdm(desc=f"{len(sizes)} files of {repo}", **counted) as bar:  # type: ignore[no-untyped-call]

        def work() -> None:
            while not stopped.is_set():
                try:
                    name = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    part = _part_of(bar.update, stopped)
                    download = functools.partial(hf_hub_download, revision=commit, tqdm_class=part, **options)
                    patiently(functools.partial(download, repo, name))
                    done.put((name, None))
                except BaseException as error:
                    done.put((name, error))

        for _ in range(min(WORKERS, len(sizes))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in sizes:
                name, error = done.get()
                if error is not None:
                    raise error
                each(name)
        finally:
            stopped.set()


def _part_of(advance: Callable[[float | None], object], stopped: threading.Event) -> type:
    """A progress bar class for huggingface_hub: each file's bar advances the one shared by all, until `stopped`."""

    class Part:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self.update(initial)

        def __enter__(self) -> Part:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def update(self, n: float | None = 1) -> None:
            if not stopped.is_set():
                advance(n)

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    return Part
