"""The host's store for a GPU: extents in pinned memory, filled in the background while the model is served.

Regions become usable one after another. A fetch never waits for the filling: it reads the file through staging buffers
(devices/cuda.py) while an extent's region is not filled, or if the extent does not fit or is damaged.

A region is one CUDA registration: a layer file's extents, or some of them. A region per expert would be too many (a
large model has some 30,000 extents, and drivers keep a table for each); a single region fails above 100 to 500 GiB.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import BundleError
from moepack.pack.spec import expert_file

from .cudart import CudaError, Cudart
from .files import BackingStore, Cancelled, Stored
from .filling import PinnedFiller
from .pinning import Chain, Mode, Pinned
from .read_ahead import Place, readers

log = logging.getLogger("moepack.runtime")
PIECE = 64 << 20  # the most bytes of a region, unless one extent is larger: CUDA's locks are held for 0.1 s a GB
GIVE_WAY = 0.02  # the most seconds that a chunk of the filling waits for fetches that read the same disk
File = tuple[str, int]  # version, layer position


@dataclass(slots=True, eq=False)
class _Region:
    """One registration: pinned memory, and (begin, size) of each extent in it. The store's lock guards it."""

    pinned: Pinned
    at: dict[Place, tuple[int, int]]
    users: int = 0


@dataclass(slots=True)
class Held:
    """A pinned extent that is the source of a copy under way, and stays pinned until `release`."""

    bytes: Tensor  # uint8 [size], pinned
    # Whether these are a file's own pages, which the host must not read: a truncated file would raise a signal
    mapped: bool
    _let_go: Callable[[], None]

    def release(self) -> None:
        """End the use of the extent. Call this once."""
        self.bytes = torch.empty(0)  # a view would keep the memory
        self._let_go()


class HostStore:
    """Extents in pinned memory. Every method may be called from any thread."""

    def __init__(
        self,
        store: BackingStore,
        versions: Sequence[str],
        calls: Cudart,
        limit: int,
        piece: int = PIECE,
    ) -> None:
        """Prepare to pin up to `limit` bytes of `versions`, given most important first, in regions of `piece` bytes."""
        self._store = store
        self._versions = tuple(versions)
        self._limit = limit
        self._piece = piece
        self._chain = Chain(calls)
        self._filler = PinnedFiller(calls, self._chain, readers(), self._give_way, self._one_more, self._note)
        self._lock = threading.Lock()
        self._regions: dict[Place, _Region] = {}
        self._damaged: dict[str, str] = {}
        # `filled`: the filling has ended
        self._closing = threading.Event()
        self.filled = threading.Event()
        self._fetching = 0
        self._every = self._total = self._done = 0
        self._began = self._ended = 0.0
        self._thread = threading.Thread(target=self._run, name="moepack-host", daemon=True)

    # --- fetches

    def hold(self, place: Place) -> Held | None:
        """Return a pinned extent, or `None` if the file must be read. Never waits for the filling."""
        with self._lock:
            region = self._regions.get(place)
            if region is None:
                return None
            region.users += 1
            begin, size = region.at[place]
            bytes_ = region.pinned.bytes[begin : begin + size]
        return Held(torch.from_numpy(bytes_), region.pinned.mode is Mode.MAPPED, lambda: self._let_go(region))

    def _let_go(self, region: _Region) -> None:
        with self._lock:
            region.users -= 1

    @contextlib.contextmanager
    def fetching(self) -> Iterator[None]:
        """Mark that a fetch reads a file inside the context: the filling then pauses briefly before each chunk."""
        with self._lock:
            self._fetching += 1
        try:
            yield
        finally:
            with self._lock:
                self._fetching -= 1

    # --- filling

    def start(self) -> None:
        """Begin to fill pinned memory in the background."""
        self._began = time.monotonic()
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fill_all()
        except Cancelled:
            pass
        except Exception:  # serving continues from the files
            log.exception("filling host memory has stopped")
        self._ended = time.monotonic()
        self.filled.set()
        if not self._closing.is_set():
            self._say()

    def _fill_all(self) -> None:
        sizes = self._sizes()
        tokens = [layer.tokens.tolist() for layer in self._store.bundle.calibration().layers]
        wanted = {file: tokens[file[1]] for file in sizes}  # tokens routed to each expert in calibration
        self._every = sum(sum(of.values()) for of in sizes.values())
        pieces: list[Piece] | None = None
        while self._chain.mode is not Mode.STAGED:
            mode = self._chain.mode
            if pieces is None:
                left = {f: {e: n for e, n in of.items() if (*f, e) not in self._regions} for f, of in sizes.items()}
                room = self._limit - sum(len(region.pinned.bytes) for region in set(self._regions.values()))
                pieces = plan_pieces(left, wanted, room, mode is Mode.MAPPED, self._piece)
                self._total = self._done + sum(p.size for p in pieces)
            if not pieces:
                return
            self._fill(pieces.pop(0))
            if mode is Mode.MAPPED and self._chain.mode is not mode:
                pieces = None  # gathered extents allow a better choice

    def _sizes(self) -> dict[File, dict[int, int]]:
        out: dict[File, dict[int, int]] = {}
        for version in self._versions:
            for position, layer in enumerate(self._store.bundle.layers):
                try:
                    file = self._store.bundle.layer_file(version, position)
                except BundleError as error:
                    self._note(str(error), f"all of {expert_file(version, layer.index)}")
                else:
                    out[version, position] = {e: file.extent_size(e) for e in range(layer.experts)}
        return out

    def _fill(self, piece: Piece) -> None:
        """Fill and pin one region. If that fails, the chain goes on to its next mode."""
        try:
            extents = [self._store.stored(*piece.file, e) for e in piece.experts]
        except BundleError as error:
            self._note(str(error), f"{piece.file[0]}, layer position {piece.file[1]}")
            return
        good, pinned = self._filler.pin(extents)
        if pinned is None:
            return
        at = {}
        begin = 0
        for i, stored in enumerate(extents):
            if i in good:
                at[stored.place] = begin, stored.size
            begin += stored.size
        if not at:
            pinned.close()
            return
        with self._lock:
            self._regions.update(dict.fromkeys(at, _Region(pinned, at)))

    def _give_way(self, size: int) -> None:
        until = time.monotonic() + GIVE_WAY
        while self._fetching and time.monotonic() < until and not self._closing.is_set():
            time.sleep(0.001)
        if self._closing.is_set():
            raise Cancelled

    def _one_more(self, stored: Stored) -> None:
        with self._lock:
            self._done += stored.size

    def _note(self, message: str, where: str) -> None:
        self._damaged[where] = message
        log.warning("not kept on the host: %s", message)

    # --- seeing

    def state(self) -> dict[str, Any]:
        """Return the state of the store, ready for JSON.

        `mode` is the way in use. `pinned_bytes` are usable, `bytes_to_go` will be read, and `file_bytes` stay in files
        because they do not fit or are damaged. `fallbacks` are the ways given up, with reasons. `damaged` lists places.
        """
        with self._lock:
            mode = self._chain.mode
            if mode is Mode.STAGED and self._regions:  # the way of those that are pinned
                mode = list(self._regions.values())[-1].pinned.mode
            usable = sum(region.at[place][1] for place, region in self._regions.items())
            to_go = 0 if self.filled.is_set() else max(0, self._total - self._done)
            seconds = (self._ended or time.monotonic()) - self._began if self._began else 0.0
            return {
                "mode": mode.value,
                "filling": bool(self._began) and not self.filled.is_set(),
                "pinned_bytes": usable,
                "bytes_to_go": to_go,
                "file_bytes": max(0, self._every - usable - to_go),
                "limit_bytes": self._limit,
                "read_bytes": self._done,
                "seconds": seconds,
                "bytes_per_second": self._done / seconds if seconds else 0.0,
                "fallbacks": [{"mode": mode.value, "reason": reason} for mode, reason in self._chain.reasons],
                "damaged": sorted(self._damaged),
            }

    def _say(self) -> None:
        state = self.state()
        gave_up = "".join(f"; not {x['mode']}: {x['reason']}" for x in state["fallbacks"])
        log.info(
            "host memory: %s, %d bytes pinned, %d in files, %.2f s at %.2f GB/s%s",
            state["mode"],
            state["pinned_bytes"],
            state["file_bytes"],
            state["seconds"],
            state["bytes_per_second"] / 1e9,
            gave_up,
        )

    def close(self) -> None:
        """Stop filling and free the regions of which no extent is held. May be called twice."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        for region in set(self._regions.values()):
            with self._lock:
                if region.users:
                    continue
                for place in region.at:
                    del self._regions[place]
            try:
                region.pinned.close()
            except CudaError as error:
                log.warning("host memory was not let go: %s", error)


@dataclass(frozen=True, slots=True)
class Piece:
    """The plan of a region: some experts of one layer file, in the region's order, and the bytes of their extents."""

    file: File
    experts: tuple[int, ...]
    size: int


def plan_pieces(
    sizes: Mapping[File, Mapping[int, int]],
    wanted: Mapping[File, Sequence[float]],
    limit: int,
    in_place: bool,
    most: int = PIECE,
) -> list[Piece]:
    """Return the regions to pin, in order: the most wanted region of every file, then the second of every file, etc.

    `sizes` are the bytes of every extent by file and expert, files in the order of versions and layers. `wanted` is the
    traffic of each expert. All regions together take at most `limit` bytes, each at most `most`. With `in_place`
    regions are parts of the files, with extents in expert order; otherwise extents are gathered, most wanted first.
    """
    rounds: list[tuple[int, Piece]] = []
    kept = None if in_place else _most_wanted(sizes, wanted, limit)
    for file, of in sizes.items():
        order = sorted(of)
        if kept is not None:
            order = sorted((e for e in order if (file, e) in kept), key=lambda e: (-wanted[file][e], e))
        pieces = _cut(file, order, of, most)
        if in_place:
            pieces.sort(key=lambda p: (-sum(wanted[p.file][e] for e in p.experts) / p.size, p.experts))
        rounds.extend(enumerate(pieces))
    out = []
    left = limit
    for _, piece in sorted(rounds, key=lambda r: r[0]):  # stable: in the order of files within a round
        if piece.size <= left:
            out.append(piece)
            left -= piece.size
    return out


def _most_wanted(
    sizes: Mapping[File, Mapping[int, int]], wanted: Mapping[File, Sequence[float]], limit: int
) -> set[tuple[File, int]]:
    every = [
        (-wanted[file][e] / size, i, file, e, size)
        for i, (file, of) in enumerate(sizes.items())
        for e, size in of.items()
    ]
    kept = set()
    for _, _, file, e, size in sorted(every):
        if size <= limit:
            kept.add((file, e))
            limit -= size
    return kept


def _cut(file: File, order: Sequence[int], sizes: Mapping[int, int], most: int) -> list[Piece]:
    runs: list[list[int]] = []
    for e in order:
        if not runs or sum(sizes[x] for x in runs[-1]) + sizes[e] > most:
            runs.append([])
        runs[-1].append(e)
    return [Piece(file, tuple(run), sum(sizes[x] for x in run)) for run in runs]
