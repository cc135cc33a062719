"""What long work shows: lines for a log, with what is done, how fast, and how long it goes on; and bars that fit."""

import io
import sys
from types import SimpleNamespace

import pytest
from support import RTN, cli

from moepack.shared import progress as shown
from moepack.shared.progress import BarReporter, LineReporter, duration, loading, size


class Clock:
    """A clock that a test sets."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(shown, "peak_memory", lambda: 3_400_000_000)
    # Not time's own: an event loop of another fixture would then sleep until the fake clock reaches its timers
    monkeypatch.setattr(shown, "time", SimpleNamespace(monotonic=made))
    return made


def test_lines_say_what_is_done_how_fast_and_how_long_is_left(clock):
    lines = []
    reporter = LineReporter(lines.append, clock)
    reporter.stage("quantise", 4)
    for layer in range(4):
        reporter.step(f"layer {layer}")
        reporter.inner("experts", 64)
        clock.now += 29
        reporter.advance(16)
        if layer == 3:
            clock.now += 1
            reporter.advance(16)  # half a minute after the last line
        clock.now += 71 if layer < 3 else 10
    reporter.step("done")
    reporter.note("a note")
    reporter.stage("load", 1)
    reporter.step("bundle")
    for done in (1, 2):
        clock.now += 30
        reporter.bytes(done * 10**9, 4 * 10**9)
    reporter.close()
    assert lines == [
        "quantise: layer 0, 0 of 4 (0%), peak 3.4 GB",
        "quantise: layer 1, 1 of 4 (25%), 1 min 40 s each, 5 min 00 s left, peak 3.4 GB",
        "quantise: layer 2, 2 of 4 (50%), 1 min 40 s each, 3 min 20 s left, peak 3.4 GB",
        "quantise: layer 3, 3 of 4 (75%), 1 min 40 s each, 1 min 40 s left, peak 3.4 GB",
        "quantise: layer 3, 3 of 4 (75%), 1 min 40 s each, 32 of 64 experts (50%), 1 experts/s, 1 min 10 s left, "
        "peak 3.4 GB",
        "a note",
        "quantise: 4 of 4 in 5 min 40 s",
        "load: bundle, peak 3.4 GB",
        "load: bundle, 1.0 GB of 4.0 GB (25%), 33.3 MB/s, 1 min 30 s left, peak 3.4 GB",
        "load: bundle, 2.0 GB of 4.0 GB (50%), 33.3 MB/s, 1 min 00 s left, peak 3.4 GB",
        "load: 2.0 GB of 4.0 GB in 1 min 00 s, 33.3 MB/s",
    ]


def test_a_short_load_has_no_line(clock):
    lines = []
    reporter = LineReporter(lines.append, clock, patient=True)
    for seconds in (1, 20):
        reporter.stage("loading", 1)
        reporter.step("bundle")
        for done in (1, 2):
            clock.now += seconds
            reporter.bytes(done * 10**9, 2 * 10**9)
        reporter.close()
    assert lines == [
        "loading: bundle, 2.0 GB of 2.0 GB (100%), 50.0 MB/s, 0.0 s left, peak 3.4 GB",
        "loading: 2.0 GB of 2.0 GB in 40 s, 50.0 MB/s",
    ]


def test_many_steps_have_at_most_a_line_a_percent(clock):
    lines = []
    reporter = LineReporter(lines.append, clock)
    reporter.stage("verify digests", 2000)
    for step in range(2000):
        reporter.step(f"file {step}")
    reporter.step("done")
    reporter.close()
    assert len(lines) == 101 and lines[-1] == "verify digests: 2000 of 2000 in 0.0 s"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.mark.parametrize(("width", "encoding"), [(40, "utf-8"), (60, "utf-8"), (100, "utf-8"), (140, "ascii")])
def test_bars_leave_out_the_bar_first_and_the_time_left_never(width, encoding, clock, monkeypatch):
    terminal = Terminal()
    terminal.encoding = encoding
    monkeypatch.setattr(sys, "stderr", terminal)
    reporter = BarReporter()
    reporter.stage("calibrate and quantise", 48)
    for layer in range(13):
        reporter.step(f"layer {layer}")
        clock.now += 100
    reporter.inner("tokens", 40_960)
    clock.now += 10
    reporter.advance(12_288)
    first, second = reporter.lines(width)
    bar = "━" if encoding == "utf-8" else "#"
    assert len(first) <= width and len(second) <= width
    assert "58 min 10 s left" in first and "12,288 of 40,960 tokens" in second
    assert first.startswith("calibrate an") and (bar in first) == (width >= 100)
    assert "12/48" in first and ("peak 3.4 GB" in first) == (width >= 60)


def test_a_terminal_is_told_of_a_load_and_then_forgets_it(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with loading("bundle") as report:
        report(10, 20)
    assert "loading: bundle" in terminal.getvalue() and "10 bytes of 20 bytes" in terminal.getvalue()


def test_sizes_and_times():
    assert [duration(t) for t in (0.04, 9.94, 9.96, 200, 7500, 356_400)] == [
        "0.0 s", "9.9 s", "10 s", "3 min 20 s", "2 h 05 min", "4 d 03 h",
    ]  # fmt: skip
    assert [size(n) for n in (0, 999, 1500, 3.24e9, 5.7e13)] == ["0 bytes", "999 bytes", "1.5 kB", "3.2 GB", "57.0 TB"]


def test_commands_write_results_to_stdout_and_a_line_a_layer_to_stderr(short_model, text, evaluation, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RTN + "versions: [bf16, w2]\n")
    bundle = tmp_path / "b"
    few = ("--length", "32", "--samples", "2", "--policy", "static:w2")
    building = ("build", short_model, "-o", bundle, "-r", recipe, "-c", text)
    codes = ("--to", "compressed-tensors", "--bits", "2")
    for command, said, stages in (
        ((*building, "--dry-run"), "bundle, bytes", {"dry run": 4}),
        (building, "calibrated on 256 tokens", {"calibrate and quantise": 2, "pack": 2}),
        (("inspect", bundle), "bits/weight", {}),
        (("plan", bundle, "--device-memory", "40MB"), "least that would do", {}),
        (("verify", bundle), f"{bundle}: good", {"verify digests": 4}),
        (("verify", bundle, "--checkpoint", short_model), "bit-identical with", {"compare with checkpoint": 2}),
        (("export", bundle, "-o", tmp_path / "e"), "tensors as they were", {"write the checkpoint": 2}),
        (("export", bundle, "-o", tmp_path / "c", *codes), "values rounded", {"export": 2}),
        (("shrink", bundle, "-o", tmp_path / "s", "--versions", "w2"), "keeps w2", {"shrink": 2}),
        (("eval", bundle, "-d", evaluation, *few), "perplexity", {"load": 1, "evaluate": 1}),
    ):
        code, out, err = cli(*command)
        lines = err.splitlines()
        assert code == 0 and said in out and said not in err and bool(stages) == bool(err), (command, out, err)
        for stage, least in stages.items():
            of_stage = [line for line in lines if line.startswith(f"{stage}: ")]
            assert len(of_stage) > least and " in " in of_stage[-1], (command, err)
            assert least == 1 or any(" left" in line and "%)" in line for line in of_stage), (command, err)
