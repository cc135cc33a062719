"""Record `moepack build`, `plan` and `chat` on the model in this folder, and draw docs/images/session.svg from them.

The picture shows what a terminal shows, each piece of text at the moment when it came. The longest waits are shortened
so that the whole lasts SECONDS; the last line says how long it took.
"""

from __future__ import annotations

import html
import os
import pty
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "images" / "session.svg"
SECONDS = 40.0  # the length of the picture
REST = 5.0  # seconds of these in which the end stays
GRAIN = 0.1  # seconds: text that came within them appears at once
WIDTH = 110  # characters of a line
LINES = 30  # lines in view
STEP = 17  # pixels from line to line
LETTER = 7.9  # pixels of a character, at most
PROMPT = "> "  # of `moepack chat`
ESCAPE = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r")
RECIPE = """versions: [bf16, w4, w3, w2, w1]
quantize: {method: rtn}
calibration: {samples: 32, length: 128, batch_size: 32}
"""
BUILD = "build examples/mini-qwen3-moe -o my-bundle --recipe quick.yaml --calibration examples/text/calibration.jsonl"
PLAN = "plan my-bundle --device-memory 12MB"
CHAT = "chat my-bundle --device-memory 12MB --max-new-tokens 48 --seed 1"
QUESTIONS = ("Tell me about the river.", "And the town?")
STYLE = """text{font:13px ui-monospace,Menlo,Consolas,monospace;fill:#d6dde6;white-space:pre}
.typed{fill:#8fd3ff}.note{fill:#93a1ae}"""


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that came at once."""

    at: float  # seconds since the beginning
    text: str
    kind: str = ""  # "typed" by the user, "note" by this program, or printed


class Recording:
    """What was typed and printed, in order."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self._began = time.monotonic()

    def add(self, text: str, kind: str = "") -> None:
        """Add text that came now."""
        self.pieces.append(Piece(time.monotonic() - self._began, text, kind))

    def run(self, command: str, folder: Path) -> None:
        """Run a command of moepack without a terminal, so that it writes lines."""
        self.add(f"$ moepack {command}\n", "typed")
        words = [sys.executable, "-m", "moepack", *shlex.split(command)]
        wide = {**os.environ, "COLUMNS": str(WIDTH)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(words, cwd=folder, env=wide, text=True, **pipes)
        for line in process.stdout or ():
            self.add(line)
        _check(process, command)

    def chat(self, command: str, folder: Path, questions: Sequence[str]) -> None:
        """Run a chat on a terminal, and answer each prompt with the next question."""
        self.add(f"$ moepack {command}\n", "typed")
        words = [sys.executable, "-m", "moepack", *shlex.split(command)]
        ours, theirs = pty.openpty()
        plain = {**os.environ, "TERM": "dumb", "COLUMNS": str(WIDTH)}
        process = subprocess.Popen(words, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=plain)
        os.close(theirs)
        waiting = [*questions, "/exit"]
        shown = ""
        while data := _read(ours):
            text = ESCAPE.sub("", data)
            self.add(text)
            shown = (shown + text)[-80:]
            if waiting and shown.endswith(f"\n{PROMPT}"):
                os.write(ours, f"{waiting.pop(0)}\n".encode())
                shown = ""
        _check(process, command)


def _read(terminal: int) -> str:
    """Return what was printed next; nothing at the end."""
    try:
        return os.read(terminal, 4096).decode(errors="replace")
    except OSError:  # the program closed its side
        return ""


def _check(process: subprocess.Popen[str] | subprocess.Popen[bytes], command: str) -> None:
    if process.wait() != 0:
        sys.exit(f"moepack {command}: ended with {process.returncode}")


def shortened(pieces: Sequence[Piece], seconds: float) -> list[Piece]:
    """Shorten the longest waits to one length, so that the last piece comes after `seconds` at most."""
    waits = [piece.at - before for piece, before in zip(pieces, (0.0, *(p.at for p in pieces)), strict=False)]
    left = seconds
    longest = 0.0
    for count, wait in zip(range(len(waits), 0, -1), sorted(waits), strict=True):
        longest = left / count  # what is left for each of the waits from here on
        if wait > longest:
            break
        longest = wait
        left -= wait
    now = 0.0
    out = []
    for piece, wait in zip(pieces, waits, strict=True):
        now += min(wait, longest)
        out.append(Piece(now, piece.text, piece.kind))
    return out


def lines_of(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Split text into lines of at most WIDTH characters, each a list of pieces."""
    lines: list[list[Piece]] = [[]]
    for piece in pieces:
        for number, part in enumerate(piece.text.split("\n")):
            if number:
                lines.append([])
            while part:
                room = WIDTH - sum(len(p.text) for p in lines[-1])
                if room == 0:
                    lines.append([])
                    continue
                at = round(piece.at / GRAIN) * GRAIN
                lines[-1].append(Piece(at, part[:room], piece.kind))
                part = part[room:]
    return lines


def drawn(lines: Sequence[Sequence[Piece]]) -> str:
    """Draw lines as an SVG whose text appears at its time and scrolls, again and again."""
    moments = sorted({piece.at for line in lines for piece in line})
    names = {at: f"m{number}" for number, at in enumerate(moments)}
    rules = [STYLE]
    for at, name in names.items():
        share = 100 * at / SECONDS
        rules.append(f".{name}{{animation:{name} {SECONDS:g}s infinite step-end}}")
        rules.append(f"@keyframes {name}{{0%{{visibility:hidden}}{share:.2f}%{{visibility:visible}}}}")
    scrolled = {0.0: 0}
    body = []
    for number, line in enumerate(lines):
        spans = []
        for piece in line:
            kind = f"{names[piece.at]} {piece.kind}".strip()
            spans.append(f'<tspan class="{kind}">{html.escape(piece.text, quote=False)}</tspan>')
        body.append(f'<text x="12" y="{STEP * (number + 1)}">{"".join(spans)}</text>')
        if line and number >= LINES:
            scrolled[line[0].at] = STEP * (number + 1 - LINES)
    steps = (f"{100 * at / SECONDS:.2f}%{{transform:translateY(-{by}px)}}" for at, by in scrolled.items())
    rules.append(f".roll{{animation:roll {SECONDS:g}s infinite step-end}}@keyframes roll{{{''.join(steps)}}}")
    height = STEP * LINES + 20
    still = f"translateY(-{max(scrolled.values())}px)"
    rules.append(f"@media(prefers-reduced-motion){{tspan,.roll{{animation:none!important}}.roll{{transform:{still}}}}}")
    width = round(WIDTH * LETTER + 24)
    said = "moepack build, plan and chat on the example model, as a terminal shows them"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{said}">',
            f"<title>{said}</title>",
            f"<style>{''.join(rules)}</style>",
            '<rect width="100%" height="100%" rx="6" fill="#10151c"/>',
            f'<svg y="6" width="{width}" height="{STEP * LINES + 6}"><g class="roll">',
            *body,
            "</g></svg>",
            "</svg>",
            "",
        ]
    )


def main() -> None:
    """Record the three commands and write the picture."""
    recording = Recording()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        (folder / "quick.yaml").write_text(RECIPE)
        recording.add("$ cat quick.yaml\n", "typed")
        recording.add(RECIPE)
        recording.run(BUILD, folder)
        recording.run(PLAN, folder)
        recording.chat(CHAT, folder, QUESTIONS)
    took = recording.pieces[-1].at
    last = f"# all of it took {took:.0f} s here; the longest waits are shortened"
    recording.add(last, "note")
    PICTURE.write_text(drawn(lines_of(shortened(recording.pieces, SECONDS - REST))))
    print(f"{PICTURE}: {PICTURE.stat().st_size:,} bytes, {took:.1f} s recorded")


if __name__ == "__main__":
    main()
