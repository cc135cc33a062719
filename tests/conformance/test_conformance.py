"""The suite itself, with stages that stand in for programs: what a crash, a limit and a known failure cost."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from pathlib import Path

import conformance
import pytest
import stages
import yaml
from conformance import reason_of, table, tried
from stages import STAGES, Stage

HERE = Path(conformance.__file__).parent

SAYING = """
import json, os, sys, time
with open(os.environ["CONFORMANCE_OUT"], "a") as out:
    for name, ok in {cases}:
        out.write(json.dumps({{"name": name, "ok": ok, "why": "it is wrong"}}) + "\\n")
{then}
"""


class Serving:
    """A server that is well, or not."""

    wrong, ended = "", 0

    def url(self, budget):
        return "http://127.0.0.1:9"

    def trouble(self):
        return self.wrong

    def end(self):
        self.ended += 1


@pytest.fixture
def environment(tmp_path):
    """An environment whose Python is this one."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    return tmp_path


def run(environment, cases, then="", **known):
    (environment / "stage.py").write_text(SAYING.format(cases=cases, then=then))
    # A script of its own, as an absolute path replaces the folder of the stages.
    stage = Stage("one", "pytest", "what it ran", str(environment / "stage.py"), 5.0 if "sleep" in then else 60.0)
    serving = Serving()
    serving.wrong = known.pop("trouble", "")
    return tried(stage, environment, environment, serving, environment, known), serving


def test_cases_are_judged_by_what_is_known(environment):
    cases = [("a", True), ("b", False), ("c", False), ("d", True), ("e1", False), ("f", True)]
    row, serving = run(
        environment, cases, c="a reason", d="another", **{"e*": "sometimes: luck", "f": "sometimes: luck"}
    )
    assert (row.passed, row.run, row.absent, serving.ended) == (3, 6, "", 0)
    assert row.failed == {"b": "it is wrong"}
    assert row.well == ["a", "d", "f"]
    assert row.known == {"c": "a reason", "e1": "luck"} and row.mended == ["d"]
    shown = table([row]).splitlines()[-1]
    assert "| 3 of 6 | c: a reason; e1: luck | b: it is wrong |" in shown


@pytest.mark.parametrize(
    ("then", "why"),
    [
        ("print('first'); print('too bad'); sys.exit(3)", "ended with 3: too bad"),
        ("time.sleep(60)", "was ended after 5 s"),
        ("os.kill(os.getpid(), 9)", "ended with -9: no word"),
    ],
)
def test_a_stage_that_goes_wrong_keeps_its_cases(environment, then, why):
    row, _ = run(environment, [("a", True)], then)
    assert (row.passed, row.run, row.failed) == (1, 2, {"the program": why})


def test_a_server_in_trouble_is_a_failure_and_is_ended(environment):
    row, serving = run(environment, [("a", True)], trouble="the server ended with -11")
    assert row.failed == {"the server afterwards": "the server ended with -11"} and serving.ended == 1


def test_an_absent_program_costs_a_row(environment, monkeypatch):
    known = {}
    for stage, why in (
        (Stage("x", "no-such-program", "", "cases.py", 1.0), "not run: not installed"),
        (Stage("x", "no-such-program", "", "cases.mjs", 1.0), "not run: node is not here"),
    ):
        monkeypatch.setattr(stages.shutil, "which", lambda name: None)
        row = tried(stage, environment, environment, Serving(), environment, known)
        assert row.absent == why and not row.failed and "| not run: " in table([row])


@pytest.fixture
def answering():
    load = {"server_load": 0}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(load).encode())

        def log_message(self, *args): ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", load
        server.shutdown()


def test_requests_that_outlive_their_client_are_trouble(answering, tmp_path, monkeypatch):
    class Process:
        code: int | None = None

        def poll(self):
            return self.code

    monkeypatch.setattr(conformance, "IDLE", 0.3)
    serving, process = conformance.Serving(tmp_path, tmp_path / "log"), Process()
    serving._url, load = answering
    serving._process = process
    assert serving.trouble() == ""
    load["server_load"] = 2
    assert serving.trouble() == "2 requests run 0 s after their client"
    process.code = -11
    assert serving.trouble() == "the server ended with -11"


def test_known_failures_are_of_stages_and_have_reasons():
    known = yaml.safe_load((HERE / "known.yaml").read_text())
    assert set(known) <= {stage.name for stage in STAGES} and len({stage.name for stage in STAGES}) == len(STAGES)
    for cases in known.values():
        assert all(reason_of(name, cases) == why and len(why) > 10 for name, why in cases.items())


def test_every_program_is_installed_by_the_suite():
    lines = [line for name in ("requirements", "agents") for line in (HERE / f"{name}.txt").read_text().splitlines()]
    pinned = {line.split("==")[0].split("[")[0] for line in lines if "==" in line}
    packages = json.loads((HERE / "package.json").read_text())["dependencies"]
    for stage in STAGES:
        ours = {"transformers"}  # comes with this environment
        assert stage.replayed or stage.program in (packages if stage.node else pinned | ours), stage.name
        assert (HERE / "stages" / stage.script).is_file()
