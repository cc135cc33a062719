"""How fast the server refuses hostile requests, what an honest client feels of it, and whether calls are valid.

    python -m benchmarks.refusals [--url http://127.0.0.1:8000 [--key KEY]] [--rounds 5] [--calls 200]

Each request is sent from a second process, as hostile clients are, while this one streams an honest answer. The table
has the status, the least, median and longest time until the refusal in milliseconds, and the longest pause between two
pieces of the honest answer. Then required calls are asked for at temperature 1, and those counted whose arguments are
JSON and keep to the function's schema.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.common import EXAMPLES, arguments, show
from benchmarks.serve import built, moepack_serve

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COLUMNS = ("request", "status", "least ms", "median ms", "longest ms", "honest pause ms")
TEMPLATE = (
    "{% if tools %}{% for t in tools %}{{ t.function.name }} {% endfor %}<tool_call></tool_call>{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
SAID = [{"role": "user", "content": "Hello"}]
FULL = 4 << 20  # bytes: the server's default of the most it reads
CALL = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "units": {"enum": ["metric", "imperial"]},
        "hours": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 23}, "maxItems": 3},
    },
    "required": ["city", "days", "units"],
    "additionalProperties": False,
}


def schema(**fields: Any) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}


def nested(levels: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        made = schema(a=made)
    return made


def requests(model: str) -> dict[str, tuple[str, bytes]]:
    """Hostile requests by name: the path, and the body."""

    def chat(**more: Any) -> tuple[str, bytes]:
        return CHAT, json.dumps({"model": model, "messages": SAID, "max_tokens": 1, **more}).encode()

    def held(given: dict[str, Any]) -> tuple[str, bytes]:
        tool = {"type": "function", "function": {"name": "f", "parameters": given}}
        return chat(tools=[tool], tool_choice="required")

    def full(piece: bytes) -> tuple[str, bytes]:
        return CHAT, b'{"messages":[' + piece * ((FULL - 40) // len(piece)) + b"0]}"

    named = [{"type": "function", "function": {"name": f"f{n}"}} for n in range(100_000)]
    defs: dict[str, Any] = {
        f"d{n}": {"allOf": [{"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}, schema(**{f"k{n}{j}": {}})]} for j in range(3)]}
        for n in range(12)
    }
    bomb = {**schema(a={"$ref": "#/$defs/d0"}), "$defs": {**defs, "d12": {"type": "integer"}}}
    choices = [{"anyOf": [schema(**{f"k{i}{j}": {}}) for j in range(3)]} for i in range(12)]
    return {
        "lists 4 MiB deep": (CHAT, b"[" * FULL),
        "objects 4 MiB deep": (CHAT, b'{"a":' * (FULL // 5)),
        "4 MiB of lists": full(b"[],"),
        "4 MiB of objects": full(b'{"a":0},'),
        "4 MiB of numbers": full(b"1e9,"),
        "4 MiB of strings": full(b'"a",'),
        "4 MiB of quotes": (CHAT, b'{"a":"' + b'\\"' * (FULL // 2 - 8) + b"," * 9),
        "100,000 tools": chat(tools=[{}] * 100_000),
        "100,000 tools with names": chat(tools=named),
        "100,000 tools, as messages": (MESSAGES, json.dumps({"model": model, "tools": [{}] * 100_000}).encode()),
        "100,000 items of input": (RESPONSES, json.dumps({"model": model, "input": [{}] * 100_000}).encode()),
        "a schema 900 levels deep": held(nested(400)),
        "a schema 60 levels deep": held(nested(60)),
        "a schema of 10,000 fields": held(schema(**{f"p{n}": {"type": "string"} for n in range(10_000)})),
        "a schema of 10,000 values": held(schema(a={"enum": [f"value {n}" for n in range(10_000)]})),
        "a schema of choices of choices": held(schema(a={"allOf": choices})),
        "a schema that doubles itself": held(bomb),
        "a pattern of a million letters": held(schema(a={"type": "string", "pattern": "^(a{1000}){1000}$"})),
        "a pattern of half a million letters": held(schema(a={"type": "string", "pattern": "a?" * 250_000})),
        "a multiple of a large prime": held(schema(a={"type": "integer", "multipleOf": 999_999_937})),
        "a number of 300 digits": held(schema(a={"type": "integer", "maximum": 10**300})),
        "a schema from elsewhere": held(schema(a={"$ref": "http://127.0.0.1/"})),
    }


def post(url: str, path: str, body: bytes, key: str) -> tuple[int, float, bytes]:
    """Status, seconds until the answer's end, and its body."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection.connect()
    began = time.perf_counter()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before it was sent
        connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    out = answer.read()
    return answer.status, time.perf_counter() - began, out


def _hostile(url: str, key: str, path: str, body: bytes, rounds: int, found: Any) -> None:
    found.put([post(url, path, body, key)[:2] for _ in range(rounds)])


class Honest(threading.Thread):
    """Streams answers until it is told to stop, and notes the longest pause between two pieces."""

    def __init__(self, url: str, model: str, key: str) -> None:
        super().__init__(daemon=True)
        self._url, self._key, self.stopping, self.longest = urlsplit(url), key, False, 0.0
        more = {"max_tokens": 400, "stream": True, "ignore_eos": True, "temperature": 0}
        self._body = json.dumps({"model": model, "prompt": "The history of", **more}).encode()

    def run(self) -> None:
        """Stream."""
        while not self.stopping:
            connection = http.client.HTTPConnection(self._url.hostname or "", self._url.port, timeout=60)
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
            connection.request("POST", "/v1/completions", self._body, headers)
            answer, last = connection.getresponse(), 0.0
            while not self.stopping and answer.readline():
                now = time.perf_counter()
                self.longest = max(self.longest, now - last if last else 0.0)
                last = now
            connection.close()


def calls(url: str, model: str, key: str, wanted: int) -> tuple[int, int]:
    """Ask for calls; return how many came, and how many of them keep to the schema."""
    from jsonschema import ValidationError, validate  # type: ignore[import-untyped]

    tool = {"type": "function", "function": {"name": "weather", "parameters": CALL}}
    came = good = 0
    while came < wanted:
        more = {"n": min(50, wanted - came), "max_tokens": 400, "temperature": 1.0, "seed": came}
        asked = {"model": model, "messages": SAID, "tools": [tool], "tool_choice": "required", **more}
        asked["parallel_tool_calls"] = False
        for choice in json.loads(post(url, CHAT, json.dumps(asked).encode(), key)[2])["choices"]:
            came += 1
            for call in choice["message"].get("tool_calls", ()):
                try:
                    validate(json.loads(call["function"]["arguments"]), CALL)
                    good += 1
                except (ValueError, ValidationError):
                    pass
    return came, good


def measured(url: str, key: str, rounds: int) -> list[dict[str, Any]]:
    """A row a request, while an honest answer is streamed."""
    model = name_of(url, key)
    own, rows = multiprocessing.get_context("spawn"), []
    honest = Honest(url, model, key)
    honest.start()
    time.sleep(2)
    rows.append({"request": "none", "honest pause ms": round(1e3 * honest.longest)})
    for name, (path, body) in requests(model).items():
        found, honest.longest = own.SimpleQueue(), 0.0
        process = own.Process(target=_hostile, args=(url, key, path, body, rounds, found))
        process.start()
        answers = found.get()
        process.join()
        times, statuses = [1e3 * seconds for _, seconds in answers], {str(status) for status, _ in answers}
        spread = {"least ms": min(times), "median ms": statistics.median(times), "longest ms": max(times)}
        row = {"request": name, "status": "/".join(statuses), **{k: round(v, 1) for k, v in spread.items()}}
        rows.append({**row, "honest pause ms": round(1e3 * honest.longest)})
    honest.stopping = True
    honest.join()
    return rows


def name_of(url: str, key: str) -> str:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port)
    connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"})
    return str(json.loads(connection.getresponse().read())["data"][0]["id"])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--url", help="a running server; without it one of the model in examples/ is started")
    parser.add_argument("--key", default="none", help="that server's key")
    parser.add_argument("--rounds", type=int, default=5, help="times that each request is sent")
    parser.add_argument("--calls", type=int, default=200, help="required calls to ask for")
    asked = parser.parse_args()
    rounds, wanted = (1, 4) if asked.quick else (asked.rounds, asked.calls)
    with contextlib.ExitStack() as held:
        url = asked.url
        if url is None:
            work = Path(held.enter_context(tempfile.TemporaryDirectory()))
            (work / "template.jinja").write_text(TEMPLATE)
            given = ("--policy", "static:w4", "--chat-template", str(work / "template.jinja"))
            port, _ = held.enter_context(moepack_serve(built(work, EXAMPLES / "mini-qwen3-moe"), *given))
            url = f"http://127.0.0.1:{port}"
        show("Hostile requests", COLUMNS, measured(url, asked.key, rounds))
        came, good = calls(url, name_of(url, asked.key), asked.key, wanted)
    print(f"calls: {good} of {came} keep to the schema")
    if good < came:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
