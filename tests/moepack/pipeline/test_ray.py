"""The Ray executor: the local one's bytes, with a worker killed in the middle of the build."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
from support import tree

from moepack.pack.errors import InputError
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe

ray = pytest.importorskip("ray")

RECIPE = """
quantize: {method: gptq, group_size: 64, loss_tokens: 128}
calibration: {samples: 8, length: 128, batch_size: 8}
"""


def kill_a_worker(killed: list[int], stop: threading.Event) -> None:
    """Kill the first process that is making an expert batch."""
    while not stop.is_set() and not killed:
        for process in psutil.process_iter(["cmdline"]):
            if (process.info["cmdline"] or [""])[0].startswith("ray::make_batch"):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return
        time.sleep(0.01)


def test_the_same_bytes_with_a_worker_killed(demo_model: Path, text: Path, tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE, "test")
    build(demo_model, tmp_path / "local", recipe, [text])
    killed: list[int] = []
    stop = threading.Event()
    watcher = threading.Thread(target=kill_a_worker, args=(killed, stop))
    watcher.start()
    try:
        build(demo_model, tmp_path / "ray", recipe, [text], engine="ray")
    finally:
        stop.set()
        watcher.join()
    assert killed, "no worker was seen at work"
    assert tree(tmp_path / "ray") == tree(tmp_path / "local")
    assert not ray.is_initialized()


def test_a_cluster_that_does_not_answer_is_one_line(demo_model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Ray at"):
        build(demo_model, tmp_path / "b", parse_recipe(RECIPE, "t"), [text], engine="ray", address="127.0.0.1:1")
    assert list(tmp_path.iterdir()) == []


def test_an_address_needs_the_engine(demo_model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="--engine ray"):
        build(demo_model, tmp_path / "b", parse_recipe(RECIPE, "t"), [text], address="auto")
    with pytest.raises(InputError, match="unknown"):
        build(demo_model, tmp_path / "b", parse_recipe(RECIPE, "t"), [text], engine="dask")
