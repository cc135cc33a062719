"""Mistakes that can be found without torch are reported before it is imported, which takes seconds."""

import json
import os
import sys

import pytest
from support import cli, python, spy

from moepack.runtime.patches import UNUSED, leave_out

RUN = """
import contextlib, io, json, sys
from moepack.cli import app
from moepack.pack.errors import MoepackError
for words in json.loads(sys.argv[1]):
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            app(words, standalone_mode=False)
        said = out.getvalue()
    except SystemExit:
        said = out.getvalue()
    except MoepackError as error:
        said = str(error)
    print(json.dumps([said, sorted({"torch", "transformers"} & sys.modules.keys())]))
"""


def test_mistakes_are_reported_without_torch(bundle, tmp_path):
    there, gone, empty = str(bundle), str(tmp_path / "gone"), str(tmp_path)
    prompt, memory, text = ("-p", "x"), ("--device-memory", "1GB"), ("-d", "x")
    cases = [
        (["generate", there, *prompt, "--policy", "hotnes"], "did you mean hotness?"),
        (["generate", there, *prompt, "--policy", "hotness"], "policy hotness: needs a memory budget: device_memory"),
        (["plan", there, *memory, "--max-tpot", "soon"], "max_tpot 'soon' is not a time"),
        (["generate", gone, *prompt], "no such directory"),
        (["eval", gone, *text], "no such directory"),
        (["chat", gone], "no such directory"),
        (["chat", "http://127.0.0.1:9", "--policy", "static:w4"], "a server loads its model itself"),
        (["plan", empty, *memory], "not a bundle"),
        (["inspect", gone], "no such directory"),
        (["serve", gone, "--port", "0"], "no such directory"),
        (["generate", there, *prompt, "--policy", "static:w7"], "w7"),
        (["generate", there, *prompt, *memory, "--policy", "hotness:hi=w7"], "has no version 'w7'"),
        (["plan", there, *memory, "--policy", "static:w7"], "w7"),
        (["generate", there, *prompt, "--dense", "w3"], "w3"),
        (["serve", there, "--port", "0", "--policy", "static:w7"], "w7"),
        (["generate", "someone/nothing", *prompt], "the Hub cannot be reached"),
        (["build", gone, "-o", str(tmp_path / "made")], "no such directory"),
        (["build", empty, "-o", str(tmp_path / "made")], "has no config.json"),
        (["eval", there, "-d", gone], "no such file"),
        (["profile", there, gone, "-o", str(tmp_path / "p.json")], "no such file"),
        (["shrink", there, "-o", str(tmp_path / "s"), "--versions", "w9"], "no version 'w9'"),
        (["pull", "someone/model", "-o", str(tmp_path / "p"), "--versions", "w77"], "version 'w77' is unknown"),
        (["push", gone, "someone/model"], "no such directory"),
        (["bench", there, "--prompt", "12,x"], "prompt '12,x': numbers from 1 with commas between, as 128,512"),
        (["verify", there, "--checkpoint", gone, "-q"], "no such directory"),
        (["export", gone, "-o", str(tmp_path / "e"), "--bits", "4"], "no such directory"),
        (["quantize", "--work", gone], "is not calibrated yet"),
    ]
    given = json.dumps([words for words, _ in cases])
    env = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9"}  # where nothing listens
    lines = python("-c", RUN, given, env=env).splitlines()
    for (words, expected), line in zip(cases, lines, strict=True):
        said, imported = json.loads(line)
        assert expected in said and imported == [], words


def test_a_plan_passes_over_a_damaged_cache(bundle, tmp_path):
    """Plans read what an earlier one kept, and measure anew where that is damaged or cannot be written."""
    from moepack.reports.plan import plan
    from moepack.runtime.planning import measure
    from moepack.runtime.planning.options import LoadOptions

    measured, options = [], LoadOptions(device_memory="1GB", prefill_tokens=16)
    with pytest.MonkeyPatch.context() as patch:
        spy(patch, measure, "measure", lambda *given: measured.append(given))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        first, again = plan(bundle, options), plan(bundle, options)
        assert len(measured) == 1 and again.fixed == first.fixed and again.per_layer == first.per_layer
        (file,) = (tmp_path / "moepack" / "plans").iterdir()
        for number, content in enumerate(("{", "[]", '{"kv": [[1, 2, null]]}', '{"kv": 1e999}', "[" * 5000), start=2):
            file.write_text(content)
            assert plan(bundle, options).fixed == first.fixed and len(measured) == number
            assert json.loads(file.read_text())["needs"]["dense"] == first.fixed.dense, "written anew"
        file.unlink()
        file.symlink_to("/dev/zero")
        assert plan(bundle, options).fixed == first.fixed and len(measured) == 7
        patch.setenv("XDG_CACHE_HOME", "/dev/null")
        assert plan(bundle, options).fixed == first.fixed and len(measured) == 8


def test_a_second_plan_imports_no_torch(bundle, tmp_path, monkeypatch):
    """It takes what an earlier process has kept of the model and the machine, and says the same."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    plans = [
        ["plan", str(bundle), "--device-memory", size, *more]
        for size in ("5MB", "7MB")
        for more in ([], ["--json", "--policy", "static:w2"], ["--policy", "lru:lo=absent"])
    ]
    plans += [[*plans[0], "--policy", "hotness:lo=stored", "--max-tpot", "1s"], [*plans[0], "--policy", "static:bf16"]]
    python("-c", "from moepack.runtime.planning.measured import threads; threads()")  # of a process without torch
    said = [cli(*words) for words in plans]
    for (_, out, err), line in zip(said, python("-c", RUN, json.dumps(plans)).splitlines(), strict=True):
        again, imported = json.loads(line)
        assert imported == [] and again == out + err


def test_only_commands_that_serve_leave_libraries_out(monkeypatch):
    modules = {"scipy": sys}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", modules)
        leave_out("build")
        before = dict(modules)
        leave_out("serve")
    assert before == {"scipy": sys}
    assert modules == {**dict.fromkeys(UNUSED), "scipy": sys}, "what is there already stays"
