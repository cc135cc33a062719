"""How large a file, function, class or folder of the library may be, and that a class name has one meaning."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

from support import ROOT

FOLDERS = ("moepack", "pack", "quantize", "calibrate", "recipes", "runtime")
FILE, FUNCTION, METHODS, FOLDER = 450, 60, 15, 16  # lines, lines, public methods of a class, source files
# What may be larger, each with its reason; at most five.
EXCEPTIONS = {
    "moepack/cli/building.py:build": "typer reads the command's options from its signature",
    "moepack/reports/plan.py:plan": "one report, put together from parts that are functions already",
    "moepack/reports/tasks.py:run_tasks": "lm-eval's call and the model that it is given, in its own terms",
    "runtime/kernels/exponent_triton.py:_tiles": "a kernel that a GPU has run as it is: split it there",
    "runtime/kernels/many_triton.py:many": "a kernel's loop: its parts are functions already",
}


def too_large(root: Path) -> list[str]:
    """Everything over its limit: "pack/reader.py", "pack/reader.py:Bundle", "pack/reader.py:open_bundle" or "pack/"."""
    out: list[str] = []
    folders: Counter[str] = Counter()
    for path in _sources(root):
        name = path.relative_to(root).as_posix()
        text = path.read_text()
        folders[path.parent.relative_to(root).as_posix() + "/"] += path.name != "__init__.py"
        out += [name] * (text.count("\n") > FILE)
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                out += [f"{name}:{node.name}"] * ((node.end_lineno or 0) - node.lineno + 1 > FUNCTION)
            elif isinstance(node, ast.ClassDef):
                functions = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
                public = {n.name for n in functions if not n.name.startswith("_")}
                out += [f"{name}:{node.name}"] * (len(public) > METHODS)
    return sorted(out + [name for name, count in folders.items() if count > FOLDER])


def repeated_names(root: Path) -> dict[str, list[str]]:
    """Class names that several modules define; a private one counts within its own module only."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in _sources(root):
        if path.suffix == ".py":
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path.relative_to(root).as_posix())
    return {name: sorted(where) for name, where in found.items() if len(where) > 1}


def _sources(root: Path) -> list[Path]:
    paths = (p for folder in FOLDERS for p in (root / folder).rglob("*"))  # it does not follow the links in moepack/
    return [p for p in paths if p.suffix in (".py", ".c", ".h")]


def test_everything_is_small_enough() -> None:
    assert len(EXCEPTIONS) <= 5
    assert too_large(ROOT) == sorted(EXCEPTIONS)


def test_a_class_name_has_one_meaning() -> None:
    assert repeated_names(ROOT) == {}


def test_the_limits_can_fail(tmp_path: Path) -> None:
    """Planted: one of each kind, one over its limit."""
    (tmp_path / "pack").mkdir()
    methods = "".join(f"    def m{i}(self): ...\n" for i in range(METHODS + 1))
    long = "def f():\n" + "    x = 1\n" * FUNCTION
    (tmp_path / "pack" / "a.py").write_text(f"class A:\n{methods}{long}")
    (tmp_path / "pack" / "b.c").write_text("\n" * (FILE + 1))
    for i in range(FOLDER - 1):
        (tmp_path / "pack" / f"c{i}.py").write_text("class B: ...\n" if i < 2 else "")
    assert too_large(tmp_path) == ["pack/", "pack/a.py:A", "pack/a.py:f", "pack/b.c"]
    assert repeated_names(tmp_path) == {"B": ["pack/c0.py", "pack/c1.py"]}
