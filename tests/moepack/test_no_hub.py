"""HF_ENDPOINT may name a server that is no Hub: a command then ends in one line that names it, and what to do."""

import pytest
from hub_stand_in import Handler, point, serve
from support import cli, refused

PAGE = ("text/html", b"<!doctype html><title>Hello</title>")
ANSWERS = {
    "a page": (200, *PAGE),
    "no page": (404, *PAGE),
    "no such method": (405, *PAGE),
    "a list": (200, "application/json", b"[1, 2]"),
    "other fields": (200, "application/json", b'{"status": "ok"}'),
}
COMMANDS = {
    "push": ("push", "{bundle}", "someone/mini", "-q"),
    "pull": ("pull", "someone/mini", "-o", "{out}", "-q"),
    "generate": ("generate", "someone/mini", "-p", "The"),
    "build": ("build", "someone/mini", "-o", "{out}", "-q"),
}
# push reads what is answered; the others ask for headers first.
CASES = [("push", answer) for answer in ANSWERS if answer != "no such method"]
CASES += [("pull", "a page"), ("pull", "no page"), ("pull", "no such method")]
CASES += [("generate", "a page"), ("build", "a page")]


@pytest.fixture
def address(answer, tmp_path, monkeypatch):
    """Of a server that gives the same answer to every request."""
    status, kind, body = ANSWERS[answer]

    class Same(Handler):
        def _any(self):
            self._body()
            self._send(body, status, {"Content-Type": kind})

    with serve(Same) as (_, there):
        point(monkeypatch, there, tmp_path / "hub")
        yield there


@pytest.mark.parametrize(("command", "answer"), CASES)
def test_a_server_that_is_no_hub(command, address, bundle, tmp_path):
    given = [word.format(bundle=bundle, out=tmp_path / "out") for word in COMMANDS[command]]
    refused(cli(*given), "someone/mini", address, "HF_ENDPOINT")
    assert not (tmp_path / "out").exists()
