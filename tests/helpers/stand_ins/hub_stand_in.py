"""A Hugging Face Hub of one process: enough of its HTTP interface for uploads, downloads and model loading.

Files of repositories live in memory, as they were at every commit. Large files go through the LFS batch interface, as
on the real Hub; small ones come inside the commit. Every request is kept in `requests`, so that tests can see what was
asked for, and the connection can be cut inside an answer or before one.
"""

import base64
import contextlib
import hashlib
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


@dataclass
class Hub:
    """The server's state."""

    # Repository -> its files on main; "repository@branch" -> those on another branch.
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    history: dict[str, dict[str, bytes]] = field(default_factory=dict)  # commit -> a repository's files then
    objects: dict[str, bytes] = field(default_factory=dict)  # uploaded large files by digest, committed or not
    commits: dict[str, int] = field(default_factory=dict)  # as `files`: the number of commits
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and path of each
    tokens: dict[str, str] = field(default_factory=lambda: {"hf_test": "write", "hf_reader": "read"})
    # Asked before every answer with the method and the path: a status and a message, and the answer is that error.
    refuse: Callable[[str, str], tuple[int, str] | None] | None = None
    retry_after: str = ""  # header of these errors
    # Asked before every answer with the method and the path: True ends the connection without one.
    cut: Callable[[str, str], bool] | None = None
    cut_after: dict[str, int] = field(default_factory=dict)  # path's end -> bytes after which it is cut off, once
    ranges: list[int] = field(default_factory=list)  # first bytes that were asked for, beyond the first of a file

    def clear(self):
        """As if it had just started."""
        self.__init__()

    def sha(self, repo: str) -> str:
        return hashlib.sha1(f"{repo}/{self.commits.get(repo, 0)}".encode()).hexdigest()

    def at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes] | None]:
        """The commit of a branch or commit, and its files; None where there is no such revision."""
        heads = {key: self.sha(key) for key in self.files if key.partition("@")[0] == repo}
        for key, sha in heads.items():
            if revision in (sha, key.partition("@")[2] or "main"):
                return sha, self.files[key]
        return revision, self.history.get(revision)


def blob_id(data: bytes) -> str:
    """What git calls a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".png"))


def oid(name: str, data: bytes) -> str:
    """The digest by which a file is known to clients."""
    return hashlib.sha256(data).hexdigest() if is_large(name) else blob_id(data)


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: the second one waited 40 ms
    hub: Hub

    def log_message(self, *args):
        """Say nothing."""

    def _body(self) -> bytes:
        size = int(self.headers.get("Content-Length") or 0)
        if len(body := self.rfile.read(size)) < size:
            raise ConnectionError("the client was killed")
        return body

    def _send(self, value, status: int = 200, headers: dict[str, str] | None = None, sent: int | None = None):
        """Answer; `sent` bytes of the body, and then the connection ends."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[:sent])
        if sent is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _fail(self, status: int, code: str):
        self._send({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def _any(self):
        url = urlsplit(self.path)
        path = unquote(url.path)
        body = self._body()
        self.hub.requests.append((self.command, path))
        if self.hub.cut is not None and self.hub.cut(self.command, path):
            self.close_connection = True
            return
        parts = path.strip("/").split("/")
        if (error := self._refused(path)) is not None:
            status, message = error
            headers = {"Retry-After": self.hub.retry_after} if self.hub.retry_after else {}
            self._send({"error": message}, status, headers | {"X-Error-Message": message})
        elif path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization']}/{asked['name']}" if asked.get("organization") else asked["name"]
            self.hub.files.setdefault(repo, {})
            self._send({"url": f"{self._base()}/{repo}", "name": repo, "id": repo})
        elif path == "/api/validate-yaml":
            self._send({"errors": [], "warnings": []})
        elif parts[0] == "objects":
            self._object(parts[1], body)
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._send({"transfer": "basic", "objects": [self._lfs(o) for o in json.loads(body)["objects"]]})
        elif parts[:2] == ["api", "models"]:
            self._model("/".join(parts[2:4]), parts[4:], body)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self._fail(404, "RepoNotFound")

    def _refused(self, path: str) -> tuple[int, str] | None:
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and token not in self.hub.tokens:
            return 401, "Invalid credentials in Authorization header"
        reads = "/paths-info/" in path or path == "/api/validate-yaml"
        writes = (self.command == "POST" and not reads) or "/xet-write-token/" in path
        if writes and self.hub.tokens.get(token) != "write":
            return 403, "You need write access."
        return self.hub.refuse(self.command, path) if self.hub.refuse is not None else None

    def _base(self) -> str:
        return f"http://{self.headers['Host']}"

    def _object(self, oid: str, body: bytes):
        if self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == oid
            self.hub.objects[oid] = body
        self._send({})

    def _lfs(self, asked: dict[str, Any]) -> dict[str, Any]:
        out = {"oid": asked["oid"], "size": asked["size"], "authenticated": True}
        if asked["oid"] not in self.hub.objects:
            out["actions"] = {"upload": {"href": f"{self._base()}/objects/{asked['oid']}"}}
        return out

    def _model(self, repo: str, rest: list[str], body: bytes):
        if repo not in self.hub.files:
            self._fail(404, "RepoNotFound")
            return
        what = rest[0] if rest else ""
        if what == "branch":
            self.hub.files.setdefault(f"{repo}@{rest[1]}", dict(self.hub.files[repo]))
            self._send({})
            return
        if what == "xet-write-token":
            self._send({"error": "Not Found"}, 404)
            return
        sha, files = self.hub.at(repo, rest[1] if len(rest) > 1 else "main")
        if files is None:
            self._fail(404, "RevisionNotFound")
        elif what == "preupload":
            self._send({"files": [self._mode(f["path"], files) for f in json.loads(body)["files"]]})
        elif what == "commit":
            self._commit(repo if rest[1] == "main" else f"{repo}@{rest[1]}", files, body)
        elif what == "tree":
            self._send([self._entry(name, data) for name, data in files.items()])
        elif what == "paths-info":
            wanted = parse_qs(body.decode())["paths"]
            self._send([self._entry(name, data) for name, data in files.items() if name in wanted])
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self._send({"id": repo, "modelId": repo, "sha": sha, "siblings": siblings, "tags": []})

    def _mode(self, name: str, files: dict[str, bytes]) -> dict[str, Any]:
        out = {"path": name, "uploadMode": "lfs" if is_large(name) else "regular", "shouldIgnore": False}
        return out | ({"oid": oid(name, files[name])} if name in files else {})

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        out = {"type": "file", "path": name, "size": len(data), "oid": blob_id(data)}
        if is_large(name):
            out["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return out

    def _commit(self, key: str, files: dict[str, bytes], body: bytes):
        repo = key.partition("@")[0]
        new = dict(files)
        for item in map(json.loads, body.splitlines()):
            value = item["value"]
            if item["key"] == "header" and value.get("parentCommit") not in (None, self.hub.sha(key)):
                self._fail(412, "PreconditionFailed")
                return
            if item["key"] == "file":
                new[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                new[value["path"]] = self.hub.objects[value["oid"]]
            elif item["key"] == "deletedFile":
                del new[value["path"]]
        self.hub.history[self.hub.sha(key)] = files
        self.hub.files[key] = new
        self.hub.commits[key] = self.hub.commits.get(key, 0) + 1
        sha = self.hub.sha(key)
        self._send(
            {"success": True, "commitOid": sha, "commitUrl": f"{self._base()}/{repo}/commit/{sha}", "hookOutput": ""}
        )

    def _resolve(self, repo: str, revision: str, name: str):
        sha, files = self.hub.at(repo, revision)
        if files is None or name not in files:
            missing = "Entry" if files is not None else "Revision" if repo in self.hub.files else "Repo"
            self._fail(404, f"{missing}NotFound")
            return
        data = files[name]
        head = {"ETag": f'"{oid(name, data)}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        status, begin, asked = 200, 0, self.headers.get("Range")
        if asked:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(data) - 1), len(data) - 1)
            head["Content-Range"] = f"bytes {begin}-{end}/{len(data)}"
            status, data = 206, data[begin : end + 1]
            if begin:
                self.hub.ranges.append(begin)
        found = next((k for k in self.hub.cut_after if name.endswith(k)), None)
        sent = None if found is None or self.command == "HEAD" else self.hub.cut_after.pop(found)
        self._send(data, status, head, sent)

    def do_GET(self):
        self._any()

    do_POST = do_PUT = do_HEAD = do_GET


class Server(ThreadingHTTPServer):
    """Clients that are killed, or cut off, are no errors of its."""

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def point(patch: pytest.MonkeyPatch, address: str, cache: Path, offline: bool = False):
    """Point the Hub library, which reads its settings as it is imported, at an address."""
    from huggingface_hub import constants
    from transformers.utils import hub

    patch.setattr(hub, "_hf_api", None, raising=False)  # made once, perhaps while a test points elsewhere
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    for name, value in (
        ("ENDPOINT", address), ("HUGGINGFACE_CO_URL_TEMPLATE", template), ("HF_HUB_OFFLINE", offline),
        ("HF_HUB_DISABLE_XET", True), ("HF_HUB_DISABLE_PROGRESS_BARS", True), ("HF_HUB_CACHE", str(cache)),
        ("HUGGINGFACE_HUB_CACHE", str(cache)), ("HF_XET_CACHE", str(cache)),
    ):  # fmt: skip
        patch.setattr(constants, name, value, raising=False)
    for name, value in (("HF_TOKEN", "hf_test"), ("NO_PROXY", "127.0.0.1"), ("no_proxy", "127.0.0.1")):
        patch.setenv(name, value)


def without_waits(patch: pytest.MonkeyPatch) -> list[float]:
    """Return a list of the seconds that clients of the Hub would have waited between their tries.

    Any other code sleeps as it did, and so do threads that earlier tests left: they may sleep in a loop.
    """
    waits: list[float] = []
    sleep = time.sleep
    left = {thread.ident for thread in threading.enumerate()} - {threading.get_ident()}

    def wait(seconds: float) -> None:
        caller = sys._getframe(1).f_globals["__name__"]
        of_hub = caller.startswith(("moepack.pack.hub_errors", "huggingface_hub."))
        if of_hub and threading.get_ident() not in left:
            waits.append(seconds)
        else:
            sleep(seconds)

    patch.setattr(time, "sleep", wait)
    return waits


@contextlib.contextmanager
def serve(handler: type[Handler] = Handler) -> Iterator[tuple[Hub, str]]:
    """A server on a free port of the loopback: its state and its address."""
    hub = Hub()
    with Server(("127.0.0.1", 0), type("BoundHandler", (handler,), {"hub": hub})) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield hub, f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
