"""While a model loads: an open port that says how far it is, and an end when loading fails or is stopped."""

import contextlib
import json
import os
import re
import signal
import threading
import urllib.error
import urllib.request

import pytest
from live_models import wait_for
from server_fixtures import ask, post
from support import PATIENCE

import moepack.server.command as command
from moepack.runtime.planning.options import LoadOptions
from moepack.server.command import Serve, serve
from moepack.server.http.front import LONGEST, UNKNOWN, Front, Progress, Stopped
from moepack.server.options import Options


def test_progress_in_bytes_and_seconds():
    """The time left and `retry-after` follow from the rate between reports, and fall while nothing is reported."""
    now = 10.0
    found = Progress(lambda: now)
    assert found.described() == {
        "status": "loading", "bytes": 0, "total_bytes": 0, "bytes_per_second": None, "seconds_left": None,
    }  # fmt: skip
    assert found.retry_after() == UNKNOWN
    found.report(100, 1000)
    assert found.described()["seconds_left"] is None and found.retry_after() == UNKNOWN
    seen = []
    for at, done in ((12.0, 300), (14.0, 500), (16.0, 700)):
        now = at
        found.report(done, 1000)
        assert found.described()["bytes_per_second"] == 100
        seen.append(found.retry_after())
    now = 17.5
    seen.append(found.retry_after())
    now = 60.0
    assert [*seen, found.retry_after()] == [7, 5, 3, 2, 1]
    found.report(701, 10**9)
    assert found.retry_after() == LONGEST
    found.stopping = True
    with pytest.raises(Stopped):
        found.report(800, 1000)


def refused(url, body=None):
    """The status, when to come back, and the JSON of a refusal."""
    with pytest.raises(urllib.error.HTTPError) as error:
        post(url, body)
    return error.value.code, error.value.headers["retry-after"], json.loads(error.value.read())


class Held:
    """Loads in this process that stop at a report until they are let go."""

    def __init__(self, monkeypatch):
        self.go, self.words = threading.Event(), []
        real = command._load

        def load(asked, report):
            report(300, 1200)
            assert self.go.wait(PATIENCE)
            return real(asked, report)

        monkeypatch.setattr(command, "_load", load)

    @contextlib.contextmanager
    def shown(self, where):
        self.words.append(where)
        yield lambda done, total: self.words.append(f"{done} of {total}")

    def talk(self, about):
        """Call `about` with the address, on a thread, once bytes were reported."""

        def run():
            wait_for(lambda: len(self.words) > 1)
            about(re.sub(".* at ", "", self.words[0]))

        threading.Thread(target=run, daemon=True).start()


def test_the_port_is_open_while_the_model_loads(bundle, monkeypatch):
    held, seen = Held(monkeypatch), []
    loaded = threading.Event()

    def about(url):
        try:
            seen.append(refused(f"{url}/health"))
            seen.append(refused(f"{url}/v1/completions", {"prompt": "a"}))
            seen.append(refused(f"{url}/"))
            with pytest.raises(urllib.error.HTTPError) as page:
                post(f"{url}/", None, Accept="text/html,*/*;q=0.8")
            seen.append((page.value, page.value.read().decode()))
            held.go.set()
            assert loaded.wait(PATIENCE)
            seen.append(json.loads(post(f"{url}/health", None))["status"])
            seen.append(ask(url, "The history of", max_tokens=2)["finish_reason"])
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    held.talk(about)
    asked = Serve(str(bundle), LoadOptions(policy="static:w4"), port=0, grace=1, name="mini")
    serve(asked, lambda where: loaded.set(), held.shown)
    assert seen[0][0] == 503 and seen[0][2]["status"] == "loading"
    assert (seen[0][2]["bytes"], seen[0][2]["total_bytes"]) == (300, 1200) and int(seen[0][1]) >= 1
    assert seen[1][0] == 503 and seen[1][2]["error"]["message"] == "the model is loading: 25% of its bytes are read"
    assert seen[1][2]["error"]["code"] == "loading" and seen[4:] == ["ok", "length"]
    assert seen[2] == seen[1], "a client that does not ask for HTML"
    page, text = seen[3]
    assert page.code == 503 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert int(page.headers["retry-after"]) >= 1 and "script-src 'sha256-" in page.headers["content-security-policy"]
    assert "<progress" in text and 'fetch("health")' in text
    done, total = held.words[-1].split(" of ")
    assert done == total and held.words[0].startswith("mini at http://127.0.0.1:")


def test_a_signal_ends_a_load(bundle, monkeypatch):
    """The next report ends it, without an error and without a model that stays."""
    held, before = Held(monkeypatch), set(threading.enumerate())

    def about(url):
        os.kill(os.getpid(), signal.SIGINT)
        held.go.set()

    held.talk(about)
    serve(Serve(str(bundle), port=0, grace=1), lambda where: pytest.fail("it serves"), held.shown)
    left = set(threading.enumerate()) - before
    assert not [t for t in left if t.name in ("moepack-load", "moepack-migration")]


def test_a_model_that_is_loaded_after_the_stop_is_not_started():
    """It is closed already: what would start it waits in the event loop behind the stop."""

    class Loaded:
        def start(self):
            pytest.fail("it starts")

    front = Front(Options("mini", "127.0.0.1"), lambda held, report: None, lambda: pytest.fail("it serves"))
    front.stop()
    front._open(Loaded())
    front.close()
