"""The tests that transformers' source distribution ships, imported, and the suite's own helpers beside them."""

import importlib
import sys
import tomllib
import types
from pathlib import Path

import transformers
from cases import BIN

ROOT = Path(__file__).resolve().parents[3]
_SHIPPED = BIN.parent / f"transformers-{transformers.__version__}"
if not (_SHIPPED / "tests").is_dir():
    sys.exit(f"the tests of transformers {transformers.__version__} are not here: make -B conformance")
# It has what uses these two modules, but not them: tests of theirs are not run.
for _name, _mixin in (
    ("exporters.test_export", "ExportTesterMixin"),
    ("generation.test_utils", "GenerationTesterMixin"),
):
    _folder = types.ModuleType(f"tests.{_name.partition('.')[0]}")
    _made = types.ModuleType(f"tests.{_name}")
    setattr(_made, _mixin, type(_mixin, (), {}))
    sys.modules |= {_folder.__name__: _folder, _made.__name__: _made}
_settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
sys.path[:0] = [str(_SHIPPED), str(ROOT), *(str(ROOT / part) for part in _settings["pythonpath"])]

common = importlib.import_module("tests.test_modeling_common")
RTN = importlib.import_module("support").RTN
config_of = importlib.import_module("tiny_models").config_of
