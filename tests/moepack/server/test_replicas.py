"""Replicas on Ray Serve: one address; a beginning goes to one replica; a dead replica is started anew."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from types import SimpleNamespace

import psutil
import pytest
from hostile_edits import Victim
from server_fixtures import ask, post

pytest.importorskip("ray.serve")

from moepack.server.replicas import PAGE, beginning, node_of_front

JSON = {"Content-Type": "application/json"}


def test_what_a_prompt_is_known_by():
    def key(**given):
        return beginning(json.dumps(given).encode())

    system = {"role": "system", "content": "Answer every question in one word, whatever it is. " * 2}
    asked = [key(messages=[system, {"role": "user", "content": words}]) for words in ("one", "two")]
    assert asked[0] == asked[1] != key(messages=[{"role": "user", "content": "one"}])
    assert key(prompt="a" * 64 + "b") == key(prompt="a" * 64 + "c", max_tokens=3) == key(prompt=["a" * 64, "d"])
    assert key(prompt="a") != key(prompt="b") and key(prompt=[1, 2]) != key(prompt=[1, 3])
    assert key(messages=[{"role": "user", "content": [{"type": "text", "text": "x"}]}]) != PAGE
    for raw in (b"", b"{", b"[1]", b"\xff", b"[" * 100_000):
        assert beginning(raw) == PAGE


def test_which_replicas_are_tried():
    """Those that know the key, then two of all: the less busy of these gets what none knows, or none has room for."""
    from moepack.server.routing import ByBeginning

    router = object.__new__(ByBeginning)
    router.rank_replicas_via_multiplex = lambda replicas, key: [[r for r in replicas if key in r], [], []]

    def tried(key, replicas):
        asked = SimpleNamespace(should_backoff=False), SimpleNamespace(multiplexed_model_id=key)
        request = SimpleNamespace(routing_context=asked[0], metadata=asked[1])
        found = asyncio.run(router.choose_replicas(replicas, None if key is None else request))
        assert asked[0].should_backoff is (key is not None)  # Ray tries again, and again later, if all are full
        return found

    known, two = tried("a", ["xa", "b", "c", "d"])
    assert known == ["xa"] and len(set(two)) == 2
    assert tried("e", ["b"]) == [[], ["b"]] and tried("", ["b"]) == tried(None, ["b"]) == [["b"]]
    assert {r for _ in range(99) for r in tried("e", ["b", "c", "d"])[1]} == {"b", "c", "d"}


@pytest.mark.parametrize(
    ("connected", "nodes", "front"),
    [
        ("here", {"head": "198.51.100.1", "here": "127.0.0.1"}, ("here", "")),
        ("head", {"head": "198.51.100.1", "here": "127.0.0.1"}, ("here", "")),  # ray:// leads to the head
        ("head", {"head": "198.51.100.1", "other": "198.51.100.2"}, ("head", " of node 198.51.100.1")),  # typed outside
    ],
)
def test_the_front_is_where_the_command_was_typed(connected, nodes, front):
    listed = [{"NodeID": name, "NodeManagerAddress": address, "Alive": True} for name, address in nodes.items()]
    gone = {"NodeID": "gone", "NodeManagerAddress": "127.0.0.1", "Alive": False}
    context = SimpleNamespace(get_node_id=lambda: connected)
    ray = SimpleNamespace(nodes=lambda: [gone, *listed], get_runtime_context=lambda: context)
    assert node_of_front(ray) == front


@dataclass
class Served:
    url: str
    process: subprocess.Popen[str]
    said: str  # what the command said of where it serves

    def ask(self, prompt, tokens=8):
        return ask(self.url, prompt, max_tokens=tokens)["text"]

    def load(self):
        loaded = json.load(urllib.request.urlopen(f"{self.url}/load"))
        return loaded

    def replicas(self):
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in found if p.cmdline() and p.cmdline()[0].startswith("ray::ServeReplica")]


@contextlib.contextmanager
def serving(bundle, *options):
    """Two replicas, until the command is stopped."""
    command = [sys.executable, "-m", "moepack", "serve", str(bundle), "--port", "0", "--name", "mini"]
    command += ["--replicas", "2", "--device-memory", "5MB", "--step-tokens", "64", *options]
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    for line in process.stderr:
        if found := re.search(r"moepack: serving mini at (http://127.0.0.1:\d+), 2 replicas", line):
            yield Served(found[1], process, line)
            break
    else:
        pytest.fail("it ended before it answered")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{found[1]}/health", timeout=5)


@pytest.fixture(scope="module")
def served(bundle):
    with serving(bundle) as running:
        yield running


def test_many_are_answered_and_each_replica_keeps_its_beginnings(served):
    prompts = [f"{word} history of the town" for word in ("The", "A", "Our", "One", "Some", "His")]
    alone = [served.ask(prompt) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert all(list(pool.map(served.ask, prompts * 3)))
    assert len(alone) == 6 and json.load(urllib.request.urlopen(f"{served.url}/health"))["status"] == "ok"
    streamed = post(f"{served.url}/v1/completions", {"prompt": prompts[0], "max_tokens": 8, "stream": True})
    assert streamed.rstrip().endswith(b"data: [DONE]")
    replicas = served.replicas()
    assert len(replicas) == 2

    def work():
        return [sum(p.cpu_times()[:2]) for p in replicas]

    time.sleep(1)
    before = work()
    for _ in range(12):
        served.ask(prompts[0], 48)
    busy = sorted(now - then for now, then in zip(work(), before, strict=True))
    assert busy[1] > 3 * busy[0], "requests with one beginning go to one replica"
    with pytest.raises(urllib.error.HTTPError, match="400"):
        served.ask("x", -1)


def test_the_load_is_that_of_all_replicas(served):
    def load():
        found = served.load()
        each = found.pop("replicas")
        assert len(each) == 2 and found == {name: sum(one[name] for one in each) for name in found}
        return {**found, "busy": sum(one["running"] > 0 for one in each)}

    idle = load()
    assert idle["server_load"] == idle["busy"] == 0 and idle["max_sequences"] > 2
    prompts = [f"{letter} town of" for letter in "abcdefgh"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(served.ask, prompt, 200) for prompt in prompts]
        until, most, busy = time.monotonic() + 60, 0, 0
        while time.monotonic() < until and (most < 3 or busy < 2) and not all(one.done() for one in answers):
            most, busy = max(most, (now := load())["server_load"]), max(busy, now["busy"])
    assert most >= 3 and busy == 2


def test_a_replica_that_dies_is_started_anew(served):
    gone = served.replicas()[0]
    gone.kill()
    until, answered = time.monotonic() + 120, 0
    while time.monotonic() < until and (answered < 8 or len(served.replicas()) < 2):
        try:
            answered += bool(served.ask(f"{answered} apples"))
        except urllib.error.HTTPError as error:
            assert error.code == 503
            time.sleep(0.2)
    assert answered >= 8 and len(served.replicas()) == 2 and gone.pid not in {p.pid for p in served.replicas()}


def streamed(url, prompt, tokens, begun):
    """The text of a greedy completion, and whether it came to its end. `begun` counts down with its first token."""
    body = {"model": "mini", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body | {"stream": True}).encode(), JSON)
    text, ended = "", False
    with contextlib.suppress(OSError, http.client.HTTPException), urllib.request.urlopen(request) as answer:
        for line in answer:
            piece = line.removeprefix(b"data: ").strip()
            if piece and piece != b"[DONE]":
                text += json.loads(piece)["choices"][0]["text"]
                begun.release()
            ended = ended or piece == b"[DONE]"
    return text, ended


def test_two_nodes(bundle, tmp_path):
    """Each node has a replica, and the front is beside the command. A node that is killed takes its own requests with
    it, and no others: those of the other node end as they would have, and it answers new ones."""
    from ray.cluster_utils import Cluster

    (victim := Victim(bundle, tmp_path)).rewrite("generation_config.json", b'{"top_k": 20}')
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        other = cluster.add_node(num_cpus=1)
        options = ("--device-memory", "30MB", "--policy", "static:w4", "--address", cluster.address)
        with serving(victim.path, *options) as served:
            assert served.said.endswith("2 replicas; sampling by generation_config.json: top_k 20\n")
            raylet = psutil.Process(other.all_processes["raylet"][0].process.pid)
            titles = [p.cmdline()[0] for p in raylet.children() if p.cmdline()]
            assert [t for t in titles if "Door" in t] == [] and [t for t in titles if "ServeReplica" in t]

            prompts = [f"{letter} town of" for letter in "abcdefgh"]
            begun = threading.Semaphore(0)
            with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
                asked = [pool.submit(streamed, served.url, prompt, 1500, begun) for prompt in prompts]
                running = [0]
                while min(running) == 0 or sum(running) < len(prompts):
                    assert begun.acquire(timeout=120) and not any(one.done() for one in asked)
                    running = [one["running"] for one in served.load()["replicas"]]
                for process in (raylet, *raylet.children(recursive=True)):
                    process.kill()
                answers = dict(zip(prompts, (one.result() for one in asked), strict=True))
            kept = [prompt for prompt, (_, ended) in answers.items() if ended]
            assert len(kept) in running and 0 < len(kept) < len(prompts)
            for prompt, (text, ended) in answers.items():  # what was lost is served now
                again = ask(served.url, prompt, max_tokens=1500, ignore_eos=True)["text"]
                assert again == text if ended else again.startswith(text)
    finally:
        cluster.shutdown()
