"""Every rule of FORMAT.md with an edit that breaks it and nothing else: refused in one line, by the kind of problem.

The edits are in helpers/broken_rules; those here are allowed. Random ones are those of benchmarks.hostile.
"""

import re

import numpy as np
import pytest
from broken_rules import EDITS, MANIFEST_EDITS, RELEASED
from broken_rules.extents import at, scaled, section
from broken_rules.manifest import all_without_dense, put, signs
from broken_rules.names import BF16, DENSE, Q8, TABLES, W4
from hostile_edits import one_line, problems_of, read_all, refusal
from support import ROOT, cli, ok

from moepack.pack.errors import KINDS, Problem, printable
from moepack.pack.reader import open_bundle, unlisted

FIRST = {kind: name for name, (_, kind) in reversed(EDITS.items())}  # the edits for which the command runs too


@pytest.mark.parametrize("name", EDITS)
def test_every_rule_is_kept(name, victim):
    edit, kind = EDITS[name]
    edit(victim)
    check_refused(victim, kind, name in MANIFEST_EDITS)
    if FIRST[kind] == name:
        check_printed(victim)


@pytest.mark.parametrize("name", RELEASED)
def test_every_rule_of_released_extents_is_kept(name, released_victim):
    of, edit, kind = RELEASED[name]
    victim = released_victim(*of)
    edit(victim)
    try:
        check_refused(victim, kind)
    finally:
        victim.restore()
    assert problems_of(victim.path) == []


def check_refused(victim, kind, among_others=False):
    """With a problem of this kind alone, or among others; each is one line."""
    found = problems_of(victim.path)
    kinds = {p.kind for p in found}  # a field of a manifest has others that go by it
    assert kind in kinds if among_others else kinds == {kind}, [f"{p.kind}: {p}" for p in found]
    for problem in found:
        one_line(str(problem))
        assert problem.location.startswith(str(victim.path))
    assert refusal(victim.path) is not None


def check_printed(victim):
    """The command has a line for each problem, or says how many more there are."""
    found = problems_of(victim.path)
    code, out, err = cli("verify", victim.path, "-q")
    assert code == 2 and printable(out + err, keep="\n") == out + err and err.count("\n") == 1
    assert len(out.splitlines()) == len(found) or "and" in err


def test_the_bundle_itself_is_good(victim):
    assert problems_of(victim.path) == [] and refusal(victim.path) is None
    ok(cli("verify", victim.path, "-q"))


def test_there_is_an_edit_of_every_kind():
    """Except those that need a failing disk, or a checkpoint to compare with."""
    assert {kind for _, kind in EDITS.values()} == {*KINDS} - {"read", "bits", "config", "layers", "truncated"}
    told = re.findall(r"^\| `([a-z-]+)` \|", (ROOT / "docs" / "reading.md").read_text(), re.M)
    assert told == sorted(KINDS)


ALLOWED = {
    "a manifest that is signed again": signs(lambda d: None),
    "headers that are signed again": lambda v: [v.header(n, lambda d: d) for n in (W4, Q8, TABLES, DENSE)],
    "extents that are signed again": lambda v: [v.extent(n, 1, lambda room: None) for n in (BF16, W4)],
    "tables that are signed again": lambda v: v.tables(lambda a, m: None),
    "no versions of dense matrices in the manifest": signs(all_without_dense),
    "no version w8 of dense matrices": lambda v: v.replace("dense/w8", str),
    "no bf16 version of dense matrices": lambda v: v.replace("dense/bf16", str),
    "an allocation without dense matrices": signs(lambda d: d["allocation"].pop("dense")),
    "files that nothing lists": lambda v: v.write("notes.txt", b"\x1b[31m"),
    "a link that nothing lists": lambda v: v.replace("notes", lambda p: p.symlink_to("/etc/passwd")),
    "no version w4": lambda v: v.replace("experts/w4", str),
    "anything in the provenance": put("provenance")({"\x1b[31m": ["\x00", None, True, -(1 << 80)], "recipe": "a\nb\t"}),
    "more about the model": put("model", "vision")({"layers": 3}),
    "no allocation": put("allocation")(None),
    "a table more": lambda v: v.tables(lambda a, m: a.update(x=np.full(3, np.nan, np.float32))),
    "a column of a version that is not in the manifest": lambda v: v.sign(
        lambda d: (
            d["versions"].pop(), d.update(allocation=None),
            [d["files"].pop(n) for n in list(d["files"]) if n.startswith("experts/w1/")],
        )
    ),
    "a scale below zero": scaled(0xBF80),
    "a bias that is infinite": at(W4, section("w4", "bias").offset + 1, 0x7F),
}  # fmt: skip


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_allowed_opens(name, victim):
    ALLOWED[name](victim)
    assert problems_of(victim.path) == []
    read_all(victim.path)


def test_unlisted_files_are_named_by_verify(victim, capsys):
    for name in ("b\x1b.txt", "README.md", ".hidden", "experts/w4/more"):
        victim.write(name, b"")
    assert unlisted(open_bundle(victim.path)) == ["b\x1b.txt", "experts/w4/more"]
    code, _, err = cli("verify", victim.path)
    assert code == 0 and "b\\x1b.txt, experts/w4/more" in err.replace("\n", " ") and "\x1b." not in err


def test_printable():
    assert printable("a\x1b[31m\n\u202e\ud800é") == "a\\x1b[31m\\n\\u202e\\ud800é"
    assert printable("a\nb", keep="\n") == "a\nb"
    problem = Problem("/b\x07/x", "size", "y" * 5000)
    assert problem.location == "/b\\x07/x" and len(problem.message) == 1000
