"""docs/concepts.md explains the words that moepack's names, its help and its documents use."""

import re
from collections import Counter
from dataclasses import fields, is_dataclass

import typer
from support import ROOT

from moepack.cli import app
from moepack.pack.spec import version_names
from moepack.quantize import methods
from moepack.runtime.policies import registry
from moepack.runtime.policies.placements import Where

CONCEPTS = (ROOT / "docs" / "concepts.md").read_text()
PAGES = [p for p in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))] if p.parent.name != "design"]
EXPLAINED = set(re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", CONCEPTS, flags=re.S)))
TERMS = " ".join(" ".join(re.findall(r"\*\*([^*]+)\*\*", CONCEPTS)).lower().split())
# The beginnings of words of the field, and of moepack, that a reader meets in sentences.
FIELD = """adapter, allocation, backing store, base, block, budget, bundle, calibration, capacity, checkpoint, chunk,
critical, decoding, demotion, dense matri, device, divergence, encoding, engine, epoch, expert batch, extent, family,
gate, group,
handle, heavy hitter, host tier, hotness, interval, kv cache, ladder, loss table, manifest, mtp, on-demand loader,
packed rows, perplexity, piece, placement, policy, pool, prefetch, prefill, promotion, prompt, quantiser, recipe,
replica, reserve, residency manager, router, routing statistics, row shard, sampling, scale, second moments, sequence,
skeleton, snapshot, staging, starved, step, tower, tpot, trace, traffic, ttft, version, wait, window, work directory,
workload, zero point"""


def missing(names):
    """Those that concepts.md does not explain."""
    return sorted(n for n in names if n not in EXPLAINED)


def test_names_that_users_type_are_explained():
    """A policy, a version, a placement, a method or a command that is added fails here until it has its words."""
    commands = typer.main.get_command(app).commands
    options = Counter(o for c in commands.values() for p in c.params for o in p.opts if o.startswith("--"))
    placements = {"bf16@packed", "bf16@packed-pinned", "w4@host", "w4@pinned", "stored", "absent"}
    assert len(Where) == len(placements) + 1, "a place without its word"
    assert missing({e.name for e in registry.ENTRIES}) == []
    assert missing(set(version_names())) == []
    assert missing(placements) == []
    assert missing(set(methods.named())) == []
    assert missing({f"moepack {name}" for name in commands}) == []
    assert missing({o for o, count in options.items() if count > 1}) == [], "options that commands share"


def test_words_of_several_pages_are_explained():
    """A name in code that stands on four pages or more, and is no file or sentence of code."""
    pages = Counter(w for p in PAGES for w in set(re.findall(r"`([a-z][a-z0-9_@-]*)`", p.read_text())))
    commands = {name.removeprefix("moepack ") for name in EXPLAINED}
    assert [w for w, count in pages.items() if count > 3 and w not in commands | {"my-bundle"}] == []


def test_words_of_the_field_have_an_entry():
    used = " ".join(" ".join(p.read_text() for p in PAGES).lower().split())
    words = " ".join(FIELD.split()).split(", ")
    assert [w for w in words if w not in TERMS] == []
    assert [w for w in words if w not in used] == [], "a word that no page uses needs no entry"


def test_every_option_of_every_policy_is_in_a_table():
    tables = "".join((ROOT / "docs" / p).read_text() for p in ("policies.md", "tutorials/serve.md"))
    cells = [cell for row in re.findall(r"^\|(.+)\|$", tables, re.M) for cell in row.split("|")[:2]]
    told = {name for cell in cells for name in re.findall(r"`([a-z]+)`", cell)}
    read = [e.parse("") for e in registry.ENTRIES if e.make is not None]
    assert {f.name for options in read if is_dataclass(options) for f in fields(options)} <= told
