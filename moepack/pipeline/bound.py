"""A build's memory as numbers: the bytes that each step holds at once, and how a build keeps to a bound.

With a bound, activations and a layer's experts that do not fit go to the work directory's disk, and fewer windows go
through a layer at once. The quantisers' batches depend on the recipe alone, as a bundle's bytes do. A bound that is too
small is refused; the error names the least possible one. Everything is arithmetic on shapes, except two measurements:
the process's memory at its start and, without a bound, the available memory (for tasks at once and for reuse).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError
from moepack.runtime.planning.sizes import Size, in_unit
from moepack.runtime.store.host_limit import available_memory

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
LATER = 160 * MIB  # a process's growth after its start: libraries loaded on their first use, small objects
REUSED = 1.6  # factor on a forward's bytes where the next forward reuses its memory: the heap then has holes
MAPPED = 48 * MIB  # the most of a file of activations that is in memory at once, in addition to a batch of windows


@dataclass(frozen=True, slots=True)
class BuildNeeds:
    """The bytes that a build needs, by use. Numbers for a layer are those of the largest layer."""

    process: int  # the process before the first layer
    loading: int  # while a layer is read: the files' mapped pages and the tensors made of them
    layer: int  # a layer's weights while windows go through it, in the checkpoint's dtype and the computation's
    hidden: int  # the activations between two layers: hidden states
    seen: int  # what a layer's experts read: the inputs in its observation
    routing: int  # the chosen experts and their gates
    window: int  # one window's forward through a layer
    forward: int  # a forward's bytes that do not depend on the windows
    batches: tuple[tuple[int, int], ...]  # by layer: the most expert batches at once, and bytes of one
    row_shards: tuple[tuple[int, int], ...] = ()  # by part: the same for row shards; empty without dense versions
    outside: int = 0  # while the part outside the layers is read and computed with, MTP layers included
    waiting: int = 0  # a layer's weights while it is quantised, in the checkpoint's dtype
    dense: int = 0  # the moments of a part's dense matrices
    each: int = 0  # the activations of one window
    passed: int = 0  # what layers pass on beside hidden states; always in memory
    # The same numbers where a layer's experts are on disk; 0 where that is impossible.
    loading_on_disk: int = 0
    layer_on_disk: int = 0
    waiting_on_disk: int = 0
    mapped: int = 0  # the experts of one batch, read from disk
    experts: int = 0  # a layer's experts, on disk


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How a build fits into a bound on its memory."""

    batch_size: int  # windows that go through a layer together
    hidden_on_disk: bool = False  # whether `BuildNeeds.hidden` is on disk
    seen_on_disk: bool = False  # whether `BuildNeeds.seen` is
    batches: int = 0  # the most expert batches at once; 0 leaves the number to the executor
    row_shards: int = 0  # the same for row shards
    experts_on_disk: bool = False
    reuse: bool = field(default=False, compare=False)  # a forward takes the memory that the last one freed: faster

    @property
    def on_disk(self) -> str:
        """The activations and experts that the plan keeps on disk, in words; empty if none."""
        names = ["what goes into a layer"] * self.hidden_on_disk + ["what its experts see"] * self.seen_on_disk
        return ", ".join(names + ["the experts of a layer"] * self.experts_on_disk)


def steps(needs: BuildNeeds, how: MemoryPlan) -> dict[str, dict[str, int]]:
    """Return the bytes that each step of a build holds in memory: step -> use -> bytes."""
    mapped = MAPPED + how.batch_size * needs.each
    hidden = min(needs.hidden, mapped) if how.hidden_on_disk else needs.hidden
    seen = min(needs.seen, mapped) if how.seen_on_disk else needs.seen
    hidden += needs.passed
    always = {"process": needs.process, "activations": hidden}
    loading = needs.loading
    layer = needs.layer
    waiting = needs.waiting
    if how.experts_on_disk:
        loading = needs.loading_on_disk
        layer = needs.layer_on_disk
        waiting = needs.waiting_on_disk
    mapped_batch = needs.mapped * how.experts_on_disk
    tasks = [min(n, max(1, how.batches)) * (size + mapped_batch) for n, size in needs.batches]
    tasks += [min(n, max(1, how.row_shards)) * size for n, size in needs.row_shards]  # made before a layer's batches
    made = "expert batches or row shards" if needs.row_shards else "expert batches"
    saw = always | {"activations": hidden + seen + needs.routing}
    forward = int((needs.forward + how.batch_size * needs.window) * (REUSED if how.reuse else 1))
    return {
        "read a layer": always | {"layer": loading},
        "read what lies outside the layers": always | {"outside the layers": needs.outside},
        "calibrate": saw | {"layer": layer, "forward": forward, "dense moments": needs.dense},
        "quantise": saw | {"layer": waiting, made: max(tasks, default=0), "dense moments": needs.dense},
    }


def peak(needs: BuildNeeds, how: MemoryPlan) -> tuple[str, dict[str, int]]:
    """The step that takes the most memory, and its bytes by use."""
    step, parts = max(steps(needs, how).items(), key=lambda item: sum(item[1].values()))
    return step, {part: size for part, size in parts.items() if size}


def place(needs: BuildNeeds, batch_size: int, bound: int | None) -> MemoryPlan:
    """Plan a build in `bound` bytes, with a batch size as near to the recipe's `batch_size` as possible.

    Without a bound, everything stays in memory, and memory is reused where enough is available. With a bound, the first
    measures change no bit: the activations between layers go to disk, because quantising does not read them; next, the
    observations go to disk; next, fewer tasks run at once; next, a layer's experts go to disk, where each batch of
    windows reads them once. Last, batches get fewer windows; experts stay in memory if that costs no window. A larger
    bound never means fewer windows. In the remaining room more tasks run at once, and memory is reused.

    Raises:
        InputError: if the bound is too small; names the least bound that suffices.
    """
    batches, shards = (max((n for n, _ in tasks), default=1) for tasks in (needs.batches, needs.row_shards))
    plain = MemoryPlan(batch_size, batches=batches, row_shards=shards)
    reuses = needs.window > 0
    if bound is None:
        takes = sum(steps(needs, replace(plain, reuse=True))["calibrate"].values()) - (needs.process - LATER)
        return replace(plain, reuse=reuses and takes <= available_memory())

    def fits(how: MemoryPlan) -> bool:
        return sum(peak(needs, how)[1].values()) <= bound

    places = [plain, replace(plain, hidden_on_disk=True), replace(plain, hidden_on_disk=True, seen_on_disk=True)]
    for n in range(max(batches, shards) - 1, 0, -1):
        places.append(replace(places[-1], batches=min(batches, n), row_shards=min(shards, n)))
    last = places.pop()
    for b in range(batch_size, 0, -1):
        places.append(replace(last, batch_size=b))
        if needs.layer_on_disk:
            places.append(replace(last, batch_size=b, experts_on_disk=True))
    for how in filter(fits, places):
        how = next(filter(fits, (replace(how, batches=n) for n in range(batches, how.batches, -1))), how)
        how = next(filter(fits, (replace(how, row_shards=n) for n in range(shards, how.row_shards, -1))), how)
        return replace(how, reuse=reuses and fits(replace(how, reuse=True)))
    step, parts = min((peak(needs, how) for how in reversed(places)), key=lambda found: sum(found[1].values()))
    least = sum(parts.values())
    largest = max(parts, key=lambda part: parts[part])
    if isinstance(bound, Size) and bound.text:
        refusal = f"--memory {bound.text} cannot be kept: the least is {least} bytes, to {step} ({largest} "
        raise InputError(in_unit(f"{refusal}{parts[largest]} bytes)", bound))
    raise InputError(
        f"--memory {_size(bound)} cannot be kept: the least is {_size(least, up=True)}, to {step} "
        f"({largest} {_size(parts[largest])})"
    )


def workers(device: torch.device, need: int) -> int:
    """The number of tasks of `need` bytes to run at once. It changes no byte of the bundle.

    It is 1 on a GPU. On a CPU it is torch's number of threads, or fewer if half of the available memory holds fewer.
    """
    import torch

    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), available_memory() // 2 // need))


def _size(size: int, up: bool = False) -> str:
    return f"{-(-size // MIB) if up else size // MIB}MiB"
