"""The import rule: who may import whom, read from the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT

FOLDERS = ("pack", "quantize", "calibrate", "runtime", "moepack")
MAY = {
    "pack": {"pack"},
    "quantize": {"quantize", "pack"},
    "calibrate": {"calibrate", "quantize", "pack"},
    "runtime": {"runtime", "pack"},
    "moepack": set(FOLDERS) | {"recipes"},
}
STANDARD_ONLY = ("pack/spec.py", "pack/errors.py")


def imports(path: Path, folder: str) -> set[str]:
    """The folders of moepack that a file imports, and other packages as ".name"."""
    found = set()
    inside = path.relative_to(ROOT / folder).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level <= len(inside) + 1, f"{path}: a relative import leaves its folder"
            found.add(folder)
            continue
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "moepack" else [str(node.module)]
        for name in names:
            parts = name.split(".")
            if parts[0] == "moepack":
                found.add(parts[1] if len(parts) > 1 and parts[1] in (*FOLDERS, "recipes") else "moepack")
            else:
                found.add("." + parts[0])
    return found


SOURCES = [(f, p) for f in FOLDERS for p in sorted((ROOT / f).rglob("*.py"))]


@pytest.mark.parametrize(("folder", "path"), SOURCES, ids=[str(p.relative_to(ROOT)) for _, p in SOURCES])
def test_import_rule(folder: str, path: Path) -> None:
    own = {name for name in imports(path, folder) if not name.startswith(".")}
    assert own <= MAY[folder], f"{path.relative_to(ROOT)} imports {sorted(own - MAY[folder])}"
    if "kernels" in path.parts:
        assert own <= {"pack", folder}
        for node in ast.walk(ast.parse(path.read_text())):
            assert not (isinstance(node, ast.ImportFrom) and node.level > 1), f"{path} imports what is above it"


@pytest.mark.parametrize("name", STANDARD_ONLY)
def test_standard_library_only(name: str) -> None:
    others = {n[1:] for n in imports(ROOT / name, "pack") if n.startswith(".")}
    assert others <= set(sys.stdlib_module_names)


def test_the_rule_can_fail(tmp_path: Path) -> None:
    file = ROOT / "pack" / "spec.py"
    assert "quantize" not in imports(file, "pack")
    offender = tmp_path / "x.py"
    offender.write_text("from moepack.quantize import grid\nimport torch\n")
    tree_imports = {n for node in ast.walk(ast.parse(offender.read_text())) for n in _names(node)}
    assert tree_imports == {"moepack.quantize", "torch"}


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [str(node.module)]
    return [a.name for a in node.names] if isinstance(node, ast.Import) else []


def test_import_moepack_is_light() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'numba', 'datasets', 'gptqmodel', 'rich', 'typer'}"
    code = f"import moepack, sys; print(sorted({heavy} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_the_runtime_needs_no_build_extra(bundle: Path) -> None:
    """Serving works where the build extra is not installed: its packages cannot be imported here."""
    code = (
        "import sys\n"
        "for name in ('datasets', 'gptqmodel', 'hqq', 'matplotlib'): sys.modules[name] = None\n"
        f"import moepack; moepack.load({str(bundle)!r}, policy='static:w2')\n"
        "print([m for m in sys.modules if m.startswith(('moepack.quantize', 'moepack.calibrate'))])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
