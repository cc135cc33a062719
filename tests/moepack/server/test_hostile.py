"""Harmful requests get a 4xx or are dropped, and an honest client is answered meanwhile."""

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request

import pytest
from server_fixtures import NAME, post
from support import PATIENCE

from moepack.server.http import guard

HONEST = {"model": NAME, "prompt": "The history of", "max_tokens": 2, "temperature": 0}
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def send(running, raw, seconds=PATIENCE):
    """The answer to these bytes, until the server closes."""
    with socket.create_connection(("127.0.0.1", running.port), timeout=seconds) as peer:
        peer.sendall(raw)
        out = b""
        while part := peer.recv(1 << 16):
            out += part
        return out


def answered(running, body, path="/v1/completions", **headers):
    """Status of an answer, and the JSON of one to a completion's request."""
    try:
        status, raw = 200, post(running.url + path, body, **headers)
    except urllib.error.HTTPError as error:
        status, raw = error.code, error.read()
    return status, {} if body is None else json.loads(raw)


@pytest.fixture(autouse=True)
def honest(running):
    yield
    status, answer = answered(running, json.dumps(HONEST).encode())
    assert status == 200 and answer["choices"][0]["text"]


ELSEWHERE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1/"}}}
BODIES = {
    "nothing": b"",
    "no JSON": b"{",
    "not UTF-8": b'{"model": "\xff\xfe"}',
    "nested": b"[" * 60_000,
    "a number of 60,000 digits": b'{"max_tokens": ' + b"9" * 60_000 + b"}",
    "Infinity": json.dumps({**HONEST, "top_p": float("inf")}).encode(),
    "1e999": json.dumps({**HONEST, "temperature": 1}).replace(': 1}', ': 1e999}').encode(),
    "half a surrogate pair": json.dumps({**HONEST, "prompt": "\ud800"}).encode(),
    "1e999 in what changes nothing": b'{"model": "mini", "prompt": "x", "user": 1e999}',
    "a key of 50,000 letters": json.dumps({**HONEST, "x" * 50_000: 1}).encode(),
    "many prompts": json.dumps({**HONEST, "prompt": ["a"] * 10_000}).encode(),
    "a huge bias": json.dumps({**HONEST, "logit_bias": {"1" * 5000: 1}}).encode(),
    "true for a number": json.dumps({**HONEST, "max_tokens": True}).encode(),
    "a schema from elsewhere": json.dumps({**HONEST, "response_format": ELSEWHERE}).encode(),
}  # fmt: skip


def test_bodies(running):
    for name, body in BODIES.items():
        status, answer = answered(running, body)
        assert status == 400 and answer["error"]["type"] == "invalid_request_error", name
        assert len(answer["error"]["message"]) < 60_000, name


def test_bodies_that_are_too_long(running):
    """By their declared length, and by the bytes that come without one."""
    assert answered(running, b" " * ((1 << 16) + 1))[0] == 413
    close = POST + b"Connection: close\r\n"
    assert send(running, close + b"Content-Length: 99999999999999999999\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
    answer = send(running, close + b"Transfer-Encoding: chunked\r\n\r\n" + 3 * chunk + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")


CLOSE = b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"


NO_HTTP = (
    (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"400"),  # TLS
    (CLOSE + b"X: " + b"y" * 100_000 + b"\r\n\r\n", b"4"),
    (CLOSE + b"X: y\r\n" * 20_000 + b"\r\n", b"4"),
    (CLOSE + b"X: y\r\n" * 150 + b"\r\n", b"431"),
    (b"GET /" + b"a" * 5_000 + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"414"),
    (b"GET / HTTP/1.1\r\n\r\n", b"400"),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\nX\r\n\r\n", b"400"),
    (b"BREW /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b"405"),
)


def test_what_is_no_http(running):
    for raw, status in NO_HTTP:
        with contextlib.suppress(ConnectionError):  # dropped while it was still sending
            answer = send(running, raw)
            assert not answer or answer.startswith(b"HTTP/1.1 " + status), raw[:80]


def test_paths(running):
    for path in (
        "/../../etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "//etc/passwd", "/page.html", "/static/..%2f..%2fetc/passwd",
        "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd", "/live/../live%00",
        "/v1/completions/", "/.git/config", "/\\..\\..", "/docs",
    ):  # fmt: skip
        answer = send(running, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        assert answer.startswith((b"HTTP/1.1 404 ", b"HTTP/1.1 400 ", b"HTTP/1.1 307 ")), path
        assert b"root:" not in answer


def test_a_web_page_cannot_use_it(running):
    """Forms, which a browser sends to any address, and other host names are refused; no other origin is permitted."""
    body = json.dumps(HONEST).encode()
    assert answered(running, body, Content_Type="text/plain")[0] == 415
    assert answered(running, body, Content_Type="application/x-www-form-urlencoded")[0] == 415
    assert answered(running, body, Content_Encoding="gzip")[0] == 415
    assert answered(running, body, Host="evil.example")[0] == 403
    assert answered(running, body, Host="localhost.evil.example:80")[0] == 403
    for host in ("localhost", "127.0.0.1:8000", "[::1]:8000", "localhost:1"):
        assert answered(running, body, Host=host)[0] == 200
    head = CLOSE.replace(b"GET /", b"OPTIONS /v1/completions") + b"Origin: http://evil.example\r\n"
    assert b"access-control" not in send(running, head + b"Access-Control-Request-Method: POST\r\n\r\n").lower()


def test_clients_that_are_slow(running, monkeypatch):
    """Headers letter by letter, nothing at all, a body that stops, a second request that never ends."""
    monkeypatch.setattr(guard, "HEADERS", 0.5)
    monkeypatch.setattr(guard, "BODY", 0.5)
    assert send(running, b"") == b""
    assert send(running, b"GET / HTT") == b""
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as peer:
        for letter in b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 400:
            try:
                peer.sendall(bytes([letter]))
            except OSError:
                break
            time.sleep(0.005)
        else:
            pytest.fail("it listened for two seconds")
    answer = send(running, POST + b'Connection: close\r\nContent-Length: 100\r\n\r\n{"mod')
    assert answer.startswith(b"HTTP/1.1 408 ")
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as peer:
        peer.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert peer.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        peer.sendall(b"GET /hea")
        while peer.recv(1 << 16):
            pass


def test_a_send_without_a_reader_ends(monkeypatch):
    from moepack.server.http import answer

    monkeypatch.setattr(answer, "PATIENCE", 0.05)

    async def never(message):
        await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        asyncio.run(answer._sent(never, {"type": "http.response.body"}))


def test_a_stream_is_not_silent_before_its_first_token(monkeypatch):
    """Comments, which no client shows, keep clients from giving up."""
    from moepack.server.http import answer

    monkeypatch.setattr(answer, "SILENCE", 0.01)
    sent = []
    enough = asyncio.Event()

    class Reply:
        done = b"done"

        async def chunks(self, batches):
            await enough.wait()
            yield [{"n": 1}]
            yield [{"n": 2}]

        def event(self, value):
            return b"%d" % value["n"]

    async def send(message):
        sent.append(message.get("body"))
        if len(sent) == 3:
            enough.set()

    made = answer.Streamed(Reply(), None, {})
    asyncio.run(made({}, send, send))
    assert sent == [None, answer.COMMENT, answer.COMMENT, b"1", b"2", b"done"]


def test_a_client_that_does_not_read(running):
    """It asks for much and reads nothing: others are answered, and its own answers end."""
    running.idle()
    much = {**HONEST, "max_tokens": 100, "n": 4, "stream": True, "ignore_eos": True, "logprobs": 20}
    body = json.dumps(much).encode()
    with socket.socket() as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.connect(("127.0.0.1", running.port))
        peer.sendall(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.2)
        assert answered(running, json.dumps(HONEST).encode())[0] == 200
        running.idle()


def test_a_key(running, monkeypatch):
    app = running.server.app
    monkeypatch.setattr(app, "_keys", [b"other", b"secret"])
    body = json.dumps(HONEST).encode()
    for wrong in (None, "Bearer wrong", "secret", "Basic secret"):
        given = {} if wrong is None else {"Authorization": wrong}
        status, answer = answered(running, body, **given)
        assert status == 401 and answer["error"]["code"] == "invalid_api_key"
        assert [answered(running, None, path, **given)[0] for path in ("/live", "/metrics", "/v1/models")] == [401] * 3
        assert [answered(running, None, path, **given)[0] for path in ("/", "/health", "/load")] == [200] * 3
    assert [answered(running, body, Authorization=f"Bearer {key}")[0] for key in ("other", "secret")] == [200] * 2
    assert answered(running, None, "/live", Authorization="bearer secret")[0] == 200
    status, answer = answered(running, b"{}", "/v1/messages", x_api_key="wrong")  # as Anthropic's clients send it
    assert status == 401 and answer["error"]["type"] == "authentication_error"
    assert answered(running, body, x_api_key="secret")[0] == 200
    monkeypatch.setattr(app, "_keys", [])


def test_idle_connections_make_room(running, monkeypatch):
    """Many more than there may be, which send nothing: others are answered, and few are left open."""
    kinds = guard.Patient.__subclasses__()
    for kind in kinds:
        monkeypatch.setattr(kind, "most", 20)
    with contextlib.ExitStack() as held:
        for _ in range(200):
            held.enter_context(socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE))
        assert answered(running, None, "/health")[0] == 200
        assert answered(running, json.dumps(HONEST).encode())[0] == 200
        assert max(len(kind.idle) for kind in kinds) <= 21


def test_requests_beyond_the_most_are_refused_as_json():
    """But for /health; and others come again once one has ended."""
    said = []

    async def send(message):
        said.append(message)

    async def run():
        ends = asyncio.Event()

        async def app(scope, receive, send):
            await ends.wait()

        bounded = guard.Bounded(app, 1)
        scope = {"type": "http", "path": "/v1/completions"}
        first = asyncio.create_task(bounded(scope, None, send))
        await asyncio.sleep(0)
        await bounded(scope, None, send)
        health = asyncio.create_task(bounded({**scope, "path": "/health"}, None, send))
        ends.set()
        await asyncio.gather(first, health)
        await bounded(scope, None, send)

    asyncio.run(run())
    assert [message.get("status") for message in said] == [503, None]
    assert json.loads(said[1]["body"])["error"]["code"] == "too_many_connections"


def test_a_client_that_leaves_within_its_upload(running, caplog):
    with socket.create_connection(("127.0.0.1", running.port), timeout=PATIENCE) as peer:
        peer.sendall(POST + b'Content-Length: 1000\r\n\r\n{"mod')
    assert answered(running, json.dumps(HONEST).encode())[0] == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
