"""`moepack serve` as a process: how soon it answers, how it ends, and what it says when it cannot begin."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moepack.runtime.planning.options import LoadOptions

BODY = {"model": "mini", "prompt": "The history of", "max_tokens": 5, "temperature": 0}
Start = Callable[..., tuple["subprocess.Popen[str]", int]]


def ask(port: int, **more: Any) -> Any:
    raw = json.dumps({**BODY, **more}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", raw, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]


@pytest.fixture
def start(bundle: Path) -> Iterator[Start]:
    """Starts the command on a free port; returns it and the port, once it answers."""
    running: list[subprocess.Popen[str]] = []

    def call(*options: str) -> tuple[subprocess.Popen[str], int]:
        command = [sys.executable, "-m", "moepack", "serve", str(bundle), "--port", "0", "--name", "mini", *options]
        environment = {k: v for k, v in os.environ.items() if k != "MOEPACK_API_KEY"}
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
        assert running[-1].stderr is not None
        for line in running[-1].stderr:
            if found := re.search(r"moepack: serving mini at http://127.0.0.1:(\d+)", line):
                return running[-1], int(found[1])
        pytest.fail("it ended before it answered")

    yield call
    for process in running:
        process.kill()
        process.wait()


def processor_seconds(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_it_answers_soon_and_finishes_what_runs(start: Start) -> None:
    """From the start to the first tokens it takes no more than twice the processor time of importing what any model of
    this family needs; then a stop signal comes within an answer, which is whole; new ones are refused; it exits with 0.
    """
    imports = "import torch, transformers.models.qwen3_moe.modeling_qwen3_moe, time; print(time.process_time())"
    bare = float(subprocess.run([sys.executable, "-c", imports], check=True, capture_output=True, text=True).stdout)
    process, port = start("--policy", "hotness", "--device-memory", "5MB", "--step-tokens", "64")
    ask(port)
    assert processor_seconds(process) < 2 * bare + 1
    answers: list[Any] = []
    long = threading.Thread(target=lambda: answers.append(ask(port, max_tokens=150, ignore_eos=True)))
    long.start()
    until = time.monotonic() + 20
    while b"moepack_running 1.0" not in urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read():
        assert time.monotonic() < until
    process.send_signal(signal.SIGTERM)
    long.join(60)
    assert answers and answers[0]["finish_reason"] == "length" and len(answers[0]["text"]) > 150
    assert process.wait(20) == 0
    with pytest.raises(OSError):
        ask(port)


def test_a_stop_that_has_no_time(start: Start) -> None:
    """By Ctrl-C: the answer that runs is cut off after the grace, and the process ends with 0 all the same."""
    process, port = start("--policy", "static:w4", "--grace", "1")
    raw = json.dumps({**BODY, "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", port)) as peer:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        peer.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert b"200 OK" in peer.recv(1 << 12)
        process.send_signal(signal.SIGINT)
        began = time.monotonic()
        assert process.wait(20) == 0
        assert time.monotonic() - began < 15


def test_the_key_from_the_environment(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options as the command passes them on."""
    from moepack.server import command
    from moepack.server.http import app

    seen: list[app.Options] = []

    class Stop(Exception):
        pass

    def server(model: Any, tokenizer: Any, options: app.Options) -> Any:
        seen.append(options)
        raise Stop

    monkeypatch.setattr(app, "Server", server)
    monkeypatch.setenv("MOEPACK_API_KEY", "from the environment")
    for given, wanted in ((None, "from the environment"), ("given", "given")):
        with pytest.raises(Stop):
            asked = command.Serve(str(bundle), LoadOptions(policy="static:w4"), port=0, api_key=given)
            command.serve(asked, lambda where: None)
        assert seen[-1].key == wanted and seen[-1].name == bundle.name and seen[-1].body == 4 << 20


def test_what_cannot_begin_says_why(bundle: Path, tmp_path: Path) -> None:
    from moepack.pack.errors import BundleError, InputError
    from moepack.runtime.planning.exceeded import TooSmallError
    from moepack.server.command import Serve, serve

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(InputError, match=f"127.0.0.1 port {taken.getsockname()[1]}: Address already in use"):
            serve(Serve(str(bundle), port=taken.getsockname()[1]), lambda where: None)
    with pytest.raises(InputError, match="not a bundle"):
        serve(Serve(str(tmp_path), port=0), lambda where: None)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BundleError, match="not a moepack manifest"):
        serve(Serve(str(tmp_path), port=0), lambda where: None)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(InputError, match="no tokenizer that transformers"):
        patch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: [][0])
        serve(Serve(str(bundle), port=0), lambda where: None)
    with pytest.raises(InputError, match="dtype 'int3' is unknown"):
        serve(Serve(str(bundle), LoadOptions(dtype="int3"), port=0), lambda where: None)
    with pytest.raises(TooSmallError, match="the least that would do is"):
        serve(Serve(str(bundle), LoadOptions(policy="hotness", device_memory="1MB"), port=0), lambda where: None)
