"""Download files of a Hub repository, several at a time, and count their bytes. Interrupting does not wait for them.

The repository is never listed: it may hold any number of other files. hub_name.py says why this is in pack/.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from .hub_errors import patiently

WORKERS = 8


def fetch_files(
    repo: str,
    names: Sequence[str],
    commit: str,
    advance: Callable[[int], object] = lambda count: None,
    **options: Any,
) -> None:
    """Download files of a commit, and continue partial downloads.

    `advance` is called with the bytes that have arrived since its last call, also of earlier downloads. Any thread may
    call it. `options` are for `huggingface_hub.hf_hub_download`.
    """
    from huggingface_hub import hf_hub_download

    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    stopped = threading.Event()
    for name in names:
        todo.put(name)

    def work() -> None:
        while not stopped.is_set():
            try:
                name = todo.get_nowait()
            except queue.Empty:
                return
            try:
                part = _part_of(advance, stopped)
                download = functools.partial(hf_hub_download, revision=commit, tqdm_class=part, **options)
                patiently(functools.partial(download, repo, name))
                done.put(None)
            except BaseException as error:
                done.put(error)

    for _ in range(min(WORKERS, len(names))):
        threading.Thread(target=work, daemon=True).start()
    try:
        for _ in names:
            if (error := done.get()) is not None:
                raise error
    finally:
        stopped.set()


def _part_of(advance: Callable[[int], object], stopped: threading.Event) -> type:
    """A progress bar class for one file's downloads by huggingface_hub: it calls `advance` until `stopped`.

    A download that is tried again begins with the bytes that have been counted.
    """
    counted = 0

    class Part:
        def __init__(self, *_: object, initial: int = 0, **__: object) -> None:
            self._at = 0
            self.update(initial)

        def __enter__(self) -> Part:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def update(self, n: float | None = 1) -> None:
            nonlocal counted
            self._at += int(n or 0)
            if self._at > counted and not stopped.is_set():
                advance(self._at - counted)
                counted = self._at

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    return Part
