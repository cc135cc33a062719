"""The Ray executor: the local one's bytes, whatever dies, and no weights through the driver. One cluster for all."""

import contextlib
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from native_checkpoints import released, small
from released_kinds import E8M0, block_fp8
from support import build_from, edit_config, edit_tensors, running, spy, tree

from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pipeline import build as pipeline
from moepack.pipeline.build import build
from moepack.pipeline.executors import local as local_executor
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.tasks.row_shards import RowShardTask
from moepack.quantize import dense_matrix
from moepack.reports.verify import verify
from moepack.shared.progress import Reporter

ray = pytest.importorskip("ray")

from moepack.pipeline.executors import on_ray  # noqa: E402
from moepack.pipeline.executors.on_ray import OnRay, slots  # noqa: E402
from moepack.pipeline.executors.worker import DirectoryProbe  # noqa: E402
from moepack.shared.cluster import connect  # noqa: E402

RECIPE = """
versions: [bf16, w4, w2]
dense: [w8]
quantize: {method: gptq, group_size: 64, loss_tokens: 64}
calibration: {samples: 4, length: 64, batch_size: 4}
"""
LAYERS, TOKENS = 2, 4 * 64


@pytest.fixture(scope="module")
def cluster():
    """Two workers. Builds find Ray started, and leave it so."""
    _, started = connect(None, num_cpus=2)
    yield
    if started:
        ray.shutdown()


@pytest.fixture(scope="module")
def untied(short_model, tmp_path_factory):
    """The short model with an output projection of its own, a part without experts."""
    path = Path(shutil.copytree(short_model, tmp_path_factory.mktemp("untied") / "checkpoint"))
    edit_config(path, tie_word_embeddings=False)
    edit_tensors(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    return path


@pytest.fixture(scope="module")
def local(untied, text, tmp_path_factory):
    """What the local executor makes."""
    folder = tmp_path_factory.mktemp("local")
    build_from(RECIPE, untied, folder / "b", [text])
    return tree(folder / "b")


@pytest.fixture
def executor(cluster, monkeypatch):
    """The one that the next build uses."""
    made = OnRay(None)
    monkeypatch.setattr(pipeline, "open_executor", lambda name, address: made)
    return made


@pytest.fixture
def out(monkeypatch):
    """The layers that are out whenever one more is submitted."""
    seen = []
    spy(monkeypatch, OnRay, "submit", lambda self, *_: seen.append(len(self._layers)))
    return seen


def workers():
    """Processes that are making a piece, of this process's cluster."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if (process.cmdline() or [""])[0].startswith("ray::run_task"):
                found.append(process)
    return found


@contextlib.contextmanager
def killing(wanted, when=lambda: True):
    """Inside, the first few processes that are making a piece are killed, once it is time."""
    killed = []
    stop = threading.Event()

    def watch():
        while not stop.is_set() and len(killed) < wanted:
            for process in workers() if when() else ():
                if process.pid not in killed:
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield killed
    finally:
        stop.set()
        watcher.join()


def test_the_same_bytes_with_workers_killed(executor, out, local, untied, text, tmp_path):
    """And calibration goes ahead: with a batch a layer and two slots, as many layers as batches may be out."""
    with killing(1) as killed:
        build_from(RECIPE, untied, tmp_path / "ray", [text], work=tmp_path / "work")
    assert killed, "no worker was seen at work"
    assert 1 <= max(out) <= on_ray.AHEAD * 2 and executor._slots == 2
    assert tree(tmp_path / "ray") == local
    assert ray.is_initialized(), "a cluster that was there stays"
    assert [p.name for p in (tmp_path / "work").iterdir() if p.name.startswith("shared-")] == []
    assert list((tmp_path / "work" / "objects").iterdir()) == []


def test_slices_of_a_released_checkpoint_with_a_worker_killed(executor, demo_model, text, tmp_path, monkeypatch):
    """Workers read its codes and scales: of experts, whose FP4 leaves the file as it is, and of attention in FP8. The
    same bytes by one and two threads here and by two workers there, of whom one dies at a slice."""
    plain, checkpoint = small(demo_model, tmp_path / "plain"), tmp_path / "checkpoint"
    released(plain, checkpoint, "deepseek mxfp4", lambda r, n, c: block_fp8(r, n, c, 128, "scale", E8M0))
    monkeypatch.setattr(dense_matrix, "ROW_SHARD", 4 * 128 * 64)
    recipe = parse_recipe(RECIPE.replace("bf16, w4", "native").replace("gptq", "rtn").replace("[w8]", "[w4]"), "test")
    made = []
    with monkeypatch.context() as patch:
        at_work = running(patch, local_executor, "make_row_shard")
        patch.setattr(pipeline, "open_executor", lambda *asked: local_executor.Local())
        for n in (1, 2):
            patch.setattr(local_executor, "workers", lambda device, need, n=n: n)
            build(checkpoint, tmp_path / f"local-{n}", recipe, [text])
            assert max(at_work) == n
            made.append(tree(tmp_path / f"local-{n}"))

    def slices_alone():
        running = [layer.work.tasks[i] for layer in list(executor._layers) for i in list(layer.running.values())]
        return bool(running) and all(isinstance(task, RowShardTask) for task in running)

    with killing(1, slices_alone) as killed:
        build(checkpoint, tmp_path / "ray", recipe, [text], work=tmp_path / "work")
    assert killed and executor._slots == 2 and list((tmp_path / "work" / "objects").iterdir()) == []
    assert executor.traffic.orders > 0 and executor.traffic.results == 0
    assert made[0] == made[1] == tree(tmp_path / "ray")
    bundle = open_bundle(tmp_path / "ray")
    assert [v.name for v in (*bundle.versions, *bundle.dense_versions)] == ["mxfp4", "w2", "fp8", "w4"]
    assert verify(tmp_path / "ray", checkpoint) == []


class Counting(Reporter):
    """Counts the steps of what is called experts."""

    name, done = "", 0

    def inner(self, name, total):
        self.name = name

    def advance(self, amount=1):
        self.done += amount * self.name.startswith("experts")


def test_no_weights_go_through_the_driver(
    executor, local, untied, text, tmp_path,
    monkeypatch,
):  # fmt: skip
    """Its traffic is exactly the tokens that experts saw, the moments of what dense matrices read (two of
    [cols, cols] for q, k and v, two for o, two for lm_head), and a few bytes a piece."""
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.quantize import expert_batch

    monkeypatch.setattr(expert_batch, "MOST", 4)
    config = open_checkpoint(untied).config
    counting = Counting()
    build_from(RECIPE, untied, tmp_path / "ray", [text], reporter=counting)
    assert counting.done == LAYERS * (16 + 4) + 1, "progress reaches every expert and dense matrix"
    tokens = LAYERS * TOKENS * (2 * config.hidden_size + 8 * config.num_experts_per_tok)
    assert executor.traffic.tokens == tokens and executor.traffic.results == 0
    heads = config.num_attention_heads * config.head_dim
    assert executor.traffic.moments == 8 * ((LAYERS + 1) * config.hidden_size**2 + LAYERS * heads**2)
    weights = sum(len(b) for name, b in local.items() if "experts" in name)
    rest = executor.traffic.orders + executor.traffic.answers
    assert rest < 4096 * LAYERS * (16 // 4 + 4 + 1) + 3 * 4096 < weights / 10, (rest, weights)


def test_a_directory_that_workers_do_not_see(executor, local, untied, text, tmp_path, monkeypatch):
    """Batches come back in pieces, to the same bytes; those that change on their way are refused."""
    leave = DirectoryProbe.leave
    monkeypatch.setattr(DirectoryProbe, "leave", staticmethod(lambda folder: replace(leave(folder), word="another")))
    build_from(RECIPE, untied, tmp_path / "ray", [text])
    assert tree(tmp_path / "ray") == local
    weights = sum(len(b) for name, b in local.items() if "experts" in name)
    assert executor.traffic.results > 0.99 * weights
    get = OnRay._get

    def damaged(self, reference):
        answer = get(self, reference)
        return answer if isinstance(answer, str) or answer is None else answer ^ 1

    monkeypatch.setattr(OnRay, "_get", damaged)
    monkeypatch.setattr(pipeline, "open_executor", lambda name, address: OnRay(None))
    with pytest.raises(InputError, match="was changed in transfer"):
        build_from(RECIPE, untied, tmp_path / "b", [text], work=tmp_path / "work")
    assert list((tmp_path / "work" / "objects").iterdir()) == [] and not (tmp_path / "b").exists()


def test_no_node_has_what_a_batch_takes(executor, untied, text, tmp_path, monkeypatch):
    monkeypatch.setattr(on_ray, "PROCESS", 1 << 50)
    with pytest.raises(InputError, match="no node of the cluster has that"):
        build_from(RECIPE, untied, tmp_path / "b", [text])


def test_slots_are_counted_by_node():
    nodes = [{"CPU": 8.0, "memory": 10.0}, {"CPU": 2.0, "memory": 100.0, "GPU": 1.0}, {"memory": 50.0}]
    assert slots(nodes, {"CPU": 1.0, "memory": 3.0}) == 3 + 2
    assert slots(nodes, {"CPU": 1.0, "memory": 3.0, "GPU": 1.0}) == 1
    assert slots(nodes, {"CPU": 1.0, "memory": 200.0}) == 0
