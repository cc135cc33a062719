"""Commands that speak to the Hub's stand-in, in a process apart: the Hub library reads its address on import."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hub_stand_in import Hub, serve
from support import HELPERS


@dataclass
class Client:
    """Runs moepack, pointed at the stand-in. Every command is a child of one process that has imported everything."""

    hub: Hub
    home: Path
    server: subprocess.Popen[str]

    def __call__(self, *arguments: str | Path) -> tuple[int, str, str]:
        return self._run({"arguments": [str(a) for a in arguments]})

    def push(self, bundle: Path, *more: str) -> tuple[int, str, str]:
        return self("push", bundle, "someone/mini", "-q", *more)

    def pull(self, to: Path, *more: str) -> tuple[int, str, str]:
        return self("pull", "someone/mini", "-o", to, "-q", *more)

    def python(self, code: str) -> tuple[int, str, str]:
        return self._run({"code": code})

    def killed_at(self, request: int, *arguments: str | Path) -> bool:
        """Run a command that is killed when it sends its n-th request; False where it ended before."""

        def kill(method: str, path: str) -> bool:
            if len(self.hub.requests) >= request:
                os.kill(int((self.home / "pid").read_text()), signal.SIGKILL)
                return True
            return False

        self.hub.requests.clear()
        self.hub.cut = kill
        try:
            return self(*arguments)[0] == -signal.SIGKILL
        finally:
            self.hub.cut = None

    def _run(self, task: dict[str, object]) -> tuple[int, str, str]:
        assert self.server.stdin is not None and self.server.stdout is not None
        files = {name: self.home / name for name in ("stdout", "stderr")}
        print(json.dumps(task | {k: str(v) for k, v in files.items()}), file=self.server.stdin, flush=True)
        code = int(self.server.stdout.readline())
        return code, files["stdout"].read_text(), files["stderr"].read_text()

    def reset(self) -> Client:
        """With an empty Hub and nothing downloaded."""
        self.hub.clear()
        shutil.rmtree(self.home / "hf", ignore_errors=True)
        return self


@contextmanager
def client(home: Path) -> Iterator[Client]:
    """A client whose files are under `home`."""
    server, hub, address = serve()
    environment = {
        **os.environ, "HF_ENDPOINT": address, "HF_HOME": str(home / "hf"), "HF_TOKEN": "hf_test",
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1",
    }  # fmt: skip
    environment.pop("HF_HUB_OFFLINE", None)
    command, pipe = [sys.executable, str(HELPERS / "command_server.py")], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=environment) as p:
        yield Client(hub, home, p)
        assert p.stdin is not None
        p.stdin.close()
    server.shutdown()
