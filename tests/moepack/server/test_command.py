"""`moepack serve`: how soon it answers, how it ends, and its errors when it cannot begin."""

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
from collections.abc import Callable

import psutil
import pytest
from live_models import wait_for
from server_fixtures import ask
from support import PATIENCE

from moepack.pack.errors import BundleError, InputError
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.options import LoadOptions
from moepack.server.command import Serve, options_of, serve

PROMPT = "The history of"
Start = Callable[..., tuple["subprocess.Popen[str]", str]]


@pytest.fixture
def start(bundle):
    """Start the command on a free port, and return it and its address once it answers."""
    running = []

    def call(*options):
        command = [sys.executable, "-m", "moepack", "serve", str(bundle), "--port", "0", "--name", "mini", *options]
        environment = {k: v for k, v in os.environ.items() if k != "MOEPACK_API_KEY"}
        running.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
        for line in running[-1].stderr:
            if found := re.search(r"moepack: serving mini at (http://127.0.0.1:\d+)", line):
                return running[-1], found[1]
        pytest.fail("it ended before it answered")

    yield call
    for process in running:
        process.kill()
        process.wait()


def test_it_answers_soon_and_finishes_what_runs(start):
    """From the start to the first tokens it takes at most twice the processor time of importing what any model of this
    family needs. A stop signal within an answer leaves it whole; new ones are refused; it exits with 0."""
    imports = "import torch, transformers.models.qwen3_moe.modeling_qwen3_moe, time; print(time.process_time())"
    bare = float(subprocess.run([sys.executable, "-c", imports], check=True, capture_output=True, text=True).stdout)
    process, url = start("--policy", "hotness", "--device-memory", "5MB", "--step-tokens", "64")
    ask(url, PROMPT, max_tokens=5)
    assert sum(psutil.Process(process.pid).cpu_times()[:2]) < 2 * bare + 1  # user and system
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask(url, PROMPT, max_tokens=150, ignore_eos=True)))
    asking.start()
    wait_for(lambda: b"moepack_running 1.0" in urllib.request.urlopen(f"{url}/metrics").read())
    process.send_signal(signal.SIGTERM)
    asking.join(PATIENCE)
    assert answers and answers[0]["finish_reason"] == "length" and len(answers[0]["text"]) > 150
    assert process.wait(PATIENCE) == 0
    with pytest.raises(OSError):
        ask(url, PROMPT)


@pytest.mark.parametrize("number", (signal.SIGINT, signal.SIGHUP))
def test_a_stop_that_has_no_time(bundle, number, monkeypatch):
    """Ctrl-C, or the end of the terminal, ends running answers after the grace, which say so; serving ends with 0."""
    # Under nohup SIGHUP is ignored, and so does not end serving.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    seen = []

    def interrupt(told):
        url = told.split(" at ")[1]
        body = {"prompt": PROMPT, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            seen.append(answer.status)
            os.kill(os.getpid(), number)
            seen.append(time.monotonic())
            *_, last = [line for line in answer.read().decode().splitlines() if line]
            seen.append(json.loads(last.removeprefix("data: "))["error"])

    asked = Serve(str(bundle), LoadOptions(policy="static:w4"), port=0, grace=1)
    serve(asked, lambda told: threading.Thread(target=interrupt, args=[told]).start())
    assert seen[0] == 200 and time.monotonic() - seen[1] < 15
    assert seen[2]["code"] == "stopping" and seen[2]["message"] == "this server was stopped"


def test_options_that_the_server_gets(bundle, monkeypatch):
    """Keys are the environment's where none is given; kept prompts have a default, a size, or no room."""
    monkeypatch.setenv("MOEPACK_API_KEY", "from the environment")

    def options(**given):
        return options_of(Serve(str(bundle), **given))

    own = ("from the environment",)
    assert [options(api_key=keys).keys for keys in (None, ["a", "b"], [""])] == [own, ("a", "b"), own]
    assert (options().name, options().body) == (bundle.name, 4 << 20)
    assert [options(prefix_cache=size).limits.kept_bytes for size in (None, "off", "64MiB")] == [None, 0, 64 << 20]
    for given, words in (
        ({"prefix_cache": "on"}, "size 'on' is not a number of bytes"),
        ({"system_messages": "drop"}, "system_messages drop is unknown: it is join, keep, refuse"),
        ({"generation_config": "vllm"}, "generation_config vllm is unknown: it is auto or none"),
    ):
        with pytest.raises(InputError, match=words):
            options(**given)


def test_what_cannot_begin_says_why(bundle, tmp_path, monkeypatch):
    def refused(error, words, folder=bundle, port=0, **load):
        with pytest.raises(error, match=words):
            serve(Serve(str(folder), LoadOptions(**load), port=port), lambda where: pytest.fail("it serves"))

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused(InputError, f"127.0.0.1 port {port}: Address already in use", port=port)
    refused(InputError, "not a bundle", tmp_path)
    (tmp_path / "manifest.json").write_text("{}")
    refused(BundleError, "not a moepack manifest", tmp_path)
    refused(InputError, "dtype 'int3' is unknown", dtype="int3")
    refused(TooSmallError, "the least that would do is", policy="hotness", device_memory="1MB")
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda path: [][0])
    refused(InputError, "no tokenizer that transformers")
