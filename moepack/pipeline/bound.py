"""A build's memory as numbers: what each of its steps has in memory at once, and how a bound on it is kept.

With a bound, activations and the experts of a layer go to the work directory's disk where they do not fit, and a layer
is calibrated on fewer windows at a time; the quantisers' batches follow from the recipe alone, because a bundle's bytes
do. A bound that nothing of this keeps is refused, with the least that can be kept. All of it is arithmetic on shapes:
what is measured is what the process takes before it begins and, without a bound, how much memory is available for
pieces made at once and for reuse.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from moepack.memory import resident_memory
from moepack.pack.errors import InputError
from moepack.runtime.store.host_limit import available_memory

from .dense_slice import dense_tasks
from .expert_batch import batch_settings
from .recipe import Recipe

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.spec import DenseMatrix

MIB = 1 << 20
LATER = 160 * MIB  # what a process takes beyond its start: libraries that are loaded on their first use, small objects
REUSED = 1.6  # times what a forward takes, where the next one is to take what it frees: the heap has holes then
MAPPED = 48 * MIB  # of activations in a file, the most in memory at once beside a batch of windows


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes by part; those of a layer are of the one that takes most.

    Attributes:
        process: of the process itself, before the first layer.
        loading: while a layer is read: the files' mapped pages and what is made of them.
        outside: while what lies outside the layers is read and computed with, layers for MTP among it.
        layer: a layer while windows go through it: as it is in the checkpoint, and as it is computed with.
        waiting: a layer while it is quantised, as it is in the checkpoint.
        loading_on_disk, layer_on_disk, waiting_on_disk: the same where the experts of a layer lie on disk; 0 where none
            can.
        mapped: the experts of one batch, which are read from there.
        experts: of a layer's experts, what lies on disk then.
        hidden: what goes into the next layer.
        seen: what a layer's experts saw.
        routing: which experts were chosen, and their gates.
        window: one window's forward through a layer.
        forward: what a forward takes whatever the windows.
        batches: by layer, how many expert batches are made at once at the most, and bytes of one.
        slices: the same of slices of dense matrices, by part; empty where none get versions.
        dense: the moments of a part's dense matrices.
        each: the activations of one window.
    """

    process: int
    loading: int
    layer: int
    hidden: int
    seen: int
    routing: int
    window: int
    forward: int
    batches: tuple[tuple[int, int], ...]
    slices: tuple[tuple[int, int], ...] = ()
    outside: int = 0
    waiting: int = 0
    dense: int = 0
    each: int = 0
    loading_on_disk: int = 0
    layer_on_disk: int = 0
    waiting_on_disk: int = 0
    mapped: int = 0
    experts: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """How a build is fitted into a bound: windows of a batch, what lies on disk, and how many expert batches, or
    slices of dense matrices, are made at once at the most; 0 leaves that to whoever makes them. With `reuse` a forward
    takes the memory that the one before freed, which saves time."""

    batch_size: int
    hidden_on_disk: bool = False
    seen_on_disk: bool = False
    batches: int = 0
    slices: int = 0
    experts_on_disk: bool = False
    reuse: bool = field(default=False, compare=False)

    @property
    def on_disk(self) -> str:
        """What lies there, in words; empty where nothing does."""
        names = ["what goes into a layer"] * self.hidden_on_disk + ["what its experts see"] * self.seen_on_disk
        return ", ".join(names + ["the experts of a layer"] * self.experts_on_disk)


def steps(needs: Needs, how: Placement) -> dict[str, dict[str, int]]:
    """Step -> what is in memory in it by part, in bytes."""
    mapped = MAPPED + how.batch_size * needs.each
    hidden = min(needs.hidden, mapped) if how.hidden_on_disk else needs.hidden
    seen = min(needs.seen, mapped) if how.seen_on_disk else needs.seen
    always = {"process": needs.process, "activations": hidden}
    loading, layer, waiting = needs.loading, needs.layer, needs.waiting
    if how.experts_on_disk:
        loading, layer, waiting = needs.loading_on_disk, needs.layer_on_disk, needs.waiting_on_disk
    mapped_batch = needs.mapped * how.experts_on_disk
    pieces = [min(n, max(1, how.batches)) * (size + mapped_batch) for n, size in needs.batches]
    pieces += [min(n, max(1, how.slices)) * size for n, size in needs.slices]  # made before a layer's batches
    made = "expert batches or slices" if needs.slices else "expert batches"
    saw = always | {"activations": hidden + seen + needs.routing}
    forward = int((needs.forward + how.batch_size * needs.window) * (REUSED if how.reuse else 1))
    return {
        "read a layer": always | {"layer": loading},
        "read what lies outside the layers": always | {"outside the layers": needs.outside},
        "calibrate": saw | {"layer": layer, "forward": forward, "dense moments": needs.dense},
        "quantise": saw | {"layer": waiting, made: max(pieces, default=0), "dense moments": needs.dense},
    }


def peak(needs: Needs, how: Placement) -> tuple[str, dict[str, int]]:
    """The step that takes most, and its parts."""
    step, parts = max(steps(needs, how).items(), key=lambda item: sum(item[1].values()))
    return step, {part: size for part, size in parts.items() if size}


def place(needs: Needs, batch_size: int, bound: int | None) -> Placement:
    """How a build is done in `bound` bytes, as a recipe of `batch_size` has it as far as that goes.

    Without a bound, everything is in memory, which is reused where enough of it is available. With one, what goes to
    disk first is what changes no bit: what goes into the next layer, which nobody reads while experts are quantised,
    then what experts saw. Then fewer pieces are made at once, then the experts of a layer go to disk, which each batch
    of windows reads once from there. Last, batches of windows shrink, with the experts in memory where that holds as
    many: never to fewer in a larger bound. In what room is left then, more pieces are made at once, and memory is
    reused.

    Raises:
        InputError: with the least that would do.
    """
    batches, slices = (max((n for n, _ in pieces), default=1) for pieces in (needs.batches, needs.slices))
    plain = Placement(batch_size, batches=batches, slices=slices)
    reuses = needs.window > 0
    if bound is None:
        takes = sum(steps(needs, replace(plain, reuse=True))["calibrate"].values()) - (needs.process - LATER)
        return replace(plain, reuse=reuses and takes <= available_memory())

    def fits(how: Placement) -> bool:
        return sum(peak(needs, how)[1].values()) <= bound

    places = [plain, replace(plain, hidden_on_disk=True), replace(plain, hidden_on_disk=True, seen_on_disk=True)]
    for n in range(max(batches, slices) - 1, 0, -1):
        places.append(replace(places[-1], batches=min(batches, n), slices=min(slices, n)))
    last = places.pop()
    for b in range(batch_size, 0, -1):
        places.append(replace(last, batch_size=b))
        if needs.layer_on_disk:
            places.append(replace(last, batch_size=b, experts_on_disk=True))
    for how in filter(fits, places):
        more = (replace(how, batches=n) for n in range(batches, how.batches, -1))
        how = next(filter(fits, more), how)
        more = (replace(how, slices=n) for n in range(slices, how.slices, -1))
        how = next(filter(fits, more), how)
        return replace(how, reuse=reuses and fits(replace(how, reuse=True)))
    step, parts = min((peak(needs, how) for how in reversed(places)), key=lambda found: sum(found[1].values()))
    least = sum(parts.values())
    largest = max(parts, key=lambda part: parts[part])
    raise InputError(
        f"--memory {_size(bound)} cannot be kept: the least is {_size(least, up=True)}, to {step} "
        f"({largest} {_size(parts[largest])})"
    )


def needs_of(
    stream: StreamedModel,
    recipe: Recipe,
    windows: int,
    length: int,
    dense: dict[int | None, list[DenseMatrix]],
    process: int | None = None,
    bounded: bool = False,
) -> Needs:
    """The needs of a build, before any of its work.

    Args:
        stream: the model's skeleton.
        recipe: what is wanted.
        windows: that the model is calibrated on.
        length: tokens of one.
        dense: by part, the matrices that get versions.
        process: bytes of the process before its first layer; those it takes now, without.
        bounded: whether they are to be kept to: then pieces at once are counted as if all memory were available, which
            other programs may give back meanwhile.
    """
    import torch

    from moepack.calibrate.widened import widened_bytes
    from moepack.quantize.batch_memory import batch_memory
    from moepack.quantize.expert_batch import expert_batches

    dtype: torch.dtype = getattr(torch, recipe.calibration.dtype)
    config = stream.model.config.get_text_config()
    on_cpu = stream.device.type == "cpu"
    settings = batch_settings(recipe)
    parts = {part: stream.part_bytes(part) for part in (None, *range(len(stream.layers)))}
    outside = parts.pop(None)
    only_dense = not recipe.versions  # then no expert is read, where a layer's dense tensors are to be had alone
    apart = {part for part in parts if only_dense and stream.dense_apart(part)}
    parts = {part: size - (stream.file_bytes(part) if part in apart else 0) for part, size in parts.items()}
    if None in dense:  # what lies behind the last layer is calibrated and quantised like one
        parts[None] = outside
    largest = max(parts.values())
    kept_as = stream.loaded_dtype

    def with_copy(size: int) -> int:
        """So many bytes as the checkpoint has them, and the same in the dtype that is computed with."""
        return size if kept_as == dtype else size + size // kept_as.itemsize * dtype.itemsize

    in_file = {part: 0 if part in apart else stream.file_bytes(part) for part in parts}
    filed, rest = max(in_file.values()), max(size - in_file[part] for part, size in parts.items())
    expert = max(in_file[i] // x.experts for i, x in stream.expert_layers.items())
    tokens, hidden_size = windows * length, config.hidden_size
    widest = max((_window(stream, i, length, dtype) for i in range(len(stream.layers))), default=0)
    top_k = _top_k(config)
    converted = widened_bytes(stream.device, dtype, max(largest, recipe.calibration.batch_size * widest) // 2)
    mapped_batch, batches, slices = 0, [], []

    def at_once(pieces: int, size: int) -> int:
        return min(pieces, workers(stream.device, 1 if bounded else size))

    for i, x in () if only_dense else stream.expert_layers.items():
        some = expert_batches(x, settings)
        mapped_batch = max(mapped_batch, max(map(len, some)) * in_file[i] // x.experts)
        size = batch_memory(x, settings, max(map(len, some)))
        batches.append((at_once(len(some), size), size))
    for matrices in filter(None, dense.values()):
        tasks = dense_tasks(matrices, recipe, "", stream.device.type)
        rounded = [2 * t.matrix.matrix.weights * (kept_as != torch.bfloat16) for t in tasks]  # to BF16, before the rest
        size = max(t.memory + more for t, more in zip(tasks, rounded, strict=True))
        slices.append((at_once(len(tasks), size), size))
    return Needs(
        process=(resident_memory() if process is None else process) + LATER,
        loading=max(stream.loading_bytes(part, on_disk=part in apart) for part in parts),
        outside=max(
            stream.loading_bytes(None),
            with_copy(outside) if on_cpu else outside,
            stream.mtp_loading_bytes if recipe.mtp == "keep" else 0,
        ),
        layer=with_copy(largest) if on_cpu else largest,
        waiting=largest,
        hidden=tokens * hidden_size * dtype.itemsize,
        seen=tokens * hidden_size * dtype.itemsize,
        routing=8 * tokens * top_k,
        window=widest if on_cpu else 0,
        forward=length * length * 4 + converted if on_cpu else 0,
        batches=tuple(batches),
        slices=tuple(slices),
        each=length * hidden_size * dtype.itemsize,
        dense=max((sum(8 * m.matrix.cols**2 for m in matrices) for matrices in dense.values()), default=0),
        loading_on_disk=max(stream.loading_bytes(part, on_disk=True) for part in parts) if filed else 0,
        layer_on_disk=(with_copy(rest) if on_cpu else rest) + with_copy(expert) if filed else 0,
        waiting_on_disk=rest if filed else 0,
        mapped=mapped_batch,
        experts=with_copy(filed),
    )


def workers(device: torch.device, need: int) -> int:
    """Pieces of `need` bytes that are made here at once: one on a GPU, which has no cores to share out; on a CPU one a
    thread of torch's, as far as half of the memory that is available holds them. Their number changes no byte."""
    import torch

    if device.type != "cpu":
        return 1
    return max(1, min(torch.get_num_threads(), available_memory() // 2 // need))


def _top_k(config: object) -> int:
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")
    return max([int(v) for v in (getattr(config, n, None) for n in names) if isinstance(v, int)], default=8)


def _window(stream: StreamedModel, index: int, length: int, dtype: torch.dtype) -> int:
    """Bytes that a window takes on its way through a layer: about what is alive in attention, or in the experts."""
    config = stream.model.config.get_text_config()
    size, hidden = dtype.itemsize, int(config.hidden_size)
    around = length * hidden * (4 * size + 4)  # residual, normed, the sum; norms compute in float32
    attention = length * stream.dense_rows(index) * 3 * size + 2 * size * length * length
    layer = stream.expert_layers.get(index)
    if layer is None:
        return around + attention
    first, second = layer.matrices[0], layer.matrices[-1]
    gated = hidden * size + (first.rows + 2 * second.cols) * size
    summed = second.cols * size + 2 * hidden * size + 2 * hidden * 4  # routing weights are float32
    return around + max(attention, length * _top_k(config) * max(gated, summed))


def _size(size: int, up: bool = False) -> str:
    """Bytes as MiB, whole ones."""
    return f"{-(-size // MIB) if up else size // MIB:,}MiB".replace(",", "")
