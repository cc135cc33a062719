"""Fixtures: the demo model, a bundle of it made once a session, and copies of that bundle to damage."""

import functools
import hashlib
import json
import os
import pickle
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import suites
import torch
import typer.main
from filelock import FileLock
from hostile_edits import signed
from hypothesis import HealthCheck, settings
from support import RTN, build_from, edit_config, tree

os.environ.setdefault(
    "MOEPACK_LIMITS", "fixed"
)  # what is measured differs, and the last bits of what is computed with it
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on CPU tensors
    import quick_interpreter

    quick_interpreter.install()

# torch's compiler finds the kernels that it keeps by their source alone: one that was compiled under another
# ATEN_CPU_CAPABILITY has vectors of another length, and gave NaN or wrote past its buffers.
os.environ.setdefault(
    "TORCHINDUCTOR_CACHE_DIR",
    f"{tempfile.gettempdir()}/moepack-tests-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}",
)

# Where bytecode is not to be written, every child process would compile moepack again, for half a second, and without
# that of installed packages torch and transformers, for 7. `make` installs with bytecode, so that only our own sources'
# is written beside them; elsewhere all goes into a directory of this run's. This process stays as it was started.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", None) and not Path(torch.__spec__.cached or "").exists():
    _bytecode = tempfile.TemporaryDirectory()
    os.environ["PYTHONPYCACHEPREFIX"] = _bytecode.name

from moepack.runtime.experts import backends
from moepack.runtime.patches import UNUSED
from moepack.runtime.planning import fixed, measure

try:
    from moepack.runtime.kernels.affine_native import BEST
except OSError:  # not compiled: there was no C compiler
    BEST = 0

# A busy machine is no failure: hypothesis measures neither examples nor how fast they are drawn.
settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")

ROOT = Path(__file__).resolve().parent.parent
QUICK = """
versions: [bf16, w4, w3, w2, w1]
quantize: {method: rtn, group_size: 64, loss_tokens: 256}
calibration: {samples: 16, length: 128, batch_size: 8}
allocation: {average_bits: 3}
"""


def pytest_configure():
    """Refuse a name in `suites` that no file or test begins with any more."""
    for name in (*suites.FULL, *suites.FEW, *suites.NUMERIC):
        path, _, test = name.partition("::")
        test = test.partition("[")[0]
        files = [*(ROOT / "tests").glob(f"{path}*")]
        if not any(file.is_dir() or f"def {test}" in file.read_text() for file in files):
            raise pytest.UsageError(f"tests/helpers/suites.py names {name}, and nothing begins so")


def pytest_ignore_collect(collection_path, config):
    """Do not import a file of which `make test` runs nothing."""
    if config.option.markexpr != suites.WITHOUT_FULL or collection_path.suffix != ".py":
        return None
    name = collection_path.relative_to(ROOT / "tests").as_posix()
    return True if name.startswith(suites.FULL_FILES) else None


def pytest_collection_modifyitems(config, items):
    if not any("::" in arg for arg in config.args):  # else some cases of a test are not here
        suites.check_few([item.nodeid.removeprefix("tests/") for item in items])
    highest = {}
    for item in items:
        level = parameter(item, "level")
        if isinstance(level, int):
            test = item.nodeid.partition("[")[0]
            highest[test] = max(level, highest.get(test, 0))
    for item in items:
        name = item.nodeid.removeprefix("tests/")
        level = parameter(item, "level")
        lower = isinstance(level, int) and level < min(BEST, highest[item.nodeid.partition("[")[0]])
        if lower or suites.is_full(name):
            item.add_marker(pytest.mark.full)
        if name.startswith(suites.NUMERIC):
            item.add_marker(pytest.mark.numeric)


def parameter(item, name):
    """One of a test's parameters; None if it has none of that name."""
    case = getattr(item, "callspec", None)
    return case.params.get(name) if case is not None else None


@pytest.fixture(autouse=True)
def nothing_left_out():
    """What a command that serves leaves out of its process is there for the next test in the same one."""
    yield
    for name in UNUSED:
        if sys.modules.get(name, sys) is None:
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def commands_made_once():
    """typer makes a command's parser anew at every call, from all functions' signatures: 60 ms of hundreds of calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session", autouse=True)
def measured_once(made_once):
    """What a model's passes take is measured once a run, by whichever process needs it first: a second each time."""
    real = measure._measure

    def once(*asked):
        of, config, *rest = asked
        model = measure.plain_config(config), config._attn_implementation, type(config).__name__, fixed.described(of)
        variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("MOEPACK_"))
        compiled = backends.library() is not None  # some tests take it away
        key = hashlib.sha256(repr((model, rest, torch.get_num_threads(), variables, compiled)).encode()).hexdigest()
        file = made_once(f"measured-{key}", lambda path: path.write_bytes(pickle.dumps(real(*asked))))
        return pickle.loads(file.read_bytes())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_measure", once)
        yield


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory):
    """The example model without its chat template: what needs one is tested with its own, and without any."""
    path = tmp_path_factory.mktemp("examples") / "mini-qwen3-moe"
    return Path(shutil.copytree(ROOT / "examples" / path.name, path, ignore=shutil.ignore_patterns("*.jinja")))


@pytest.fixture(scope="session")
def short_model(demo_model, tmp_path_factory):
    """The demo model's first two layers: half the time to build."""
    from safetensors.torch import load_file, save_file

    path = Path(shutil.copytree(demo_model, tmp_path_factory.mktemp("models") / "short"))
    edit_config(path, num_hidden_layers=2)
    tensors = load_file(path / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if not k.startswith(("model.layers.2.", "model.layers.3."))}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="session")
def text():
    return ROOT / "examples" / "text" / "calibration.jsonl"


@pytest.fixture(scope="session")
def evaluation():
    return ROOT / "examples" / "text" / "evaluation.jsonl"


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """Makes a directory once a run: the first of its processes that needs it does, and the others wait. Read only."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    shared.mkdir(exist_ok=True)

    def path(name, make):
        with FileLock(shared / f"{name}.lock"):
            if not (shared / name).exists():
                make(shared / name)
        return shared / name

    return path


@pytest.fixture(scope="session")
def bundle(demo_model, text, made_once):
    """A bundle of the demo model, rounded to nearest. Read only, and shared by all processes of the run."""
    return made_once("mini", lambda path: build_from(QUICK, demo_model, path, [text]))


@pytest.fixture(scope="session")
def whole(short_model, text, made_once):
    """The files of an undisturbed build of the short model, with which stopped and staged builds are compared."""
    return tree(made_once("whole", lambda path: build_from(RTN, short_model, path, [text])))


@pytest.fixture
def damaged(bundle, tmp_path):
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(bundle, tmp_path / "damaged"))


@pytest.fixture
def edit_manifest():
    """Change a manifest and sign it again, so that what is tested is the rule and not the digest."""

    def edit(path, change):
        file = path / "manifest.json"
        document = json.loads(file.read_text())
        change(document)
        file.write_bytes(signed(document))

    return edit
