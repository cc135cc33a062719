"""The report on one page: what it says, and that a hostile bundle gets no word of its own into it."""

import sys
from html.parser import HTMLParser

import pytest

from moepack.pack.errors import InputError
from moepack.pack.spec import KNOWN
from moepack.pack.tables import shown_loss
from moepack.reports.inspect import inspect
from moepack.reports.page import write_page
from moepack.runtime.policies.placements import CODED, NOWHERE, Placement, Where
from moepack.shared.palette import PARTS, VERSIONS, colour


class Page(HTMLParser):
    """Elements, attributes and text of a page; every element that is opened must be closed."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.words = []
        self.open = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page_of(bundle, out):
    write_page(bundle, inspect(bundle), out)
    text = out.read_text()
    return text, Page(text)


def test_every_placement_of_every_version_has_a_colour():
    on_device = {v.name: colour(v.name) for v in KNOWN}
    assert on_device == VERSIONS and len({*on_device.values(), *PARTS.values()}) == len(KNOWN) + len(PARTS)
    for version in KNOWN:
        places = [w for w in Where if w not in NOWHERE and (version.entropy_coded or w not in CODED)]
        assert len({colour(str(Placement(version, where))) for where in places}) == len(places), version.name
    assert all(colour(str(Placement(None, where))) for where in NOWHERE)


def test_it_says_what_inspect_says(bundle, tmp_path):
    """In a folder that was not there, and with nothing from outside."""
    facts = inspect(bundle)
    text, page = page_of(bundle, tmp_path / "new" / "report.html")
    for name, v in facts["versions"].items():
        loss = shown_loss(facts["loss"][name], facts["loss_error"][name])
        assert name in page.words and f"{v['bytes']:,}" in page.words and loss in page.words
        assert ("±" in loss) == (name != "bf16")
        assert f'<span class="key {name}">' in text and f".{name} {{ background: {colour(name)}; }}" in text
    named = ("Versions chosen", "Where tokens go", "What a version costs")
    heads = [word for word in page.words if word in named]
    assert heads == ["What a version costs", "Where tokens go", "Versions chosen"]
    chosen = page.words[page.words.index("Versions chosen") :]
    counts = [int(w) for w in chosen[chosen.index("w1") + 1 :][: 6 * facts["moe_layers"]]]  # a layer, five versions
    assert [sum(counts[i + 1 : i + 6]) for i in range(0, len(counts), 6)] == [16] * facts["moe_layers"]
    assert 'name="viewport"' in text and "prefers-color-scheme: dark" in text
    with pytest.raises(InputError, match=r"a report is a \.html"):
        write_page(bundle, facts, tmp_path / "report.pdf")
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "iframe", "a", "object"})
    for _, attrs in page.tags:
        for value in (attrs.get("href"), attrs.get("src")):
            assert value is None or value.startswith("data:image/png;base64,")
    rule = next(a["content"] for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert rule == "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def test_without_matplotlib_it_has_its_tables(bundle, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    _, page = page_of(bundle, tmp_path / "report.html")
    assert any("moepack[build]" in word for word in page.words) and "Versions chosen" in page.words
    assert "img" not in {tag for tag, _ in page.tags}


def test_hostile_words_stay_words(damaged, edit_manifest, tmp_path, monkeypatch):
    evil = "</title><script>alert(1)</script><img src=x onerror='a'>\"&\ud800"

    def change(m):  # the format keeps such words out of all else
        m["allocation"]["name"] = evil.removesuffix("\ud800")
        m["provenance"] = {
            "checkpoint": {"name": evil, "id": [evil]}, "recipe": evil, "tools": {evil: evil},
            "calibration": {"sources": [evil, 3], "samples": evil, "length": None},
        }  # fmt: skip

    edit_manifest(damaged, change)
    text, page = page_of(damaged, tmp_path / "report.html")
    assert "<script" not in text and "src=x" not in text.replace("&lt;img src=x", "") and "onerror='" not in text
    assert sum("alert(1)" in word for word in page.words) >= 6
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # pictures tell nothing of the provenance
    for odd in ("text", [], 3, {"sources": "x"}):
        edit_manifest(damaged, lambda m, odd=odd: m.update(provenance=dict.fromkeys(
            ("checkpoint", "calibration", "recipe", "tools", "shrunk"), odd)))  # fmt: skip
        page_of(damaged, tmp_path / "report.html")
