"""push and pull over real HTTP against a stand-in Hub; loading a bundle by its Hub id."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_stand_in import Hub, serve
from support import HELPERS

import moepack
from moepack.reports.verify import verify


@dataclass
class Client:
    """Runs moepack apart from this process, pointed at the stand-in: the Hub library reads its address on import.

    Every command is a child of one process that has imported everything (command_server.py).
    """

    hub: Hub
    home: Path
    server: subprocess.Popen[str]

    def __call__(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return self._run({"arguments": [str(a) for a in arguments]})

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self._run({"code": code})

    def _run(self, task: dict[str, object]) -> subprocess.CompletedProcess[str]:
        assert self.server.stdin is not None and self.server.stdout is not None
        files = {name: self.home / name for name in ("stdout", "stderr")}
        print(json.dumps(task | {k: str(v) for k, v in files.items()}), file=self.server.stdin, flush=True)
        code = int(self.server.stdout.readline())
        return subprocess.CompletedProcess([], code, *(path.read_text() for path in files.values()))


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home = tmp_path_factory.mktemp("client")
    server, hub, address = serve()
    environment = {
        **os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home / "hf"), "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None)
    command, pipe = [sys.executable, str(HELPERS / "command_server.py")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment) as p:
        yield Client(hub, home, p)
        assert p.stdin is not None
        p.stdin.close()
    server.shutdown()


@pytest.fixture
def client(clients: Client) -> Client:
    """With an empty Hub and nothing downloaded."""
    clients.hub.clear()
    shutil.rmtree(clients.home / "hf", ignore_errors=True)
    return clients


def test_push_and_pull_whole(client: Client, bundle: Path, tmp_path: Path) -> None:
    out = client("push", bundle, "someone/mini", "--json", "-q")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["repo"] == "someone/mini"
    sent = client.hub.files["someone/mini"]
    assert set(sent) == {*(str(p.relative_to(bundle)) for p in bundle.rglob("*") if p.is_file()), "losses.png"}
    assert all(sent[name] == (bundle / name).read_bytes() for name in set(sent) - {"README.md", "losses.png"})
    out = client("pull", "someone/mini", "-o", tmp_path / "got", "--json", "-q")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["versions"] == ["bf16", "w4", "w3", "w2", "w1"]
    assert verify(tmp_path / "got") == []
    assert all((tmp_path / "got" / name).read_bytes() == sent[name] for name in sent)


def test_pull_some_versions_fetches_only_those(client: Client, bundle: Path, tmp_path: Path) -> None:
    assert client("push", bundle, "someone/mini", "-q").returncode == 0
    client.hub.requests.clear()
    out = client("pull", "someone/mini", "-o", tmp_path / "got", "--versions", "w4", "-q")
    assert out.returncode == 0, out.stderr
    asked = {path for method, path in client.hub.requests if "/experts/" in path}
    assert asked and all("/experts/w4/" in path for path in asked)
    assert sorted(p.name for p in (tmp_path / "got" / "experts").iterdir()) == ["w4"]
    assert verify(tmp_path / "got") == [] and [v.name for v in moepack.open(tmp_path / "got").versions] == ["w4"]
    moepack.load(tmp_path / "got")
    out = client("pull", "someone/mini", "-o", tmp_path / "got", "--versions", "w1,w2", "-q")
    assert out.returncode == 0, out.stderr
    assert [v.name for v in moepack.open(tmp_path / "got").versions] == ["w4", "w2", "w1"]


def test_load_by_hub_id(client: Client, bundle: Path) -> None:
    """transformers fetches config and dense tensors; the plug-in fetches the rest at the same commit."""
    assert client("push", bundle, "someone/mini", "-q").returncode == 0
    out = client.python(
        "import moepack\nfrom transformers import AutoModelForCausalLM\n"
        "print(AutoModelForCausalLM.from_pretrained('someone/mini').moepack.policy)\n"
        "print(moepack.load('someone/mini', policy='static:w2').moepack.policy)"
    )
    assert out.returncode == 0, out.stderr
    assert out.stdout.split() == ["static", "static:w2"]


def test_build_from_a_hub_id(client: Client, demo_model: Path, text: Path, tmp_path: Path) -> None:
    client.hub.files["someone/model"] = {p.name: p.read_bytes() for p in demo_model.iterdir()}
    recipe = tmp_path / "r.yaml"
    recipe.write_text("quantize: {method: rtn}\ncalibration: {samples: 4, length: 64}\nversions: [bf16, w2]\n")
    out = client("build", "someone/model", "-o", tmp_path / "b", "-r", recipe, "-c", text, "-q")
    assert out.returncode == 0, out.stderr
    assert verify(tmp_path / "b", demo_model) == []


def test_eval_and_generate_by_hub_id(client: Client, bundle: Path, demo_model: Path, evaluation: Path) -> None:
    """Bundles and plain checkpoints; the same numbers as from their directories."""
    assert client("push", bundle, "someone/mini", "-q").returncode == 0
    client.hub.files["someone/model"] = {p.name: p.read_bytes() for p in demo_model.iterdir()}
    options = ("-d", evaluation, "--length", "32", "--samples", "2", "-q", "--json")
    for name, path, policy in (
        ("someone/mini", bundle, ("--policy", "static:w2")),
        ("someone/model", demo_model, ()),
    ):
        scores = []
        for source in (name, path):
            out = client("eval", source, *options, *policy)
            assert out.returncode == 0, out.stderr
            scores.append(json.loads(out.stdout))
        assert scores[0]["perplexity"] == scores[1]["perplexity"]
        assert scores[0]["policy"] == scores[1]["policy"] == (policy[1] if policy else None)
    words = ("--prompt", "The river", "--max-new-tokens", "3")
    texts = [client("generate", source, *words).stdout for source in ("someone/mini", bundle)]
    assert texts[0] == texts[1] and texts[0].startswith("The river")


def test_errors_are_one_line(client: Client, bundle: Path, damaged: Path, text: Path, tmp_path: Path) -> None:
    def fails(word: str, *arguments: str | Path) -> None:
        out = client(*arguments)
        lines = [line for line in out.stderr.splitlines() if line.strip()]
        assert out.returncode == 2 and len(lines) == 1 and word in lines[0], (out.stderr, out.stdout)

    fails("no such repository", "pull", "no/where", "-o", tmp_path / "a", "-q")
    data = ("-d", text, "-q")
    fails("no such directory, and no such repository on the Hub", "eval", "no/where", *data)
    fails("no such directory, and no such repository on the Hub", "generate", "no/where", "--prompt", "a")
    fails(
        "no such directory, and no such repository on the Hub",
        "build",
        "no/where",
        "-o",
        tmp_path / "a",
        "-c",
        text,
        "-q",
    )
    fails("no such directory", "eval", "./no/where", *data)
    client.hub.files["someone/other"] = {"README.md": b"hello"}
    fails("has no config.json", "eval", "someone/other", *data)
    fails("not a moepack bundle", "pull", "someone/other", "-o", tmp_path / "a", "-q")
    fails("version 'w9' is unknown", "pull", "someone/other", "-o", tmp_path / "a", "--versions", "w9", "-q")
    assert client("push", bundle, "someone/mini", "-q").returncode == 0
    assert not (tmp_path / "a").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    fails("not empty", "pull", "someone/mini", "-o", tmp_path / "full", "-q")
    (damaged / "tokenizer_config.json").write_text("edited")
    fails("tokenizer_config.json", "push", damaged, "someone/damaged", "-q")
    assert "someone/damaged" not in client.hub.files
    client.hub.fail_commits = True
    fails("someone/new", "push", bundle, "someone/new", "-q")
    client.hub.fail_commits = False
    name = "experts/w2/layer-001.safetensors"
    data = bytearray(client.hub.files["someone/mini"][name])
    data[-5] ^= 1
    client.hub.files["someone/mini"][name] = bytes(data)
    fails("pull again", "pull", "someone/mini", "-o", tmp_path / "c", "-q")
    kept = tmp_path / "c" / ".pulling" / "files"
    assert not (kept / name).exists() and (kept / "experts/w2/layer-002.safetensors").exists()
    assert not (tmp_path / "c" / "manifest.json").exists() and not (tmp_path / "c" / "experts").exists()
    client.hub.files["someone/mini"][name] = (bundle / name).read_bytes()
    assert client("pull", "someone/mini", "-o", tmp_path / "c", "-q").returncode == 0
