"""Run in a process of its own, `peak_memory.py CHECKPOINT TEXT FOLDER`: what it takes at its peak, in FOLDER as JSON.

build.json: the peak of a build in the least that it says it needs, and that bound
parts.json: growth by activations in a file and in memory, by an expert batch and by a slice of a dense matrix, and what
    was said of these two

Each is measured in a forked child, so that both share the imports.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

from support import forked

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a forked child has none of its parent's threads
import torch

from moepack.shared.memory import peak_memory, resident_memory

RECIPE = "{quantize: {method: rtn, loss_tokens: 64}, calibration: {samples: 4, length: 64, batch_size: 2}}"
MORE = 16  # MiB that the process takes since it was refused


def build(checkpoint: str, text: str, bundle: str) -> dict[str, int]:
    """A build in the least that it says it needs."""
    from moepack.calibrate import skeleton
    from moepack.pack.errors import InputError
    from moepack.pipeline import build as pipeline
    from moepack.pipeline.recipe import parse_recipe

    skeleton.AT_ONCE = 1 << 18  # bytes: a third of a layer's experts, so that these go to disk for the least
    recipe, size = parse_recipe(RECIPE, "test"), 1
    try:
        pipeline.build(checkpoint, bundle, recipe, [text], memory=1)
    except InputError as error:
        size = int(str(error).split("the least is ")[1].split("MiB")[0]) + MORE << 20
    pipeline.build(checkpoint, bundle, recipe, [text], memory=size)
    return {"peak": peak_memory(), "bound": size}


def grown_from() -> int:
    """The memory that is held now; the peak is taken from here on."""
    from moepack.runtime.devices.glibc import trim

    trim()
    Path("/proc/self/clear_refs").write_text("5")
    return resident_memory()


def parts(folder: str) -> dict[str, dict[str, int]]:
    return {
        "disk": held(Path(folder)), "memory": held(None), "batch": batch("gptq"), "dense": dense("rtn"),
        "refine": batch("refine"),
        "files": {"left": len(list(Path(folder).iterdir()))},
    }  # fmt: skip


def held(folder: Path | None) -> dict[str, int]:
    """256 MiB of activations written, read and gathered: in a file, or in memory."""
    from moepack.calibrate.held import RowGather, empty, release

    before, rows = grown_from(), 1 << 17
    tensor = empty((rows, 1024), torch.bfloat16, folder)
    for part in tensor.split(4096):
        part.fill_(1.5)
        release(part)
    seen = RowGather(tensor)
    for start in range(0, rows, 8192):
        assert bool((seen[torch.arange(start, start + 8192, 2)] == 1.5).all())
    return {"growth": peak_memory() - before, "bytes": tensor.nbytes}


def batch(method: str) -> dict[str, int]:
    """An expert batch of four experts; both numbers in bytes. `refine` is the default recipe's way, with few tokens."""
    from true_losses import Silu

    from moepack.calibrate.experts import ExpertWeights
    from moepack.calibrate.forward import Observation
    from moepack.calibrate.gather import gather_batch
    from moepack.pack.spec import ExpertLayer, Matrix, Version
    from moepack.quantize.batch_memory import batch_memory
    from moepack.quantize.expert_batch import Settings, quantise_batch

    hidden, size, experts, tokens = 256, 768, 4, 2048
    layer = ExpertLayer(0, "m", experts, (Matrix("gate_up", 2 * size, hidden, False), Matrix("down", hidden, size)))
    refine = method == "refine"
    versions = tuple(Version.of(name, 64) for name in ("w4", "w2"))
    if refine:
        versions = tuple(Version.of(name, scale_bits=8) for name in ("w4d5", "w3d4", "t2d3", "w1d2"))

    def run(experts: int) -> dict[str, int]:
        g = torch.Generator().manual_seed(0)
        drawn = tuple(torch.randn(4, m.rows, m.cols, generator=g).bfloat16() for m in layer.matrices)
        weights = ExpertWeights(layer, drawn, (None, None), False)
        chosen = torch.arange(4, dtype=torch.int32).repeat(tokens, 1)
        inputs = torch.randn(tokens, hidden, generator=g).bfloat16()
        seen = Observation(inputs, chosen, torch.full((tokens, 4), 0.5), 64)
        settings = Settings("gptq" if refine else method, versions, loss_tokens=2048, refine=refine)
        before = grown_from()
        made = gather_batch(Silu(), weights.select(range(experts)), range(experts), seen, settings, torch.device("cpu"))
        for _ in quantise_batch(made, settings):
            pass
        return {"took": peak_memory() - before, "said": batch_memory(layer, settings, experts)}

    run(1)  # loads what quantisers need
    return run(experts)


def dense(method: str) -> dict[str, int]:
    """8,192 rows of 1,024 columns at three versions; both numbers in bytes."""
    from moepack.pack.spec import LOSSLESS, DenseMatrix, Matrix, Version
    from moepack.pipeline.tasks.row_shards import RowShardTask, make_row_shard

    versions = (Version.of(LOSSLESS, 64), Version.of("w8", 64), Version.of("w4", 64))

    def run(rows: int) -> dict[str, int]:
        g = torch.Generator().manual_seed(0)
        described = DenseMatrix(0, "m", Matrix("weight", rows, 1024))
        task = RowShardTask("c", versions, "cpu", described, range(rows), method, "fractional")
        weight, x = torch.randn(rows, 1024, generator=g).bfloat16(), torch.randn(2048, 1024, generator=g)
        moments = x.T @ x / 2048
        before = grown_from()
        make_row_shard(task, {"m.weight": weight}, moments, moments, torch.device("cpu"))
        return {"took": peak_memory() - before, "said": task.memory}

    run(2048)  # loads what quantisers need
    return run(8192)


if __name__ == "__main__":
    given, written, out = sys.argv[1:]
    for name, work in (
        ("build", lambda: build(given, written, f"{out}/bundle")),
        ("parts", lambda: parts(tempfile.mkdtemp(dir=out))),
    ):
        child = forked(lambda name=name, work=work: Path(out, f"{name}.json").write_text(json.dumps(work())))
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{name} failed")
