"""Compute a build's memory needs (`bound.BuildNeeds`) from a model's skeleton and a recipe, before any work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moepack.families.model_class import top_k
from moepack.families.passed import between_layers
from moepack.shared.memory import resident_memory

from .bound import LATER, BuildNeeds, workers
from .recipe import Recipe
from .tasks.experts import batch_settings
from .tasks.row_shards import row_shard_tasks

if TYPE_CHECKING:
    import torch

    from moepack.calibrate.stream import StreamedModel
    from moepack.pack.spec import DenseMatrix

Dense = dict[int | None, list["DenseMatrix"]]  # decoder layer, or None outside the layers -> matrices that get versions


def needs_of(
    stream: StreamedModel,
    recipe: Recipe,
    windows: int,
    length: int,
    dense: Dense,
    process: int | None = None,
    bounded: bool = False,
) -> BuildNeeds:
    """The memory needs of a build on `windows` windows of `length` tokens.

    `process`: the process's bytes before the first layer; measured now if None. `bounded`: count the tasks that run at
    once as if all memory were available, because other programs may free some.
    """
    from moepack.calibrate.products import widened_bytes

    dtype = recipe.calibration.torch_dtype
    layers, (parts, apart) = range(len(stream.layers)), _parts(stream, recipe, dense)
    outside = stream.part_bytes(None)
    largest = max(parts.values())
    kept_as = stream.loaded_dtype

    def computed(size: int) -> int:
        """Bytes of weights of `size` bytes in the checkpoint's dtype, with a copy in the computation's dtype."""
        return size if kept_as == dtype else size + size // kept_as.itemsize * dtype.itemsize

    on_cpu = stream.device.type == "cpu"
    on_disk = {part: 0 if part in apart else stream.file_bytes(part) for part in parts}
    filed = max(on_disk.values())
    rest = max(size - on_disk[part] for part, size in parts.items())
    expert = max(on_disk[i] // x.experts for i, x in stream.expert_layers.items())
    config = stream.model.config.get_text_config()
    each, beside = between_layers(stream.model.config, length, dtype.itemsize)
    widest = max(_window(stream, i, length, dtype) for i in layers)
    converted = widened_bytes(stream.device, dtype, max(largest, recipe.calibration.batch_size * widest) // 2)
    mapped, batches, row_shards = _tasks(stream, recipe, dense, on_disk, bounded)
    return BuildNeeds(
        process=(resident_memory() if process is None else process) + LATER,
        loading=max(stream.loading_bytes(part, on_disk=part in apart) for part in parts),
        outside=max(
            stream.loading_bytes(None),
            computed(outside) if on_cpu else outside,
            stream.mtp_loading_bytes * (recipe.mtp == "keep"),
        ),
        layer=computed(largest) if on_cpu else largest,
        waiting=largest,
        hidden=windows * each,
        passed=windows * beside,
        seen=windows * length * config.hidden_size * dtype.itemsize,
        routing=8 * windows * length * top_k(config),
        window=widest if on_cpu else 0,
        forward=length * length * 4 + converted if on_cpu else 0,
        batches=batches,
        row_shards=row_shards,
        each=each,
        dense=max((sum(8 * m.matrix.cols**2 for m in matrices) for matrices in dense.values()), default=0)
        * recipe.fits_dense,
        loading_on_disk=max(stream.loading_bytes(part, on_disk=True) for part in parts) * bool(filed),
        layer_on_disk=((computed(rest) if on_cpu else rest) + computed(expert)) * bool(filed),
        waiting_on_disk=rest * bool(filed),
        mapped=mapped,
        experts=computed(filed),
    )


def _parts(stream: StreamedModel, recipe: Recipe, dense: Dense) -> tuple[dict[int | None, int], set[int]]:
    """The bytes of each part, and the layers of which only the dense tensors are read."""
    layers = range(len(stream.layers))
    apart = {part for part in layers if not recipe.versions and stream.dense_apart(part)}
    # The part behind the last layer counts as a layer where its matrix gets versions.
    parts = {part: stream.part_bytes(part) for part in (*layers, *((None,) if None in dense else ()))}
    return parts | {part: parts[part] - stream.file_bytes(part) for part in apart}, apart


_Tasks = tuple[tuple[int, int], ...]  # for each part: the most tasks that run at once, and bytes of one


def _tasks(
    stream: StreamedModel, recipe: Recipe, dense: Dense, on_disk: dict[int | None, int], bounded: bool
) -> tuple[int, _Tasks, _Tasks]:
    import torch

    from moepack.quantize.batch_memory import batch_memory
    from moepack.quantize.expert_batch import expert_batches

    def at_once(tasks: int, size: int) -> tuple[int, int]:
        return min(tasks, workers(stream.device, 1 if bounded else size)), size

    settings = batch_settings(recipe)
    mapped = 0
    batches = []
    row_shards = []
    for i, x in stream.expert_layers.items() if recipe.versions else ():
        some = expert_batches(x, settings)
        most = max(map(len, some))
        mapped = max(mapped, most * on_disk[i] // x.experts)
        batches.append(at_once(len(some), batch_memory(x, settings, most)))
    for matrices in filter(None, dense.values()):
        tasks = row_shard_tasks(matrices, recipe, "", stream.device.type)
        # Weights of other dtypes are first rounded to BF16, as a copy.
        rounded = [2 * t.matrix.matrix.weights * (stream.loaded_dtype != torch.bfloat16) for t in tasks]
        size = max(t.memory + more for t, more in zip(tasks, rounded, strict=True))
        row_shards.append(at_once(len(tasks), size))
    return mapped, tuple(batches), tuple(row_shards)


def _window(stream: StreamedModel, index: int, length: int, dtype: torch.dtype) -> int:
    """Approximate bytes of one window's forward through a layer: live tensors of attention, or of experts if more."""
    config = stream.model.config.get_text_config()
    size = dtype.itemsize
    hidden = int(config.hidden_size)
    around = length * hidden * (4 * size + 4)  # residual, normed, the sum; norms compute in float32
    attention = length * stream.dense_size(index)[0] * 3 * size + 2 * size * length * length
    layer = stream.expert_layers.get(index)
    if layer is None:
        return around + attention
    first = layer.matrices[0]
    second = layer.matrices[-1]
    gated = hidden * size + (first.rows + 2 * second.cols) * size
    summed = second.cols * size + 2 * hidden * size + 2 * hidden * 4  # routing weights are float32
    return around + max(attention, length * top_k(config) * max(gated, summed))
