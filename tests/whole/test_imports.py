"""Rooms, and the arrows between them: who imports whom, read from the sources. `pytest -s` on this file prints both."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support import ROOT, python

# From the top floor down: a room may import from rooms below it, and a file from its own room.
FLOORS = (
    "moepack",  # the face: cli, hub
    "moepack.engines",  # plug-ins that other engines find
    "moepack.export",
    "moepack.pipeline",
    "moepack.reports",
    "moepack.server",
    "moepack.shared",  # the files of moepack/ that its other rooms use
    "calibrate",
    "quantize",
    "recipes",
    "runtime",  # the entrances: load, attach, plugin, patches, serving, forward_wrapper, trace
    "runtime.residency",
    "runtime.dense",
    "runtime.paging",
    "runtime.devices",
    "runtime.store",
    "runtime.planning",
    "runtime.kv",
    "runtime.experts",
    "runtime.step",  # the step context: data and protocols that every room above reads
    "runtime.policies",
    "runtime.allocation",
    "runtime.kernels",
    "moepack.families",  # what a model family needs beyond transformers
    "pack",
)
SHARED = ("progress", "memory", "version", "opening", "cluster")
# Below, and yet not to be imported: a server needs neither quantisers nor data sets.
NEVER = {room: {"calibrate", "quantize", "recipes"} for room in FLOORS if room.startswith("runtime")}
NEVER |= {"quantize": {r for r in FLOORS if r.startswith(("runtime", "recipes"))}}
NEVER |= {"calibrate": NEVER["quantize"]}
NEVER |= {room: {"calibrate", "quantize", "recipes"} for room in ("moepack.server", "moepack.engines")}
STANDARD_ONLY = ("pack.spec", "pack.errors")
Imports = dict[str, set[str]]  # module -> modules of moepack, and other packages as ".name"


def sources(root: Path) -> dict[str, Path]:
    """Every module by its name, without the "moepack." before it."""
    found = {}
    for folder in ("moepack", "pack", "quantize", "calibrate", "recipes", "runtime"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(root: Path) -> Imports:
    """What every module imports, wherever in it the import stands."""
    modules = sources(root)
    out: Imports = {}
    for name, path in modules.items():
        out[name] = set()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for target, names in _statements(ast.parse(path.read_text()), package):
            if not target.startswith("moepack"):
                out[name].add("." + target.partition(".")[0])
                continue
            inside = target.removeprefix("moepack").lstrip(".")
            for one in names or [""]:
                whole = f"{inside}.{one}".strip(".")
                known = [m for m in (whole, f"moepack.{whole}", inside, f"moepack.{inside}") if m in modules]
                out[name].add(known[0] if known else "moepack")
        out[name].discard(name)
    return out


def _statements(tree: ast.AST, package: str) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = str(node.module or "")
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(["moepack", *above, base]).strip(".").replace("moepack.moepack", "moepack")
            yield base, [alias.name for alias in node.names]


def room(module: str) -> str:
    parts = module.split(".")
    if parts[0] == "moepack" and len(parts) == 2 and parts[1] in SHARED:
        return "moepack.shared"
    return next((r for r in (".".join(parts[:2]), parts[0]) if r in FLOORS), parts[0])


def arrows(found: Imports) -> dict[str, set[str]]:
    """Room -> rooms that its files import from."""
    out: dict[str, set[str]] = {r: set() for r in FLOORS}
    for module, targets in found.items():
        out[room(module)] |= {room(t) for t in targets if not t.startswith(".")} - {room(module)}
    return out


def wrong(found: Imports) -> list[str]:
    """Every import that goes upward, or where a room may never go."""
    out = []
    for module, targets in found.items():
        for target in sorted(t for t in targets if not t.startswith(".")):
            a, b = room(module), room(target)
            if a != b and (FLOORS.index(b) < FLOORS.index(a) or b in NEVER.get(a, ())):
                out.append(f"{module} ({a}) imports {target} ({b})")
    return out


def circle(found: Imports) -> list[str]:
    """Modules that import each other, if there are any: one such circle."""
    try:
        TopologicalSorter({m: {t for t in targets if not t.startswith(".")} for m, targets in found.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def found() -> Imports:
    return imports(ROOT)


def test_no_arrow_goes_upward(found: Imports) -> None:
    for name, targets in arrows(found).items():
        print(f"{name:<20} -> {', '.join(sorted(targets, key=FLOORS.index)) or 'nothing'}")
    assert {room(m) for m in found} == set(FLOORS), "a folder that is no room"
    assert wrong(found) == []


def test_no_circle_of_files(found: Imports) -> None:
    """The two that are meant: `moepack` hands its functions on, and imports them when they are asked for."""
    assert circle({m: t - {"moepack"} for m, t in found.items()}) == []


@pytest.mark.parametrize("name", STANDARD_ONLY)
def test_standard_library_only(found: Imports, name: str) -> None:
    others = {n[1:] for n in found[name] if n.startswith(".")}
    assert others <= set(sys.stdlib_module_names)
    assert all(n.startswith(".") or n.startswith("pack") for n in found[name])


def test_the_rules_can_fail(tmp_path: Path) -> None:
    """Planted: an arrow upward, one where a server may not go, a circle of two files, a relative way out of a room."""
    texts = {
        "runtime/store/a.py": "def f():\n    from moepack.runtime.residency import manager\n",
        "runtime/residency/manager.py": "from ..planning import plan\n",
        "runtime/planning/plan.py": "import moepack.quantize.grid\nfrom . import other\n",
        "runtime/planning/other.py": "from .plan import x\n",
        "quantize/grid.py": "",
        "pack/spec.py": "from moepack import calibrate\nimport torch\n",
        "calibrate/__init__.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    planted = imports(tmp_path)
    assert wrong(planted) == [
        "pack.spec (pack) imports calibrate (calibrate)",
        "runtime.planning.plan (runtime.planning) imports quantize.grid (quantize)",
        "runtime.store.a (runtime.store) imports runtime.residency.manager (runtime.residency)",
    ]
    assert set(circle(planted)) == {"runtime.planning.plan", "runtime.planning.other"}
    assert planted["runtime.residency.manager"] == {"runtime.planning.plan"} and ".torch" in planted["pack.spec"]


def test_import_moepack_is_light() -> None:
    heavy = "{'torch', 'transformers', 'numpy', 'datasets', 'gptqmodel', 'rich', 'typer'}"
    code = f"import moepack, sys; print(sorted({heavy} & set(sys.modules)))"
    assert python("-c", code).strip() == "[]"
