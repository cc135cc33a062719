"""What a serving process leaves out, and that it serves without."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moepack.runtime.patches import UNUSED, leave_out


def test_only_commands_that_serve_leave_libraries_out(monkeypatch: pytest.MonkeyPatch) -> None:
    modules: dict[str, object] = {"scipy": sys}
    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", modules)
        leave_out("build")
        before = dict(modules)
        leave_out("serve")
    assert before == {"scipy": sys}
    assert modules == {**dict.fromkeys(UNUSED), "scipy": sys}, "what is there already stays"


def test_a_budget_is_served_without_them(bundle: Path) -> None:
    code = (
        "import atexit, sys; sys.argv = ['moepack', 'generate', *sys.argv[1:]]\n"
        "atexit.register(lambda: print([n for n in ('hqq', 'torchao') if sys.modules.get(n)]))\n"
        "from moepack.cli import main\n"
        "for policy in ('hotness', 'uniform'):\n"
        "    sys.argv[-1] = policy\n"
        "    try: main()\n"
        "    except SystemExit as end: assert not end.code\n"
    )
    command = [sys.executable, "-c", code, str(bundle), "--prompt", "The", "--max-new-tokens", "2"]
    run = subprocess.run([*command, "--device-memory", "30MB", "--policy", "x"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("The") == 2 and run.stdout.endswith("[]\n"), run.stdout
