"""What the documents tell a reader to type is typed: README.md, CONTRIBUTING.md and docs/, block after block.

Every ```sh and ```python block of a document runs in order in one temporary directory that holds what a clone does
(examples/). Commands of moepack run in this process; others in a shell. A ```text block behind a ```python block is
what that prints, to the white space; behind a ```sh block it is a picture of one machine and is not compared. A block
stays out when the line before it says `<!-- not run: why -->`, and must fail with TEXT on stderr when it says
`<!-- fails: TEXT -->`. Pages under docs/extending/ have tests of their own.

To save time, and nothing else: recipes are made quick (rounding for GPTQ, few tokens for losses, few windows in the
examples' one), kernels are measured at few sizes, and documents that begin with `my-bundle` share the one that the
README's command builds. The Hub is the suite's stand-in.
"""

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_stand_in import point, serve
from support import ROOT, cli

from benchmarks.limited.cage import Cage

DOCUMENTS = ["README.md", "CONTRIBUTING.md"]
DOCUMENTS += sorted(
    str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md") if p.parent != ROOT / "docs" / "extending"
)
QUICK = "quantize: {method: rtn, loss_tokens: 128}\ncalibration: {samples: 32, length: 128, batch_size: 32}\n"
_QUICK = "method: rtn\n  loss_tokens: 128"
_OTHERS_CALL = re.compile(r"[|<>$;&`*]")


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its text, the line it begins on, and what the comment before it says."""

    language: str
    text: str
    line: int
    rule: str = ""
    words: str = ""


def blocks(document):
    """The fenced blocks of a document, in order."""
    out, lines = [], (ROOT / document).read_text().splitlines()
    inside, start, rule = "", 0, ("", "")
    for number, line in enumerate(lines, start=1):
        if line.startswith("```"):
            if start:
                out.append(Block(inside, "\n".join(lines[start : number - 1]), start, *rule))
                inside, start, rule = "", 0, ("", "")
            else:
                inside, start = line[3:].strip(), number
        elif not start:
            said = re.fullmatch(r"<!-- (not run|fails): (.+) -->", line)
            rule = (said[1], said[2]) if said else ("", "")
    assert not start, f"{document}: the block of line {start} does not end"
    return out


RUN = {d: [b for b in blocks(d) if b.language in ("sh", "python") and b.rule != "not run"] for d in DOCUMENTS}
LEFT_OUT = [(d, b) for d in DOCUMENTS for b in blocks(d) if b.rule == "not run"]


def commands(text):
    """The commands of a block: its lines, or all of it where one goes on over lines."""
    if "<<" in text:
        yield text
        return
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#"):
            yield line


def run(command, where):
    """Run one command of a document."""
    words = [] if _OTHERS_CALL.search(command) else shlex.split(command)
    if words and words[0] == "moepack":
        return cli(*words[1:])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command.replace("method: gptq\n  refine: true", _QUICK).replace("method: gptq", _QUICK)],
        cwd=where, env={**os.environ, "PATH": path}, capture_output=True, text=True,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def clone(where):
    """A directory with what a reader's clone holds that documents speak of; its demo recipe is quick."""
    (where / "examples").mkdir(parents=True)
    for path in (ROOT / "examples").iterdir():
        if path.name != "demo.yaml":
            (where / "examples" / path.name).symlink_to(path)
    (where / "examples" / "demo.yaml").write_text(QUICK)
    return where


@pytest.fixture(scope="module")
def quick_start(tmp_path_factory):
    """Where the README's quick start has built my-bundle."""
    where = clone(tmp_path_factory.mktemp("quick-start"))
    build = next(c for b in RUN["README.md"] for c in commands(b.text) if c.startswith("moepack build "))
    with contextlib.chdir(where):
        code, _, err = run(build, where)
    assert code == 0, err
    assert (where / "my-bundle" / "manifest.json").exists()
    return where


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The Hub library speaks to a stand-in."""
    with serve() as (_, address):
        point(monkeypatch, address, tmp_path / "hub")
        yield


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize("document", [d for d in DOCUMENTS if RUN[d]])
def test_what_a_document_says_is_typed(document, quick_start, monkeypatch, tmp_path):
    from moepack.runtime.experts import backends

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(backends, "CANDIDATES", (2, 128))
    where = quick_start if document == "README.md" else clone(tmp_path / "clone")
    makes = any(re.search(r"-o my-bundle\b", block.text) for block in RUN[document])
    if not (where / "my-bundle").exists() and not makes:
        (where / "my-bundle").symlink_to(quick_start / "my-bundle")
    monkeypatch.chdir(where)
    names = {"__name__": "__main__"}
    every = blocks(document)
    for block in RUN[document]:
        at = f"{document}, line {block.line}"
        if block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * block.line + block.text, str(ROOT / document), "exec"), names)
            following = every[every.index(block) + 1 :][:1]
            if following and following[0].language == "text" and printed.getvalue():
                assert printed.getvalue().split() == following[0].text.split(), at
            continue
        for command in commands(block.text):
            if where == quick_start and command.startswith("moepack build "):
                continue  # the fixture ran it
            code, out, err = run(command, where)
            if block.rule == "fails":
                assert code and block.words in err, f"{at}: {command}\n{out}{err}"
            else:
                assert code == 0, f"{at}: {command}\n{out}{err}"
    backends.forget()


def test_the_laptop_tutorial_holds_in_a_cage(quick_start, monkeypatch):
    """Its commands, in a control group that leaves the demo bundle's experts the share of memory that the page's have.

    A limit of 10 GiB holds two fifths of what a 30 B bundle's experts take at four bits beyond their least.
    """
    document, policy = "docs/tutorials/laptop.md", "hotness:lo=stored"
    monkeypatch.chdir(quick_start)

    def least(policy):
        _, _, said = cli("plan", "my-bundle", "--memory", "5MB", "--policy", policy)
        return int(1e6 * float(re.search(r"the least that would do is ([\d.]+)MB", said)[1])) + 10_000  # rounded

    limit = least(policy) + (least("static:w4") - least(policy)) * 2 // 5
    asked = [c for b in RUN[document] for c in commands(b.text) if "10GiB" in c]
    assert len(asked) == 3 and all(policy in c for c in asked)
    for command in asked:
        words = shlex.split(command.replace("10GiB", str(limit)))[1:]
        if "--profile" in words:
            counts = next(c for b in RUN[document] for c in commands(b.text) if " profile " in c)
            assert cli(*shlex.split(counts.replace("examples", str(ROOT / "examples")))[1:])[0] == 0
        with Cage(limit) as cage:
            if cage.group is None:
                pytest.skip("no control group can be made here")
            done = subprocess.run(
                [sys.executable, "-m", "moepack", *words], cwd=quick_start, preexec_fn=cage.enter, capture_output=True,
                text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
            assert done.returncode == 0 and not cage.killed(), f"{command}\n{done.stderr}"
            assert 0 < (cage.peak() or 0) <= limit


@pytest.mark.parametrize(("document", "block"), LEFT_OUT, ids=[f"{d}:{b.line}" for d, b in LEFT_OUT])
def test_what_is_not_typed(document, block):
    """Lists them with `pytest -rs`; a moepack command must still be one that there is, with options that there are."""
    for command in commands(block.text):
        words = shlex.split(command)
        if words[0] == "moepack":
            code, out, _ = cli(words[1], "--help")
            assert code == 0, command
            assert all(w in out for w in words[2:] if w.startswith("--")), command
    pytest.skip(f"{document}, line {block.line}: {block.words}")
