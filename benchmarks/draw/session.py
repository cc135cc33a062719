"""The recorded session of the documentation: real commands on the model in examples/, as they were answered."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES, WIDTH, HEIGHT = ROOT / "examples", 100, 40
BUILD = (
    "moepack build {root}/examples/mini-qwen3-moe -o my-bundle --recipe {root}/examples/demo.yaml "
    "--calibration {root}/examples/text/calibration.jsonl --quiet"
)
ASK = (
    "curl -s http://127.0.0.1:{port}/v1/completions -H 'content-type: application/json' "
    """-d '{{"model": "my-bundle", "prompt": "The history of", "max_tokens": 16, "temperature": 0}}'"""
)
SESSION = (
    "moepack inspect my-bundle",
    "moepack plan my-bundle --device-memory 6MB",
    'moepack generate my-bundle --prompt "The history of" --device-memory 6MB --max-new-tokens 24',
    "moepack serve my-bundle --policy hotness --device-memory 6MB --port {port} &",
    ASK,
    "curl -s http://127.0.0.1:{port}/metrics | grep -v '^#' | grep moepack_experts",
)
PORT = 8000
# rich's own form, without the fonts that it would have a browser fetch
FORM = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: Menlo, Consolas, DejaVu Sans Mono, monospace; font-size: {char_height}px;
line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def answered(command: str, folder: Path, until: str | None = None) -> tuple[str, subprocess.Popen[bytes]]:
    """What a command writes on a terminal, to its end or until this comes."""
    master, slave = pty.openpty()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "LINES": str(HEIGHT), "TERM": "xterm-256color"}
    environment |= {"PYTHONWARNINGS": "ignore", "TORCH_LOGS": "-all"}
    process = subprocess.Popen(
        ["bash", "-c", f"exec 2>&1; {command.removesuffix('&')}"], cwd=folder, env=environment,
        stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    out = b""
    while True:
        if select.select([master], [], [], 0.2)[0]:
            try:
                part = os.read(master, 1 << 16)
            except OSError:
                part = b""
            if not part:
                break
            out += part
        if until is not None and until.encode() in out:
            break
    text = out.decode(errors="replace").replace("\r\n", "\n")
    return "\n".join(line for line in text.split("\n") if not re.match(r"[WI]\d{4} ", line)).strip("\n"), process


def record(folder: Path, port: int) -> list[tuple[str, str, float]]:
    """Commands, what they wrote, and seconds that it took."""
    found, running = [], []
    for form in SESSION:
        command = form.format(root=ROOT, port=port)
        began = time.monotonic()
        text, process = answered(command, folder, f":{port}" if command.endswith("&") else None)
        if command.endswith("&"):
            running.append(process)
            time.sleep(0.5)
        elif process.wait():
            raise SystemExit(f"{command}: {text}")
        found.append((command, text, time.monotonic() - began))
    for process in running:
        process.terminate()
        process.wait()
    return found


def cast(session: list[tuple[str, str, float]]) -> str:
    """asciinema's second format."""
    head = {"version": 2, "width": WIDTH, "height": HEIGHT, "idle_time_limit": 2, "title": "moepack"}
    lines, now = [json.dumps(head)], 0.5
    for command, text, seconds in session:
        lines.append(json.dumps([round(now, 3), "o", "$ "]))
        for letter in command:
            now += 0.03
            lines.append(json.dumps([round(now, 3), "o", letter]))
        now += seconds
        lines.append(json.dumps([round(now, 3), "o", "\r\n" + text.replace("\n", "\r\n") + "\r\n" * bool(text)]))
        now += 1
    return "\n".join(lines) + "\n"


def picture(session: list[tuple[str, str, float]]) -> str:
    """All of it, one under another."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command, text, _ in session:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")), soft_wrap=False)
        if text:
            console.print(Text.from_ansi(text))
    return console.export_svg(title="moepack", code_format=FORM, unique_id="session")


def write(out: Path, bundle: Path | None) -> None:
    """Record session.cast, which asciinema plays, and session.svg, with a bundle that is built where none is given."""
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        if bundle is None:
            text, process = answered(BUILD.format(root=ROOT), folder)
            if process.wait():
                raise SystemExit(text)
        else:
            (folder / "my-bundle").symlink_to(bundle.resolve())
        session = record(folder, PORT)
    out.mkdir(parents=True, exist_ok=True)
    (out / "session.cast").write_text(cast(session))
    (out / "session.svg").write_text(picture(session))
