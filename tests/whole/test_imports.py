"""Rooms, and the arrows between them: who imports whom, read from the sources. `pytest -s` on this file prints both."""

import ast
import functools
import re
import sys
import tomllib
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

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
    "moepack.shared",  # what the rooms of moepack/ share
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
# Below, and yet not to be imported: a server needs neither quantisers nor data sets.
NEVER = {room: {"calibrate", "quantize", "recipes"} for room in FLOORS if room.startswith("runtime")}
NEVER |= {"quantize": {r for r in FLOORS if r.startswith(("runtime", "recipes"))}}
NEVER |= {"calibrate": NEVER["quantize"]}
NEVER |= {room: {"calibrate", "quantize", "recipes"} for room in ("moepack.server", "moepack.engines")}
# Packages that an installation may lack, and what may import them before a function runs: modules of theirs, which are
# imported where such a function has seen that they are needed.
SERVER = r"moepack\.server\.(about\.(\w*metrics|info|openapi)|(http|translated)\.\w+)"
OPTIONAL = {
    "triton": r"runtime\.(kernels\.\w+_triton|experts\.gpu|dense\.gpu_\w+|paging\.in_place|decode_graph)",
    **dict.fromkeys(("h11", "prometheus_client", "pydantic", "pydantic_core", "starlette", "uvicorn"), SERVER),
    "gguf": r"moepack\.export\.gguf(\.\w+)?",
    "ray": r"moepack\.server\.routing",
    "vllm": r"moepack\.engines\.vllm_\w+",
    **dict.fromkeys(("datasets", "gptqmodel", "hqq", "llguidance", "lm_eval", "matplotlib"), "none"),
}
STANDARD_ONLY = ("pack.spec", "pack.errors")


def sources(root):
    """Every module by its name, without the "moepack." before it."""
    found = {}
    for folder in ("moepack", "pack", "quantize", "calibrate", "recipes", "runtime"):
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(root, eager=False):
    """What every module imports, wherever in it the import stands; or if `eager`, what its own import imports."""
    modules = sources(root)
    out = {}
    for name, path in modules.items():
        out[name] = set()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for target, names in _statements(_nodes(_tree(path), eager), package):
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


@functools.cache
def _tree(path):
    return ast.parse(path.read_text())


def _nodes(tree, eager):
    """Every node of a file; if `eager`, those alone that run when the file is imported."""
    for node in ast.iter_child_nodes(tree):
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not (eager and (for_types or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))):
            yield node
            yield from _nodes(node, eager)


def _statements(nodes, package):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = str(node.module or "")
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join(["moepack", *above, base]).strip(".").replace("moepack.moepack", "moepack")
            yield base, [alias.name for alias in node.names]


def room(module):
    parts = module.split(".")
    return next((r for r in (".".join(parts[:2]), parts[0]) if r in FLOORS), parts[0])


def arrows(found):
    """Room -> rooms that its files import from."""
    out = {r: set() for r in FLOORS}
    for module, targets in found.items():
        out[room(module)] |= {room(t) for t in targets if not t.startswith(".")} - {room(module)}
    return out


def wrong(found):
    """Every import that goes upward, or where a room may never go."""
    out = []
    for module, targets in found.items():
        for target in sorted(t for t in targets if not t.startswith(".")):
            a, b = room(module), room(target)
            if a != b and (FLOORS.index(b) < FLOORS.index(a) or b in NEVER.get(a, ())):
                out.append(f"{module} ({a}) imports {target} ({b})")
    return out


def circle(found):
    """Modules that import each other, if there are any: one such circle."""
    try:
        TopologicalSorter({m: {t for t in targets if not t.startswith(".")} for m, targets in found.items()}).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def bound(eager, package):
    """Modules that cannot be imported without a package: they import it, or a module or folder that does."""
    out, more = set(), {f".{package}"}
    while more:
        out |= more
        folders = {m for m in out if not m.startswith(".")}
        more = {m for m, targets in eager.items() if any(t in out or _inside(t, folders) for t in targets)} - out
    return out - {f".{package}"}


def _inside(module, folders):
    """Whether a module lies in one of these packages, whose `__init__` is imported before it."""
    parts = module.split(".")
    return any(".".join(parts[:n]) in folders for n in range(1, len(parts)))


@pytest.fixture(scope="module")
def found():
    return imports(ROOT)


def test_no_arrow_goes_upward(found):
    for name, targets in arrows(found).items():
        print(f"{name:<20} -> {', '.join(sorted(targets, key=FLOORS.index)) or 'nothing'}")
    assert {room(m) for m in found} == set(FLOORS), "a folder that is no room"
    assert wrong(found) == []


def test_no_circle_of_files(found):
    """The two that are meant: `moepack` hands its functions on, and imports them when they are asked for."""
    assert circle({m: t - {"moepack"} for m, t in found.items()}) == []


def test_what_may_be_missing_is_imported_late(found):
    """Planted once: `attach` asked `decode_graph` for a setting, and so no bundle was loaded without Triton."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    always = {re.split("[>=]", name)[0].replace("-", "_").replace("pyyaml", "yaml") for name in needed}
    others = {t[1:] for targets in found.values() for t in targets if t.startswith(".")} - set(sys.stdlib_module_names)
    assert others - always == set(OPTIONAL), "a package that no list has, or one that nothing imports"
    eager = imports(ROOT, eager=True)
    for package, may in OPTIONAL.items():
        assert sorted(m for m in bound(eager, package) if not re.fullmatch(may, m)) == [], package
    assert "runtime.decode_graph" in bound(eager, "triton") and "moepack.server.http.app" in bound(eager, "h11")


def test_the_registry_alone_knows_policies(found):
    """So a policy is dropped with its file, its line and its page."""
    registry = "runtime.policies.registry"
    policies = {name for name in found[registry] if name.startswith("runtime.policies.")} - {
        "runtime.policies.contract"
    }
    assert len(policies) > 7
    assert {name: used & policies for name, used in found.items() if used & policies and name != registry} == {}


def test_a_class_name_has_one_meaning():
    """A private one counts within its own module only."""
    found = defaultdict(set)
    for module, path in sources(ROOT).items():
        names = {node.name for node in _tree(path).body if isinstance(node, ast.ClassDef)}
        for name in names:
            found[name].add(module)
    assert {name: where for name, where in found.items() if len(where) > 1 and not name.startswith("_")} == {}


@pytest.mark.parametrize("name", STANDARD_ONLY)
def test_standard_library_only(found, name):
    others = {n[1:] for n in found[name] if n.startswith(".")}
    assert others <= set(sys.stdlib_module_names)
    assert all(n.startswith(".") or n.startswith("pack") for n in found[name])


def test_import_moepack_is_light():
    heavy = "{'torch', 'transformers', 'numpy', 'datasets', 'gptqmodel', 'rich', 'typer'}"
    code = f"import moepack, sys; print(sorted({heavy} & set(sys.modules)))"
    assert python("-c", code).strip() == "[]"
