"""HF_ENDPOINT may name a server that is no Hub: a command then ends in one line that names it, and what to do."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from hub_stand_in import point
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

    class Handler(BaseHTTPRequestHandler):
        def _any(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_HEAD = _any

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    there = f"http://127.0.0.1:{server.server_address[1]}"
    point(monkeypatch, there, tmp_path / "hub")
    yield there
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("command", "answer"), CASES)
def test_a_server_that_is_no_hub(command, address, bundle, tmp_path):
    given = [word.format(bundle=bundle, out=tmp_path / "out") for word in COMMANDS[command]]
    refused(cli(*given), "someone/mini", address, "HF_ENDPOINT")
    assert not (tmp_path / "out").exists()
