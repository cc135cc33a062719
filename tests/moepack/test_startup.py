"""What a serving process leaves out, and that it serves without."""

from __future__ import annotations

import sys

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
