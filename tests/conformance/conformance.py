"""`make conformance`: the programs that people point at such a server, against `moepack serve` of the example model.

Serves a bundle of examples/mini-qwen3-moe in a budget and runs each stage (stages/) against it, in a process of its own
with a limit: a stage that crashes, or whose program is absent, costs its own row. Ends with a table, and with status 0
only if nothing failed but what known.yaml lists. Needs no network: installing the programs did (docs/conformance.md).
"""

import argparse
import contextlib
import fnmatch
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import asdict, dataclass, field
from pathlib import Path

import yaml
from stages import STAGES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
MODEL = "mini"
SERVED = (
    "--name", MODEL, "--port", "0", "--policy", "hotness", "--chat-template", str(HERE / "chat.jinja"),
)  # fmt: skip
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "NO_COLOR": "1"}
SOMETIMES = "sometimes: "  # begins the reason of a failure that comes and goes
START, IDLE = 300.0, 30.0  # seconds until it serves; until no request of a stage that ended runs


@dataclass(slots=True)
class Row:
    """What one stage found. Cases are named; one is passed, failed as expected, or failed."""

    program: str
    version: str
    what: str
    passed: int = 0
    run: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # unexpected: name -> what the program said
    known: dict[str, str] = field(default_factory=dict)  # name -> the reason in known.yaml
    well: list[str] = field(default_factory=list)  # the names of those that passed
    mended: list[str] = field(default_factory=list)  # passed, though known.yaml lists them
    absent: str = ""  # why nothing ran
    seconds: float = 0.0


class Serving:
    """A server of a bundle on a free port, started when its address is asked for, and anew for another budget."""

    def __init__(self, bundle, log):
        self._command = [sys.executable, "-m", "moepack", "serve", str(bundle), *SERVED]
        self._log = log
        self._budget = ""
        self._process = None
        self._url = ""

    def url(self, budget):
        """The address of a server with this budget. Raises SystemExit with the log if it does not begin."""
        if budget != self._budget:
            self.end()
        if self._process is None:
            self._budget = budget
            command = [*self._command, "--device-memory", budget]
            with self._log.open("wb") as said:
                self._process = subprocess.Popen(
                    command, stdout=said, stderr=said, cwd=ROOT, env={**os.environ, **OFFLINE}
                )
            until = time.monotonic() + START
            while not (found := re.findall(r"serving \S+ at (http://\S+:\d+)", self._log.read_text())):
                if self._process.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"moepack serve did not begin:\n{self._log.read_text()}")
                time.sleep(0.1)
            self._url = found[0]
        return self._url

    def end(self):
        """End it, if it runs."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
            self._process = None

    def trouble(self):
        """Say what is wrong with it after a stage: it ended, it is unwell, or requests still run; "" if nothing is."""
        until = time.monotonic() + IDLE
        while True:
            if (code := self._process.poll()) is not None:
                return f"the server ended with {code}"
            try:
                with urllib.request.urlopen(f"{self._url}/health", timeout=60):
                    pass
                with urllib.request.urlopen(f"{self._url}/load", timeout=60) as answer:
                    load = json.load(answer)
            except OSError as error:
                return f"the server does not answer: {error}"
            if not load["server_load"]:
                return ""
            if time.monotonic() > until:
                return f"{load['server_load']} requests run {IDLE:.0f} s after their client"
            time.sleep(0.2)


def ran(command, log, seconds, environment):
    """Run a stage with its children, and say how it went wrong; "" if it did not."""
    with log.open("wb") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, cwd=log.parent, env=environment, start_new_session=True
        )
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            return f"was ended after {seconds:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"ended with {code}: {lines[-1].strip() if lines else 'no word'}" if code else ""


def reason_of(name, known):
    """The reason that known.yaml gives for a case, by its name or by a pattern; None if it gives none."""
    found = (why for pattern, why in known.items() if fnmatch.fnmatchcase(name, pattern))
    return known.get(name) or next(found, None)


def judged(row, cases, known):
    """Count the cases of a stage into its row, by the failures that are known."""
    row.run = len(cases)
    for case in cases:
        name, reason = case["name"], reason_of(case["name"], known)
        if case["ok"]:
            row.passed += 1
            row.well.append(name)
            row.mended += [name] * (reason is not None and not reason.startswith(SOMETIMES))
        elif reason is None:
            row.failed[name] = case["why"]
        else:
            row.known[name] = reason.removeprefix(SOMETIMES)
    return row


def tried(stage, environment, work, serving, bundle, known):
    """Run one stage, and return its row."""
    row = Row(stage.program, stage.version(environment) or "", stage.what)
    command = stage.command(environment)
    if command is None or not row.version:
        row.absent = stage.missing
        return row
    out = work / f"{stage.name}.jsonl"
    out.write_text("")
    given = {
        **os.environ, **OFFLINE, "CONFORMANCE_URL": serving.url(stage.budget), "CONFORMANCE_MODEL": MODEL,
        "CONFORMANCE_BUNDLE": str(bundle), "CONFORMANCE_OUT": str(out), "CONFORMANCE_BIN": str(stage.bin(environment)),
    }  # fmt: skip
    began = time.monotonic()
    wrong = ran(command, work / f"{stage.name}.log", stage.seconds, given)
    cases = [json.loads(line) for line in out.read_text().splitlines()]
    if wrong:
        cases.append({"name": "the program", "ok": False, "why": wrong})
    elif not cases:
        cases.append({"name": "the program", "ok": False, "why": "it ran nothing"})
    if trouble := serving.trouble():
        cases.append({"name": "the server afterwards", "ok": False, "why": trouble})
        serving.end()
    row.seconds = round(time.monotonic() - began, 1)
    return judged(row, cases, known)


def table(rows):
    """The rows in Markdown."""
    out = ["| program | version | what ran | passed | failed, as known | failed |", "|---|---|---|---|---|---|"]
    for row in rows:
        known = {}
        for name, reason in row.known.items():
            known.setdefault(reason, []).append(name)
        counted = f"{row.passed} of {row.run}" if row.run != 1 or not row.well else row.well[0]
        cells = [
            row.program, row.version or "-", row.what, row.absent or counted,
            "; ".join(f"{', '.join(names)}: {reason}" for reason, names in known.items()),
            "; ".join(f"{name}: {why}" for name, why in row.failed.items()),
        ]  # fmt: skip
        out.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ")[:1000] for cell in cells) + " |")
    return "\n".join(out)


def built(out):
    """Build the bundle of the example model there, once it is taught chats, as the demo does. Return its folder."""
    examples = ROOT / "examples"
    model = out.with_name("taught")
    subprocess.run([sys.executable, HERE / "taught.py", examples / "mini-qwen3-moe", model], check=True, cwd=ROOT)
    command = [sys.executable, "-m", "moepack", "build", str(model), "-o", str(out)]
    command += ["--recipe", str(examples / "demo.yaml"), "--calibration", str(examples / "text/calibration.jsonl")]
    subprocess.run(command, check=True, cwd=ROOT)
    return out


def main():
    """Run the stages, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--environment", type=Path, default=ROOT / ".venv-conformance", help="where the programs are")
    parser.add_argument("--only", action="append", choices=[s.name for s in STAGES], help="run this stage alone")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--bundle", type=Path, help="serve this bundle, which an earlier run left in its --work")
    parser.add_argument("--work", type=Path, help="keep logs and reports there")
    asked = parser.parse_args()
    known = yaml.safe_load((HERE / "known.yaml").read_text())
    rows = []
    with tempfile.TemporaryDirectory(prefix="moepack-conformance-") as folder:
        work = (asked.work or Path(folder)).resolve()
        work.mkdir(parents=True, exist_ok=True)
        bundle = asked.bundle.resolve() if asked.bundle else built(work / "bundle")
        serving = Serving(bundle, work / "server.log")
        try:
            for stage in [s for s in STAGES if not asked.only or s.name in asked.only]:
                row = tried(stage, asked.environment.absolute(), work, serving, bundle, known.get(stage.name) or {})
                print(f"{stage.name}: {row.absent or f'{row.passed} of {row.run}, {row.seconds} s'}", flush=True)
                rows.append(row)
        finally:
            serving.end()
    if asked.json:
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    print("\n" + table(rows))
    for row in rows:
        if row.mended:
            print(f"{row.program}: known.yaml lists as failing what passed: {', '.join(row.mended)}")
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
