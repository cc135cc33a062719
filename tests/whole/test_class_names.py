"""A class name has one meaning in the library."""

import ast
from collections import defaultdict

from support import ROOT

FOLDERS = ("moepack", "pack", "quantize", "calibrate", "runtime")


def repeated_names(root):
    """Class names that several modules define; a private one counts within its own module only."""
    found = defaultdict(list)
    for path in (p for folder in FOLDERS for p in (root / folder).rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.relative_to(root).as_posix())
    return {name: sorted(where) for name, where in found.items() if len(where) > 1}


def test_a_class_name_has_one_meaning():
    assert repeated_names(ROOT) == {}
