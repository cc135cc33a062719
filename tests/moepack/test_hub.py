"""push and pull over real HTTP against a stand-in Hub; loading a bundle by its Hub id."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hub_stand_in import Hub, point, serve, without_waits
from huggingface_hub.utils import enable_progress_bars
from native_checkpoints import exported, logits, released, small
from support import NATIVE, RTN, build_from, cli, forked, ok, refused, spy, tree

import moepack
from moepack.export import export_checkpoint
from moepack.hub import pull, upload
from moepack.pack.errors import InputError, MoepackError
from moepack.pack.manifest import LEFTOVERS
from moepack.pipeline.shrink import shrink
from moepack.reports.plan import plan
from moepack.reports.verify import verify
from moepack.runtime.planning.options import LoadOptions
from moepack.shared.progress import LineReporter, progress, size


@dataclass
class Client:
    """Runs moepack, pointed at the stand-in."""

    hub: Hub
    cache: Path

    def push(self, bundle, *more):
        return cli("push", bundle, "someone/mini", "-q", *more)

    def pull(self, to, *more):
        return cli("pull", "someone/mini", "-o", to, "-q", *more)

    def killed_at(self, request, *arguments):
        """Run a command in a process that is killed when it sends its n-th request; False where it ended before."""

        def kill(method, path):
            if len(self.hub.requests) >= request:
                os.kill(child, signal.SIGKILL)
                return True
            return False

        self.hub.requests.clear()
        child = forked(lambda: ok(cli(*arguments)))
        self.hub.cut = kill
        try:
            return killed(child)
        finally:
            self.hub.cut = None

    def fetched(self, folder="experts"):
        """The versions of experts or dense matrices that were fetched."""
        return {path.split("/")[-2] for method, path in self.hub.requests if method == "GET" and f"/{folder}/" in path}

    def reset(self):
        """With an empty Hub and nothing downloaded."""
        self.hub.clear()
        shutil.rmtree(self.cache, ignore_errors=True)
        return self


def killed(child):
    """Wait for a process to end; whether it was killed."""
    status = os.waitpid(child, 0)[1]
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


@pytest.fixture(scope="module")
def clients(tmp_path_factory):
    """The Hub library speaks to a stand-in. One picture is drawn, and all cards have it."""
    cache, draw, drawn = tmp_path_factory.mktemp("hub"), upload.plot, tmp_path_factory.mktemp("drawn") / "losses.png"

    def plot(path, out):
        if not drawn.exists():
            draw(path, drawn)
        shutil.copy(drawn, out)

    with serve() as (hub, address), pytest.MonkeyPatch.context() as patch:
        point(patch, address, cache)
        patch.setattr(upload, "plot", plot)
        yield Client(hub, cache)


@pytest.fixture
def client(clients):
    """With an empty Hub and nothing downloaded."""
    return clients.reset()


@pytest.fixture(scope="module")
def hub_of_mini(clients, bundle):
    """What a Hub holds once the bundle was pushed as someone/mini."""
    assert json.loads(ok(clients.reset().push(bundle, "--json")))["repo"] == "someone/mini"
    return dict(vars(clients.hub))


@pytest.fixture
def pushed(hub_of_mini, client):
    """The client's Hub holds it."""
    vars(client.hub).update(copy.deepcopy(hub_of_mini))


@pytest.mark.usefixtures("pushed")
def test_versions_are_added_from_where_the_others_came(client, bundle, tmp_path):
    """No other version is fetched. The repository has another build of the model by then."""
    target = tmp_path / "got"
    refused(client.pull(target, "--add", "w2"), "not a bundle to add a version to")
    ok(client.pull(target, "--versions", "w4"))
    assert client.fetched() == {"w4"}
    assert verify(target) == [] and [v.name for v in moepack.open(target).versions] == ["w4"]
    moepack.load(target)
    shrink(bundle, tmp_path / "other", ["w2", "w1"])
    ok(client.push(tmp_path / "other"))
    assert not [n for n in client.hub.files["someone/mini"] if "/w4/" in n or "partial" in n]
    ok(client.pull(target, "--add", "w1,w2"))
    assert [v.name for v in moepack.open(target).versions] == ["w4", "w2", "w1"] and verify(target) == []
    refused(client.pull(target, "--versions", "w2", "--revision", "main"), "not this bundle")
    refused(client.pull(tmp_path / "both", "--versions", "w2", "--add", "w1"), "give one of them")


def test_pull_versions_of_dense_matrices(client, short_model, text, tmp_path):
    """The most precise where none is named, the named one alone, another one later."""
    build_from(RTN + "versions: [w4]\ndense: [w8, w4]\n", short_model, tmp_path / "b", [text])
    ok(client.push(tmp_path / "b"))
    for options, wanted in (((), {"bf16"}), (("--dense", "w8"), {"w8"})):
        client.hub.requests.clear()
        ok(client.pull(tmp_path / f"got{len(options)}", *options))
        assert client.fetched("dense") == wanted
        opened = moepack.open(tmp_path / f"got{len(options)}")
        assert {v.name for v in opened.dense_versions} == wanted and opened.verify() == []
    for options, here in ((("--versions", "w4"), ["w8"]), (("--dense", "w4"), ["w8", "w4"])):
        ok(client.pull(tmp_path / "got2", *options))
        assert [v.name for v in moepack.open(tmp_path / "got2").dense_versions] == here
    ok(cli("push", tmp_path / "got0", "someone/exact", "-q"))  # its card has rows for what is there
    card = client.hub.files["someone/exact"]["README.md"].decode()
    assert [line.split()[1] for line in card.splitlines() if " matrices outside the experts: " in line] == ["bf16"]
    refused(client.pull(tmp_path / "none", "--dense", "w3"), "no version w3 of dense matrices: it has bf16, w8, w4")


def test_a_released_checkpoint(client, demo_model, text, tmp_path):
    """Its versions come alone or all; what is pulled makes the checkpoint again."""
    released(small(demo_model, tmp_path / "plain"), tmp_path / "checkpoint", "ct nvfp4")
    build_from(NATIVE, tmp_path / "checkpoint", tmp_path / "b", [text])
    ok(client.push(tmp_path / "b"))
    ok(client.pull(tmp_path / "low", "--versions", "w2"))
    assert [v.name for v in moepack.open(tmp_path / "low").versions] == ["w2"] and verify(tmp_path / "low") == []
    assert torch.equal(*(logits(tmp_path / name, policy="static:w2") for name in ("low", "b")))
    shrink(tmp_path / "low", tmp_path / "less", ["w2"])
    moepack.load("someone/mini", policy="static:nvfp4").moepack.close()
    (snapshot,) = client.cache.glob("**/snapshots/*")
    assert (tmp_path / "b" / LEFTOVERS).exists()
    assert not any((p / LEFTOVERS).exists() for p in (tmp_path / "low", snapshot))
    with pytest.raises(InputError, match=r"released\.safetensors is not here, which export needs: pull the bundle"):
        export_checkpoint(snapshot, tmp_path / "none")
    ok(client.pull(tmp_path / "low", "--versions", "nvfp4"))
    assert verify(tmp_path / "low", tmp_path / "checkpoint") == []
    assert exported(tmp_path / "low", tmp_path / "checkpoint", tmp_path / "again") == set()


@pytest.mark.usefixtures("pushed")
def test_load_by_hub_id(client, tmp_path):
    """transformers fetches config and dense tensors; the plug-in what the policy needs, at the same commit."""
    from transformers import AutoModelForCausalLM

    table = tmp_path / "map.json"
    table.write_text(json.dumps({"versions": [["w4"] * 16] * 3 + [["w3"] * 16]}))
    asked = {}
    for load, options in (
        (moepack.load, {"policy": "static:w2"}),
        (AutoModelForCausalLM.from_pretrained, {"policy": "static:w1"}),
        (moepack.load, {"policy": f"static:{table}"}),
        (moepack.load, {"policy": "hotness:hi=w4,lo=w2", "device_memory": "30MB"}),
        (AutoModelForCausalLM.from_pretrained, {}),
    ):
        client.hub.requests.clear()
        with load("someone/mini", **options).moepack as serving:
            asked[str(serving.policy)] = client.fetched()
    assert asked == {
        "static:w2": {"w2"}, "static:w1": {"w1"}, f"static:{table}": {"w4", "w3"},
        "hotness:hi=w4,lo=w2": set(), "static": {"bf16"},
    }, "what one policy fetched is there for the next"  # fmt: skip


@pytest.mark.usefixtures("pushed")
def test_eval_and_generate_by_hub_id(client, bundle, demo_model, evaluation):
    """A plain checkpoint and a bundle; the same as from their directories."""
    client.hub.files["someone/model"] = {p.name: p.read_bytes() for p in demo_model.iterdir()}
    options = ("-d", evaluation, "--length", "32", "--samples", "2", "-q", "--json")
    scores = [json.loads(ok(cli("eval", source, *options))) for source in ("someone/model", demo_model)]
    assert scores[0]["perplexity"] == scores[1]["perplexity"]
    words = ("--prompt", "The river", "--max-new-tokens", "3")
    texts = [ok(cli("generate", source, *words)) for source in ("someone/mini", bundle)]
    assert texts[0] == texts[1] and texts[0].startswith("The river")


def test_errors_are_one_line(client, bundle, damaged, text, tmp_path):
    """Names that stand for nothing are those of test_names.py."""
    client.hub.files["someone/other"] = {"README.md": b"hello"}
    refused(cli("eval", "someone/other", "-d", text, "-q"), "has no config.json")
    refused(cli("pull", "someone/other", "-o", tmp_path / "a", "-q"), "not a moepack bundle")
    refused(cli("pull", "someone/other", "-o", tmp_path / "a", "--versions", "w9", "-q"), "version 'w9' is unknown")
    ok(client.push(bundle))
    assert not (tmp_path / "a").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    refused(client.pull(tmp_path / "full"), "not empty")
    tokenizer = damaged / "tokenizer_config.json"
    tokenizer.write_text("x" * tokenizer.stat().st_size)
    mistyped = ("--measured", tmp_path / "none.json")  # told before all bytes of the bundle are read
    refused(cli("push", damaged, "someone/damaged", *mistyped, "-q"), "none.json: cannot be read")
    refused(cli("push", damaged, "someone/damaged", "-q"), "tokenizer_config.json")
    assert "someone/damaged" not in client.hub.files
    name = "experts/w2/layer-001.safetensors"
    client.hub.files["someone/mini"][name] = client.hub.files["someone/mini"][name][:-1] + b"x"
    refused(client.pull(tmp_path / "c"), "pull again")
    kept = tmp_path / "c" / ".pulling" / "files"
    assert not (kept / name).exists() and (kept / "experts/w2/layer-002.safetensors").exists()
    assert not (tmp_path / "c" / "manifest.json").exists() and not (tmp_path / "c" / "experts").exists()
    client.hub.files["someone/mini"][name] = (bundle / name).read_bytes()
    ok(client.pull(tmp_path / "c"))


# --- Hubs that refuse


def always(status, *ends):
    """Answers with a status whatever asks for one of these parts of a path."""
    return lambda method, path: (status, "Sorry.") if any(end in f"{method} {path}" for end in ends) else None


RETRIED = [1.0, 2.0, 4.0, 8.0, 8.0]
REFUSALS = {
    "a wrong token, push": ("push", {"token": "hf_wrong"}, "does not know the token that HF_TOKEN holds (401: I", []),
    "a reader": ("push", {"token": "hf_reader"}, "no right to write here (403: You need write", []),
    "another push": ("push", {"refuse": always(412, "/commit/")}, "changed the repository meanwhile", []),
    "too much": ("push", {"refuse": always(413, "/commit/")}, "refuses POST /api/models/someone/mini/commit", []),
    "busy at once": ("push", {"refuse": always(429, "/create"), "retry_after": "7"}, "limits requests (429", [7.0] * 5),
    "busy for files": ("push", {"refuse": always(500, "/objects/")}, "out of order (500: Sorry.)", RETRIED),
    "busy for the first file": ("pull", {"refuse": always(502, "/manifest.json")}, "out of order (502", RETRIED),
    "busy for a token": ("push-xet", {"refuse": always(503, "-token/")}, "out of order (503", RETRIED),
    "a wrong token for a tokenizer": ("generate", {"refuse": always(401, "/tokenizer")}, "the token that HF_TOKEN", []),
    "busy for experts' names": ("generate", {"refuse": always(429, "/paths-info/")}, "limits requests (429", RETRIED),
    "busy for how to sample": ("generate", {"refuse": always(502, "/generation_")}, "out of order (502", RETRIED),
    "no right to experts": ("generate", {"refuse": always(403, "/experts/")}, "no right to read here (403", []),
    "cut off while loading": ("generate", {"cut": lambda method, path: "/adapter" in path}, "cannot be reached", []),
}  # fmt: skip


@pytest.mark.usefixtures("pushed")
@pytest.mark.parametrize("case", REFUSALS)
def test_a_refusal_is_one_line_that_says_what_to_do(case, client, bundle, tmp_path, monkeypatch):
    """After as many tries as help."""
    what, how, words, waits = REFUSALS[case]
    monkeypatch.setenv("HF_TOKEN", how.get("token", "hf_test"))
    vars(client.hub).update({name: value for name, value in how.items() if name != "token"})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", what != "push-xet")
    slept = without_waits(monkeypatch)
    if what == "pull":
        result = client.pull(tmp_path / "got")
    elif what == "generate":
        result = cli("generate", "someone/mini", "--prompt", "The river", "--max-new-tokens", "2")
    else:
        client.hub.files["someone/mini"] = {}
        result = cli("push", bundle, "someone/mini", "-q")
    refused(result, "someone/", words)
    assert slept == waits


@pytest.mark.usefixtures("pushed")
def test_a_hub_that_is_busy_for_a_while_and_has_no_xet(client, bundle, tmp_path, monkeypatch):
    """Every request is refused once: push and pull end well, whole, and huggingface_hub's setting is as before."""
    from huggingface_hub import constants

    sent, seen = client.hub.files.pop("someone/mini"), set()
    ours, card = tree(bundle), {"README.md", "losses.png"}
    assert sent.keys() == ours.keys() | card and all(sent[name] == ours[name] for name in sent.keys() - card)

    def once(method, path):
        new = (method, path) not in seen
        seen.add((method, path))
        return (503 if len(seen) % 2 else 429, "Sorry.") if new else None

    client.hub.refuse = once
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    slept = without_waits(monkeypatch)
    code, _, err = cli("push", bundle, "someone/mini")
    assert code == 0 and "has no Xet storage: large files are sent as LFS objects" in err
    assert "the Hub is busy (503): trying again in 1 s" in err and constants.HF_HUB_DISABLE_XET is False
    assert client.hub.files["someone/mini"] == sent and len(slept) >= 10
    assert json.loads(ok(client.pull(tmp_path / "got", "--json")))["versions"] == ["bf16", "w4", "w3", "w2", "w1"]
    assert verify(tmp_path / "got") == [] and tree(tmp_path / "got").items() >= sent.items()


# --- what is stopped, and what is there already


def test_a_push_that_is_killed_goes_on(client, bundle, tmp_path):
    """At every moment the repository is no bundle, or all of one; what was sent is not sent again."""
    ok(client.push(bundle))
    expected, count = client.hub.files["someone/mini"], len(client.hub.requests)
    client.hub.clear()
    kills = 0
    for at in (9, 21, count - 3):
        kills += client.killed_at(at, "push", bundle, "someone/mini", "-q")
        there = client.hub.files.get("someone/mini", {})
        assert "manifest.json" not in there or there == expected
        if "manifest.partial.json" in there:
            refused(client.pull(tmp_path / "early"), "a push to it has not ended")
            assert not (tmp_path / "early").exists()
    assert kills >= 2
    held = set(client.hub.objects)
    client.hub.requests.clear()
    ok(client.push(bundle))
    assert client.hub.files["someone/mini"] == expected
    assert held.isdisjoint(path.rpartition("/")[2] for method, path in client.hub.requests if method == "PUT")
    commits = client.hub.commits["someone/mini"]
    ok(client.push(bundle))
    assert client.hub.commits["someone/mini"] == commits, "what is there needs no commit"


@pytest.mark.usefixtures("pushed")
def test_a_pull_that_is_killed_goes_on(client, tmp_path):
    """At a request, or between two moves into the target; a retry with the same command completes it."""
    sent = client.hub.files["someone/mini"]
    client.hub.requests.clear()
    target, chance = tmp_path / "got", random.Random(1)
    ok(client.pull(tmp_path / "whole"))
    count, kills = len(client.hub.requests), 0
    for _ in range(2):
        kills += client.killed_at(chance.randrange(8, count // 2), "pull", "someone/mini", "-o", target, "-q")
        assert not (target / "manifest.json").exists()
    assert kills == 2
    for move in (1, 5):

        def moved(move=move):
            moves = itertools.count(1)

            def look(*_):
                if next(moves) == move:
                    os.kill(os.getpid(), signal.SIGKILL)

            patch = pytest.MonkeyPatch()
            for name in ("rename", "replace"):
                spy(patch, Path, name, look)
            pull("someone/mini", target)

        assert killed(forked(moved))
        assert not (target / "manifest.json").exists()
    client.hub.requests.clear()
    ok(client.pull(target))
    assert not client.fetched(), "all were there"
    got = tree(target)
    assert {n: d for n, d in got.items() if n != ".pulled.json"} == sent
    assert not (target / ".pulling").exists() and verify(target) == []


@pytest.mark.usefixtures("pushed")
def test_a_pull_shows_its_own_progress_alone(tmp_path, monkeypatch):
    """In bytes, and without the Hub library's bars, which that library shows on a terminal."""
    enable_progress_bars()
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress() as bars:
        pull("someone/mini", tmp_path / "got", ["w1"], reporter=bars)
    assert "files of someone/mini" not in terminal.getvalue(), "which is what its bar says"
    lines = []
    reporter = LineReporter(lines.append)
    pull("someone/mini", tmp_path / "got", ["w2"], reporter=reporter)
    reporter.close()
    fetched = sum(p.stat().st_size for p in (tmp_path / "got" / "experts" / "w2").iterdir())
    assert re.match(rf"fetch: {size(fetched)} of {size(fetched)} in ", lines[1]), lines


@pytest.mark.usefixtures("pushed")
def test_a_file_that_was_cut_off_is_resumed(client, bundle, tmp_path, monkeypatch):
    name = "model.safetensors"
    client.hub.cut_after[name] = 300_000
    without_waits(monkeypatch)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 65536)
    for _ in range(2):  # the library may have tried again by itself
        with contextlib.suppress(MoepackError):
            pull("someone/mini", tmp_path / "got", ["w1"])
    assert client.hub.ranges and max(client.hub.ranges) <= 300_000 and verify(tmp_path / "got") == []
    assert (tmp_path / "got" / name).read_bytes() == (bundle / name).read_bytes()


@pytest.mark.usefixtures("pushed")
def test_a_budget_chooses_what_is_fetched(client, bundle, tmp_path):
    least = plan(bundle, LoadOptions(device_memory=1 << 30)).least_bytes
    client.hub.requests.clear()
    assert json.loads(ok(client.pull(tmp_path / "got", "--fit", str(least), "--json")))["versions"] == ["w1"]
    assert client.fetched() == {"w1"}
    refused(client.pull(tmp_path / "none", "--fit", "1000000"), f"the least that would do is {least} bytes")
    assert not (tmp_path / "none").exists()


def test_a_repository_of_something_else_is_left_alone(client, bundle, damaged, edit_manifest):
    def left(word, path):
        before = dict(client.hub.files["someone/mini"])
        refused(client.push(path), word)
        assert client.hub.files["someone/mini"] == before

    client.hub.files["someone/mini"] = {".gitattributes": b"", "config.json": b"{}"}
    left("contains config.json and is not a bundle", bundle)
    client.hub.files["someone/mini"] = {"manifest.json": b"{}", "a": b""}
    left("is not a bundle's", bundle)
    client.hub.files["someone/mini"] = {".gitattributes": b"", "README.md": b"---\nlicense: mit\n---\n"}
    edit_manifest(damaged, lambda m: m["provenance"]["checkpoint"]["files"].update({"model.safetensors": "0" * 64}))
    ok(client.push(damaged))
    left("holds a bundle of another model", bundle)
    client.hub.files["someone/mini"]["manifest.partial.json"] = client.hub.files["someone/mini"].pop("manifest.json")
    left("holds a bundle of another model", bundle)


def test_a_part_of_a_bundle_is_pushed_as_what_it_is(client, bundle, tmp_path):
    """And a branch is one of its own."""
    part = Path(shutil.copytree(bundle, tmp_path / "part", ignore=shutil.ignore_patterns("bf16", "w3", "w1")))
    ok(client.push(part, "--revision", "part", "--base-model", "some/base"))
    assert client.hub.files["someone/mini"] == {}
    assert json.loads(ok(client.pull(tmp_path / "got", "--revision", "part", "--json")))["versions"] == ["w4", "w2"]
    card = (tmp_path / "got" / "README.md").read_text()
    assert "base_model: some/base" in card and "| w4 |" in card and "| w3 |" not in card
    refused(
        client.pull(tmp_path / "more", "--revision", "part", "--versions", "w3"), "has no version w3: it has w4, w2"
    )
    ok(client.push(bundle, "--revision", "part"))
    ok(client.pull(tmp_path / "got", "--revision", "part", "--add", "w3"))


# --- what a stranger's repository may hold


def test_hostile_repositories(client, bundle, tmp_path, edit_manifest):
    """Nothing is written outside the target, nothing that the manifest does not name, and each ends in one line."""
    whole = tree(bundle)
    digest = {"size": 4, "sha256": "0" * 64}

    def with_file(name):
        copy = Path(shutil.copytree(bundle, tmp_path / "copy", dirs_exist_ok=True))
        edit_manifest(copy, lambda m: m["files"].update({name: digest}))
        return {**tree(copy), name: b"evil"}

    cases = {
        "outside": with_file("../evil"), "hidden": with_file(".pulling/lock"), "digest": with_file("evil"),
        "a size": {**whole, "tokenizer.json": b"x" * 10_000_000}, "missing": {**whole} | {"gone": b""},
        "not JSON": {**whole, "manifest.json": b"[" * 100_000},
        "long manifest": {**whole, "manifest.json": bytes((64 << 20) + 1)},
        "a link": {**whole, "config.json": b"../../x"},
    }  # fmt: skip
    del cases["missing"]["tokenizer.json"]
    area = tmp_path / "area"
    for name, files in cases.items():
        client.reset()
        client.hub.files["someone/mini"] = files
        area.mkdir()
        refused(client.pull(area / "got", "--versions", "w1"))
        assert {p.name for p in area.iterdir()} <= {"got"} and not (area / "got" / "manifest.json").exists(), name
        shutil.rmtree(area)
    client.reset()
    client.hub.files["someone/mini"] = {**whole, "extra.py": b"evil", "experts/w1/extra.safetensors": b"evil"}
    ok(client.pull(area, "--versions", "w1"))
    assert not [n for n in tree(area) if "extra" in n]
    (tmp_path / "elsewhere").mkdir()
    shutil.rmtree(area / "experts")
    (area / "experts").symlink_to(tmp_path / "elsewhere")
    refused(client.pull(area, "--versions", "w1"), "is a link")
    assert not list((tmp_path / "elsewhere").iterdir())
