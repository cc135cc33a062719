"""push and pull over real HTTP against a stand-in Hub; loading a bundle by its Hub id."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_client import Client
from hub_client import client as start
from support import tree

import moepack
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.pipeline.shrink import shrink
from moepack.reports.plan import plan
from moepack.reports.verify import verify
from moepack.runtime.planning.options import LoadOptions

Edit = Callable[[Path, Callable[[dict], None]], None]


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with start(tmp_path_factory.mktemp("client")) as client:
        yield client


@pytest.fixture
def client(clients: Client) -> Client:
    """With an empty Hub and nothing downloaded."""
    return clients.reset()


@pytest.fixture(scope="module")
def hub_of_mini(clients: Client, bundle: Path) -> tuple[Any, ...]:
    """What a Hub holds once the bundle was pushed as someone/mini."""
    hub = clients.reset().hub
    assert clients("push", bundle, "someone/mini", "-q").returncode == 0
    return hub.files, hub.history, hub.objects, hub.commits


@pytest.fixture
def pushed(hub_of_mini: tuple[Any, ...], client: Client) -> None:
    """The client's Hub holds it."""
    hub = client.hub
    hub.files, hub.history, hub.objects, hub.commits = copy.deepcopy(hub_of_mini)


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


@pytest.mark.usefixtures("pushed")
def test_pull_some_versions_fetches_only_those(client: Client, bundle: Path, tmp_path: Path) -> None:
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


def test_pull_versions_of_dense_matrices(client: Client, demo_model: Path, text: Path, tmp_path: Path) -> None:
    """The most precise where none is named, the named one alone, another one later."""
    recipe = parse_recipe(
        "versions: [w4]\ndense: [w8, w4]\nquantize: {method: rtn}\ncalibration: {samples: 4, length: 64}\n", "r"
    )
    build(demo_model, tmp_path / "b", recipe, [text])
    assert client("push", tmp_path / "b", "someone/mini", "-q").returncode == 0
    for options, wanted in (((), {"bf16"}), (("--dense", "w8"), {"w8"})):
        client.hub.requests.clear()
        out = client("pull", "someone/mini", "-o", tmp_path / f"got{len(options)}", "-q", *options)
        assert out.returncode == 0, out.stderr
        assert {path.split("/")[-2] for _, path in client.hub.requests if "/dense/" in path} == wanted
        opened = moepack.open(tmp_path / f"got{len(options)}")
        assert {v.name for v in opened.dense_versions} == wanted and opened.verify() == []
    for options, here in ((("--versions", "w4"), ["w8"]), (("--dense", "w4"), ["w8", "w4"])):
        out = client("pull", "someone/mini", "-o", tmp_path / "got2", "-q", *options)
        assert out.returncode == 0, out.stderr
        assert [v.name for v in moepack.open(tmp_path / "got2").dense_versions] == here
    out = client("pull", "someone/mini", "-o", tmp_path / "none", "--dense", "w3", "-q")
    assert out.returncode == 2 and "no version w3 of dense matrices: it has bf16, w8, w4" in out.stderr


@pytest.mark.usefixtures("pushed")
def test_load_by_hub_id(client: Client, bundle: Path, tmp_path: Path) -> None:
    """transformers fetches config and dense tensors; the plug-in what the policy needs, at the same commit."""
    begin = "import moepack\nfrom transformers import AutoModelForCausalLM\n"
    table = tmp_path / "map.json"
    table.write_text(json.dumps({"versions": [["w4"] * 16] * 3 + [["w3"] * 16]}))
    asked: dict[str, set[str]] = {}
    for call in (
        "moepack.load('someone/mini', policy='static:w2')",
        "AutoModelForCausalLM.from_pretrained('someone/mini', policy='static:w1')",
        f"moepack.load('someone/mini', policy='static:{table}')",
        "moepack.load('someone/mini', policy='hotness:hi=w4,lo=w2', device_memory='30MB')",
        "AutoModelForCausalLM.from_pretrained('someone/mini')",
    ):
        client.hub.requests.clear()
        out = client.python(f"{begin}model = {call}\nprint(model.moepack.policy)\nmodel.moepack.close()")
        assert out.returncode == 0, out.stderr
        got = {p.split("/")[-2] for m, p in client.hub.requests if m == "GET" and "/experts/" in p}
        asked[out.stdout.strip()] = got
    assert asked == {
        "static:w2": {"w2"}, "static:w1": {"w1"}, f"static:{table}": {"w4", "w3"},
        "hotness:hi=w4,lo=w2": set(), "static": {"bf16"},
    }, "what one policy fetched is there for the next"  # fmt: skip


def test_build_from_a_hub_id(client: Client, demo_model: Path, text: Path, tmp_path: Path) -> None:
    client.hub.files["someone/model"] = {p.name: p.read_bytes() for p in demo_model.iterdir()}
    recipe = tmp_path / "r.yaml"
    recipe.write_text("quantize: {method: rtn}\ncalibration: {samples: 4, length: 64}\nversions: [bf16, w2]\n")
    out = client("build", "someone/model", "-o", tmp_path / "b", "-r", recipe, "-c", text, "-q")
    assert out.returncode == 0, out.stderr
    assert verify(tmp_path / "b", demo_model) == []


@pytest.mark.usefixtures("pushed")
def test_eval_and_generate_by_hub_id(client: Client, bundle: Path, demo_model: Path, evaluation: Path) -> None:
    """Bundles and plain checkpoints; the same numbers as from their directories."""
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
    to = ("-o", tmp_path / "a", "-q")
    fails("no such directory, and no such repository on the Hub", "build", "no/where", *to, "-c", text)
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


# --- what is stopped, and what is there already


def test_a_push_that_is_killed_goes_on(client: Client, bundle: Path, tmp_path: Path) -> None:
    """At every moment the repository is no bundle, or all of one; what was sent is not sent again."""
    assert client("push", bundle, "someone/mini", "-q").returncode == 0
    expected, count = client.hub.files["someone/mini"], len(client.hub.requests)
    client.hub.clear()
    kills = 0
    for at in (2, 9, 21, count - 3):
        kills += client.killed_at(at, "push", bundle, "someone/mini", "-q")
        there = client.hub.files.get("someone/mini", {})
        assert "manifest.json" not in there or there == expected
        if "manifest.partial.json" in there:
            out = client("pull", "someone/mini", "-o", tmp_path / "early", "-q")
            assert out.returncode == 2 and "a push to it has not ended" in out.stderr, out.stderr
            assert not (tmp_path / "early").exists()
    assert kills >= 3
    held = set(client.hub.objects)
    client.hub.requests.clear()
    out = client("push", bundle, "someone/mini", "-q")
    assert out.returncode == 0, out.stderr
    assert client.hub.files["someone/mini"] == expected
    assert held.isdisjoint(path.rpartition("/")[2] for method, path in client.hub.requests if method == "PUT")
    commits = client.hub.commits["someone/mini"]
    assert client("push", bundle, "someone/mini", "-q").returncode == 0
    assert client.hub.commits["someone/mini"] == commits, "what is there needs no commit"


@pytest.mark.usefixtures("pushed")
def test_a_pull_that_is_killed_goes_on(client: Client, bundle: Path, tmp_path: Path) -> None:
    """At a request, or between two moves into the target; a retry with the same command completes it."""
    sent = client.hub.files["someone/mini"]
    client.hub.requests.clear()
    target, chance = tmp_path / "got", random.Random(1)
    assert client("pull", "someone/mini", "-o", tmp_path / "whole", "-q").returncode == 0
    count, kills = len(client.hub.requests), 0
    for _ in range(3):
        kills += client.killed_at(chance.randrange(8, count // 2), "pull", "someone/mini", "-o", target, "-q")
        assert not (target / "manifest.json").exists()
    assert kills >= 2
    for move in (1, 5):
        out = client.python(
            "import os, signal, pathlib\nfrom moepack.hub import pull\ncount = 0\n"
            "def planted(name):\n real = getattr(pathlib.Path, name)\n def move(*a):\n  global count\n  count += 1\n"
            f"  if count == {move}: os.kill(os.getpid(), signal.SIGKILL)\n  return real(*a)\n return move\n"
            "pathlib.Path.rename, pathlib.Path.replace = planted('rename'), planted('replace')\n"
            f"pull('someone/mini', {str(target)!r})"
        )
        assert out.returncode == -9, out.stderr
        assert not (target / "manifest.json").exists()
    client.hub.requests.clear()
    out = client("pull", "someone/mini", "-o", target, "-q")
    assert out.returncode == 0, out.stderr
    assert not [p for m, p in client.hub.requests if m == "GET" and "/experts/" in p], "all were there"
    got = tree(target)
    assert {n: d for n, d in got.items() if n != ".pulled.json"} == sent
    assert not (target / ".pulling").exists() and verify(target) == []


@pytest.mark.usefixtures("pushed")
def test_a_file_that_was_cut_off_is_resumed(client: Client, bundle: Path, tmp_path: Path) -> None:
    name = "model.safetensors"
    client.hub.cut_after[name] = 300_000
    pulling = (
        "import huggingface_hub.constants as c\nfrom moepack.hub import pull\nc.DOWNLOAD_CHUNK_SIZE = 65536\n"
        f"pull('someone/mini', {str(tmp_path / 'got')!r}, ['w1'])"
    )
    for _ in range(2):  # the library may have tried again by itself
        client.python(pulling)
    assert client.hub.ranges and max(client.hub.ranges) <= 300_000 and verify(tmp_path / "got") == []
    assert (tmp_path / "got" / name).read_bytes() == (bundle / name).read_bytes()


@pytest.mark.usefixtures("pushed")
def test_a_version_is_added_from_where_the_others_came(client: Client, bundle: Path, tmp_path: Path) -> None:
    """The repository has another build of the model by then."""
    target, w4 = tmp_path / "got", ("pull", "someone/mini", "-o", tmp_path / "got", "--versions", "w4", "-q")
    out = client("pull", "someone/mini", "-o", target, "--add", "w2", "-q")
    assert out.returncode == 2 and "not a bundle to add a version to" in out.stderr
    assert client(*w4).returncode == 0
    shrink(bundle, tmp_path / "other", ["w2", "w1"])
    out = client("push", tmp_path / "other", "someone/mini", "-q")
    assert out.returncode == 0, out.stderr
    assert not [n for n in client.hub.files["someone/mini"] if "/w4/" in n or "partial" in n]
    out = client("pull", "someone/mini", "-o", target, "--add", "w2", "-q")
    assert out.returncode == 0, out.stderr
    assert [v.name for v in moepack.open(target).versions] == ["w4", "w2"] and verify(target) == []
    out = client("pull", "someone/mini", "-o", target, "--versions", "w2", "--revision", "main", "-q")
    assert out.returncode == 2 and "not this bundle" in out.stderr
    out = client("pull", "someone/mini", "-o", tmp_path / "both", "--versions", "w2", "--add", "w1", "-q")
    assert out.returncode == 2 and "give one of them" in out.stderr


@pytest.mark.usefixtures("pushed")
def test_a_budget_chooses_what_is_fetched(client: Client, bundle: Path, tmp_path: Path) -> None:
    least = plan(bundle, LoadOptions(device_memory=1 << 30, all_logits=False, kv_tokens=576)).least_bytes
    client.hub.requests.clear()
    out = client("pull", "someone/mini", "-o", tmp_path / "got", "--fit", str(least), "-q", "--json")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["versions"] == ["w1"]
    assert {p.split("/")[-2] for m, p in client.hub.requests if "/experts/" in p} == {"w1"}
    out = client("pull", "someone/mini", "-o", tmp_path / "none", "--fit", "1MB", "-q")
    assert out.returncode == 2 and f"the least that would do is {least} bytes" in out.stderr
    assert not (tmp_path / "none").exists()


def test_a_repository_of_something_else_is_left_alone(
    client: Client, bundle: Path, damaged: Path, edit_manifest: Edit
) -> None:
    def refused(word: str, path: Path) -> None:
        before = dict(client.hub.files["someone/mini"])
        out = client("push", path, "someone/mini", "-q")
        assert out.returncode == 2 and word in out.stderr and client.hub.files["someone/mini"] == before, out.stderr

    client.hub.files["someone/mini"] = {".gitattributes": b"", "config.json": b"{}"}
    refused("holds config.json, and is not a bundle", bundle)
    client.hub.files["someone/mini"] = {"manifest.json": b"{}", "a": b""}
    refused("is not a bundle's", bundle)
    client.hub.files["someone/mini"] = {".gitattributes": b"", "README.md": b"---\nlicense: mit\n---\n"}
    edit_manifest(damaged, lambda m: m["provenance"]["checkpoint"]["files"].update({"model.safetensors": "0" * 64}))
    assert client("push", damaged, "someone/mini", "-q").returncode == 0
    refused("holds a bundle of another model", bundle)
    client.hub.files["someone/mini"]["manifest.partial.json"] = client.hub.files["someone/mini"].pop("manifest.json")
    refused("holds a bundle of another model", bundle)


def test_a_part_of_a_bundle_is_pushed_as_what_it_is(client: Client, bundle: Path, tmp_path: Path) -> None:
    """And a branch is one of its own."""
    part = Path(shutil.copytree(bundle, tmp_path / "part", ignore=shutil.ignore_patterns("bf16", "w3", "w1")))
    out = client("push", part, "someone/mini", "--revision", "part", "--base-model", "some/base", "-q")
    assert out.returncode == 0, out.stderr
    assert client.hub.files["someone/mini"] == {}
    out = client("pull", "someone/mini", "-o", tmp_path / "got", "--revision", "part", "-q", "--json")
    assert out.returncode == 0 and json.loads(out.stdout)["versions"] == ["w4", "w2"], out.stderr
    card = (tmp_path / "got" / "README.md").read_text()
    assert "base_model: some/base" in card and "| w4 |" in card and "| w3 |" not in card
    out = client("pull", "someone/mini", "-o", tmp_path / "more", "--revision", "part", "--versions", "w3", "-q")
    assert out.returncode == 2 and "has no version w3: it has w4, w2" in out.stderr
    assert client("push", bundle, "someone/mini", "--revision", "part", "-q").returncode == 0
    out = client("pull", "someone/mini", "-o", tmp_path / "got", "--revision", "part", "--add", "w3", "-q")
    assert out.returncode == 0, out.stderr


# --- what a stranger's repository may hold


def test_hostile_repositories(client: Client, bundle: Path, tmp_path: Path, edit_manifest: Edit) -> None:
    """Nothing is written outside the target, nothing that the manifest does not name, and each ends in one line."""
    whole = tree(bundle)
    digest = {"size": 4, "sha256": "0" * 64}

    def with_file(name: str) -> dict[str, bytes]:
        copy = Path(shutil.copytree(bundle, tmp_path / "copy", dirs_exist_ok=True))
        edit_manifest(copy, lambda m: m["files"].update({name: digest}))
        return {**tree(copy), name: b"evil"}

    cases = {
        "outside": with_file("../evil"), "absolute": with_file("/tmp/evil"), "hidden": with_file(".pulling/lock"),
        "a folder as a file": with_file("experts"), "digest": with_file("evil"), "long": with_file("e" * 300),
        "a size": {**whole, "tokenizer.json": b"x" * 10_000_000}, "missing": {**whole} | {"gone": b""},
        "not JSON": {**whole, "manifest.json": b"{"}, "deep": {**whole, "manifest.json": b"[" * 100_000},
        "long manifest": {**whole, "manifest.json": bytes((64 << 20) + 1)},
        "a link": {**whole, "config.json": b"../../x"},
    }  # fmt: skip
    del cases["missing"]["tokenizer.json"]
    area = tmp_path / "area"
    for name, files in cases.items():
        client.reset()
        client.hub.files["someone/mini"] = files
        area.mkdir()
        out = client("pull", "someone/mini", "-o", area / "got", "--versions", "w1", "-q")
        lines = [line for line in out.stderr.splitlines() if line.strip()]
        assert out.returncode == 2 and len(lines) == 1 and lines[0].startswith("moepack: "), (name, out.stderr)
        assert {p.name for p in area.iterdir()} <= {"got"} and not (area / "got" / "manifest.json").exists(), name
        shutil.rmtree(area)
    client.reset()
    client.hub.files["someone/mini"] = {**whole, "extra.py": b"evil", "experts/w1/extra.safetensors": b"evil"}
    out = client("pull", "someone/mini", "-o", area, "--versions", "w1", "-q")
    assert out.returncode == 0, out.stderr
    assert not [n for n in tree(area) if "extra" in n]
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(area / "experts")
    (area / "experts").symlink_to(tmp_path / "elsewhere")
    out = client("pull", "someone/mini", "-o", area, "--versions", "w1", "-q")
    assert out.returncode == 2 and "is a link" in out.stderr and not list((tmp_path / "elsewhere").iterdir())
