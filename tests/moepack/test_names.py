"""Names that stand for nothing: refused at once, in one line that says what is known, with a Hub or without."""

import functools
import socket

import pytest
from hub_stand_in import point, serve
from support import build_from

import moepack
from moepack.generation import generate
from moepack.hub import pull, push
from moepack.pack import hub_name
from moepack.pack.errors import MoepackError
from moepack.pack.hub_name import on_hub
from moepack.reports.evaluate import evaluate


@pytest.fixture
def to(monkeypatch, tmp_path):
    """Points the Hub library at an address, with nothing downloaded."""
    monkeypatch.setattr(hub_name, "SECONDS", 0.1)
    return functools.partial(point, monkeypatch, cache=tmp_path / "hub")


@pytest.fixture
def silent():
    """The address of one who takes connections and never answers: a slow link."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def commands(name, bundle, out):
    """What takes a name, called with one."""
    return [
        lambda: build_from("versions: [bf16]", name, out, ["text.txt"]),
        lambda: evaluate(name, ["text.txt"]),
        lambda: generate(name, "The"),
        lambda: moepack.load(name),
        lambda: pull(name, out),
        lambda: evaluate(bundle, [name]),
    ]


def said(call):
    """The one line of a refusal."""
    with pytest.raises(MoepackError) as refused:
        call()
    assert len(str(refused.value).splitlines()) == 1
    return str(refused.value)


@pytest.mark.parametrize("link", ["none", "slow", "switched off"])
def test_without_a_hub(link, to, silent, bundle, tmp_path):
    """Said to be out of reach, and not to hold no such thing."""
    address = silent if link == "slow" else "http://127.0.0.1:9"
    to(address, offline=link == "switched off")
    for call in commands("no/such", bundle, tmp_path / "out"):
        text = said(call)
        assert text.startswith("no/such: ") and f"the Hub cannot be reached ({address}: " in text, text
        assert "check the network" in text
        assert "no such repository" not in text and ("HF_HUB_OFFLINE" in text) == (link == "switched off")
    assert "no such directory, and the Hub" in said(lambda: moepack.load("no/such"))
    if link == "none":
        text = said(lambda: push(bundle, "no/such", revision="other"))
        assert text.startswith(f"no/such: the Hub cannot be reached ({address}: ")


def test_what_can_only_be_a_path(to, bundle, tmp_path):
    to("http://127.0.0.1:9")
    for name in ("./such", "no/such/path"):
        for call in (*commands(name, bundle, tmp_path / "out")[:4], lambda name=name: moepack.open(name)):
            text = said(call)
            assert text.endswith("no such directory") and "Hub" not in text, text
    assert said(lambda: evaluate(bundle, ["./such"])).endswith("no such file")
    assert "not the name of a repository" in said(lambda: moepack.load("no such thing"))


def test_with_a_hub_that_has_none(to, bundle, tmp_path):
    with serve() as (_, address):
        to(address)
        for call in commands("no/such", bundle, tmp_path / "out")[:5]:
            assert "no such repository on the Hub" in said(call)


def test_what_was_downloaded_is_found_without_a_hub(to, tmp_path):
    snapshot = tmp_path / "hub" / "models--someone--mini" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    for offline in (False, True):
        to("http://127.0.0.1:9", offline=offline)
        assert on_hub("someone/mini", "manifest.json", "config.json") == "config.json"
