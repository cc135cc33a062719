"""A Hugging Face Hub of one process: enough of its HTTP interface for uploads, downloads and model loading.

Files of repositories live in memory. Large files go through the LFS batch interface, as on the real Hub; small ones
come inside the commit. Every request is kept in `requests`, so that tests can see what was asked for.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Hub:
    """The server's state."""

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    commits: dict[str, int] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)
    fail_commits: bool = False

    def sha(self, repo: str) -> str:
        return hashlib.sha1(f"{repo}/{self.commits.get(repo, 0)}".encode()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            out = b""
            while size := int(self.rfile.readline(), 16):
                out += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return out
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _send(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        self._send({"error": code}, status, {"X-Error-Code": code, "X-Error-Message": code})

    def _any(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        body = self._body()
        self.hub.requests.append((self.command, path))
        parts = path.strip("/").split("/")
        if path == "/api/repos/create":
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
            self._resolve("/".join(parts[:2]), "/".join(parts[4:]))
        else:
            self._fail(404, "RepoNotFound")

    def _base(self) -> str:
        return f"http://{self.headers['Host']}"

    def _object(self, oid: str, body: bytes) -> None:
        if self.command == "PUT":
            assert hashlib.sha256(body).hexdigest() == oid
            self.hub.objects[oid] = body
        self._send({})

    def _lfs(self, asked: dict[str, Any]) -> dict[str, Any]:
        out = {"oid": asked["oid"], "size": asked["size"], "authenticated": True}
        if asked["oid"] not in self.hub.objects:
            out["actions"] = {"upload": {"href": f"{self._base()}/objects/{asked['oid']}"}}
        return out

    def _model(self, repo: str, rest: list[str], body: bytes) -> None:
        files = self.hub.files.get(repo)
        if files is None:
            self._fail(404, "RepoNotFound")
        elif rest and rest[0] == "preupload":
            asked = json.loads(body)["files"]
            modes = {f["path"]: "lfs" if f["path"].endswith(".safetensors") else "regular" for f in asked}
            self._send({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
        elif rest and rest[0] == "commit":
            self._commit(repo, files, body)
        elif rest and rest[0] in ("branch", "refs"):
            self._send({"branches": [{"name": "main", "ref": "refs/heads/main", "targetCommit": self.hub.sha(repo)}],
                        "converts": [], "tags": []})  # fmt: skip
        elif rest and rest[0] == "tree":
            self._send([self._entry(name, data) for name, data in files.items()])
        elif rest and rest[0] == "paths-info":
            wanted = json.loads(body)["paths"]
            self._send([self._entry(name, data) for name, data in files.items() if name in wanted])
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self._send({"id": repo, "modelId": repo, "sha": self.hub.sha(repo), "siblings": siblings, "tags": []})

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _commit(self, repo: str, files: dict[str, bytes], body: bytes) -> None:
        if self.hub.fail_commits:
            self._fail(403, "Forbidden")
            return
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        self.hub.commits[repo] = self.hub.commits.get(repo, 0) + 1
        sha = self.hub.sha(repo)
        self._send(
            {"success": True, "commitOid": sha, "commitUrl": f"{self._base()}/{repo}/commit/{sha}", "hookOutput": ""}
        )

    def _resolve(self, repo: str, name: str) -> None:
        files = self.hub.files.get(repo)
        if files is None:
            self._fail(404, "RepoNotFound")
        elif name not in files:
            self._fail(404, "EntryNotFound")
        else:
            data = files[name]
            head = {
                "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
                "X-Repo-Commit": self.hub.sha(repo),
                "Accept-Ranges": "bytes",
            }
            asked = self.headers.get("Range")
            if asked:
                first, _, last = asked.removeprefix("bytes=").partition("-")
                end = min(int(last or len(data) - 1), len(data) - 1)
                head["Content-Range"] = f"bytes {first}-{end}/{len(data)}"
                self._send(data[int(first) : end + 1], 206, head)
            else:
                self._send(data, 200, head)

    do_GET = do_POST = do_PUT = do_HEAD = _any


def serve() -> tuple[ThreadingHTTPServer, Hub, str]:
    """Start a server on a free port of the loopback; returns it, its state and its address."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server, hub, f"http://127.0.0.1:{server.server_address[1]}"
