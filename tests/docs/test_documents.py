"""What the documents say of one another and of measurements: links, pictures, tables, the words of errors."""

import re
from dataclasses import fields

import pytest
from support import ROOT

from benchmarks import draw, tables

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(p.relative_to(ROOT)) for p in PAGES]
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SOURCES = ("moepack", "runtime", "pack", "calibrate", "quantize")


def prose(page):
    """A page without its code."""
    return re.sub(r"```.*?```", "", page.read_text(), flags=re.S)


def anchors(page):
    """The anchors of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    for target in LINK.findall(prose(page)):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (page.parent / file).resolve() if file else page
        assert there.exists() and ROOT in (there, *there.parents), f"{page.name}: {target}"
        assert not anchor or anchor in anchors(there), f"{page.name}: {target}"


def test_every_page_is_on_the_map():
    """From docs/index.md each page can be reached."""
    seen, ahead = set(), [ROOT / "docs" / "index.md"]
    while ahead:
        page = ahead.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        ahead += [(page.parent / t.partition("#")[0]).resolve() for t in LINK.findall(prose(page)) if "//" not in t]
    assert {p for p in PAGES if p.parent != ROOT} <= seen


def test_the_front_page_is_short_and_shows_what_it_is():
    """The picture, the commands and their result on the first screen; where it runs before any chart; the papers."""
    text = (ROOT / "README.md").read_text()
    screen = "\n".join(text.splitlines()[:30])
    assert all(x in screen for x in ("(docs/images/bundle.svg)", "\nmake demo", "\nmake test", " waits, peak "))
    assert text.index("## What it runs on") < text.index("(docs/images/limited.svg)")
    assert text.count("https://arxiv.org/abs/") == 4


def test_tables_and_machines_are_those_of_the_results():
    for page in tables.common.DOCUMENTS:
        assert page.read_text() == tables.with_tables(page.read_text(), page), (
            f"{page.name}: python -m benchmarks.draw --tables"
        )
    text = "".join(page.read_text() for page in tables.common.DOCUMENTS)
    shown = {name for names in re.findall(r"<!-- machine: (.+) -->", text) for name in names.split()}
    measured = {p.stem for p in tables.common.RESULTS.glob("*.json")}
    assert shown == measured, "a file of results without its machine"
    assert tables.with_tables("<!-- table: real -->\nold\n<!-- end of table -->").count("\n") > 3


def test_pictures_are_drawn_by_the_command(tmp_path):
    drawn = {path.name for path in draw.draw(tmp_path)}
    assert drawn == {p.name for p in draw.IMAGES.iterdir()} - {"server.png", "bundle.svg", "process.svg", "session.svg"}
    assert all(b"<svg" in (tmp_path / name).read_bytes()[:1000] for name in drawn)


def test_errors_that_are_explained_exist():
    """A heading in code is the text of an error, as it stands in the sources."""
    code = "\n".join(p.read_text() for folder in SOURCES for p in sorted((ROOT / folder).rglob("*.py")))
    code = re.sub(r'"\s*\n\s*f?"', "", code)
    explained = re.findall(r"^### `(.+)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.M)
    assert len(explained) > 20
    assert [text for text in explained if text not in code] == []


def test_options_of_hotness_are_all_explained():
    from moepack.runtime.policies.hotness import HotnessOptions

    page = (ROOT / "docs" / "tutorials" / "serve.md").read_text()
    told = dict(re.findall(r"^\| `([a-z]+)` \| `?([^|`]+)`? \|", page, re.M))
    assert told == {f.name: str(f.default).removesuffix(".0") or "chosen" for f in fields(HotnessOptions)}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_words(page):
    """One spelling, but for titles of papers; nothing of the machine it was written on."""
    text = re.sub(r"(`+).+?\1(?!`)|\[[^\]]*\]\(https?:", "", prose(page))
    text = re.sub(r"\]\([^)]*\)|<!--.*?-->", "", text)
    assert not re.search(r"\b[Qq]uantiz(e|ed|es|er|ers|ing|ation)\b", text), "quantise, in prose"
    assert not re.search(r"\b([Ss]omebody|[Nn]obody|[Ww]hoever|foretold|decides nothing)\b", text), "a person for code"
    assert not re.search(r"/work/|/tmp/|/home/|shared folder", page.read_text())
