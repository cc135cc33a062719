"""Fixtures: the demo model, a bundle of it made once a session, and copies of that bundle to damage."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import typer.main
from filelock import FileLock
from hostile_edits import signed
from support import RTN, tree

os.environ.setdefault(
    "MOEPACK_LIMITS", "fixed"
)  # what is measured differs, and the last bits of what is computed with it
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: kernels run on CPU tensors

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

from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe
from moepack.runtime.patches import UNUSED

ROOT = Path(__file__).resolve().parent.parent
QUICK = """
versions: [bf16, w4, w3, w2, w1]
quantize: {method: rtn, group_size: 64, loss_tokens: 256}
calibration: {samples: 16, length: 128, batch_size: 8}
allocation: {average_bits: 3}
"""


# What `make quick` leaves out: files and tests that build, serve, or start other processes for seconds.
SLOW = (
    "benchmarks/test_peers",
    "docs/test_commands", "moepack/export/test_greedy", "moepack/export/test_pulled",
    "moepack/pipeline/test_add", "moepack/pipeline/test_build", "moepack/pipeline/test_enough",
    "moepack/pipeline/test_outline",
    "moepack/pipeline/test_ray", "moepack/pipeline/test_identity.py::test_kills",
    "moepack/pipeline/test_identity.py::test_a_killed_layer", "moepack/pipeline/test_identity.py::test_losses_of",
    "moepack/pipeline/test_executors.py::test_batches",
    "moepack/reports/test_plan", "moepack/reports/test_evaluate", "moepack/reports/test_tasks",
    "moepack/server", "moepack/test_cli", "moepack/test_hub", "moepack/test_packaging",
    "pack/test_hostile.py::test_some", "moepack/reports/test_hostile_config",
    "quantize/test_quantize.py::test_a_batch_is", "quantize/test_quantize.py::test_importing",
    "quantize/test_quantize.py::test_gptq_needs", "runtime/kernels/test_exponent_triton",
    "runtime/kernels/test_affine_triton.py::test_every_width", "runtime/kernels/test_isa",
    "runtime/kernels/test_affine_native.py::test_without",
    "runtime/kernels/test_affine_native.py::test_after", "runtime/planning/test_fixed",
    "runtime/residency/test_manager",
    "runtime/residency/test_worker", "runtime/residency/test_sequences", "runtime/residency/test_prefill_served",
    "runtime/paging/test_paging", "runtime/policies/test_every_policy", "runtime/residency/test_under",
    "runtime/residency/test_residency.py::test_planted", "runtime/residency/test_residency.py::test_invariants",
    "runtime/residency/test_on_gpu",
    "runtime/downstream", "runtime/test_compile", "runtime/test_decode_graph", "runtime/test_downstream",
    "runtime/test_load", "runtime/test_passes",
    "runtime/test_process_limit",
    "whole/test_encodings", "whole/test_examples", "whole/test_families",
    "whole/test_every_family", "whole/test_extending", "families/test_mtp", "families/test_llama4.py::test_the_whole",
    "whole/test_quality", "whole/test_combinations",
)  # fmt: skip

# What `.ci/run` repeats as on a processor with AVX2 alone: it compares numbers with torch's, whose products are others
# there, or with those made in another way. Formats, manifests, pages, recipes, processes and names are not repeated: no
# instruction set changes them.
NUMERIC = (
    "calibrate/test_calibrate", "calibrate/test_some_experts", "calibrate/test_widened", "moepack/pipeline/test_dense",
    "moepack/reports/test_evaluate", "moepack/reports/test_plan", "moepack/server/test_policies",
    "moepack/server/test_packed_cache", "moepack/test_generation", "pack/test_exponent", "quantize",
    "runtime/dense", "runtime/downstream",
    "runtime/experts", "runtime/kernels", "runtime/kv", "runtime/paging/test_paging.py", "runtime/planning",
    "runtime/policies/test_every_policy",
    "runtime/residency/test_manager", "runtime/residency/test_under", "runtime/test_", "whole/test_combinations",
    "whole/test_encodings", "whole/test_families",
)  # fmt: skip

# Of what `.ci/run` repeats at every instruction set, what is the same at each, or goes through all of them itself.
ONCE = (
    "moepack/test_generation.py::test_a_chat_on_a_gpu", "runtime/dense/test_on_gpu",
    "runtime/kernels/test_affine_native.py::test_without_the_extension", "runtime/kernels/test_affine_triton",
    "runtime/kernels/test_attend_triton", "runtime/kernels/test_exponent_triton", "runtime/kernels/test_isa",
    "runtime/kernels/test_routing_triton", "runtime/test_decode_graph",
    "runtime/planning/test_choice.py::test_it_is_the_same_everywhere",
    "runtime/planning/test_fixed.py::test_plans_do_not_depend",
    "runtime/planning/test_fixed.py::test_the_process_takes",
    "runtime/test_load.py::test_registers",
    "runtime/test_load.py::test_without_moepack", "runtime/test_process_limit",
)  # fmt: skip


def pytest_configure() -> None:
    """Refuse a name above that no file or test begins with any more."""
    for name in (*SLOW, *NUMERIC, *ONCE):
        path, _, test = name.partition("::")
        files = [*(ROOT / "tests").glob(f"{path}*")]
        if not any(file.is_dir() or f"def {test}" in file.read_text() for file in files):
            raise pytest.UsageError(f"tests/conftest.py names {name}, and nothing begins so")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker, names in ((pytest.mark.slow, SLOW), (pytest.mark.numeric, NUMERIC), (pytest.mark.once, ONCE)):
            if item.nodeid.removeprefix("tests/").startswith(names):
                item.add_marker(marker)


@pytest.fixture(autouse=True)
def nothing_left_out() -> Iterator[None]:
    """What a command that serves leaves out of its process is there for the next test in the same one."""
    yield
    for name in UNUSED:
        if sys.modules.get(name, sys) is None:
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def commands_made_once() -> Iterator[None]:
    """typer makes a command's parser anew at every call, from all functions' signatures: 60 ms of hundreds of calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return ROOT / "examples" / "mini-qwen3-moe"


@pytest.fixture(scope="session")
def short_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model's first two layers: half the time to build."""
    from safetensors.torch import load_file, save_file

    path = Path(shutil.copytree(demo_model, tmp_path_factory.mktemp("models") / "short"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    tensors = load_file(path / "model.safetensors")
    kept = {k: v for k, v in tensors.items() if not k.startswith(("model.layers.2.", "model.layers.3."))}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.fixture(scope="session")
def text() -> Path:
    return ROOT / "examples" / "text" / "calibration.jsonl"


@pytest.fixture(scope="session")
def evaluation() -> Path:
    return ROOT / "examples" / "text" / "evaluation.jsonl"


MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """Makes a directory once a run: the first of its processes that needs it does, and the others wait. Read only."""
    own = tmp_path_factory.getbasetemp()
    shared = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    shared.mkdir(exist_ok=True)

    def path(name: str, make: Callable[[Path], object]) -> Path:
        with FileLock(shared / f"{name}.lock"):
            if not (shared / name).exists():
                make(shared / name)
        return shared / name

    return path


@pytest.fixture(scope="session")
def bundle(demo_model: Path, text: Path, made_once: MadeOnce) -> Path:
    """A bundle of the demo model, rounded to nearest. Read only, and shared by all processes of the run."""
    return made_once("mini", lambda path: build(demo_model, path, parse_recipe(QUICK, "quick"), [text]))


@pytest.fixture(scope="session")
def whole(short_model: Path, text: Path, made_once: MadeOnce) -> dict[str, bytes]:
    """The files of an undisturbed build of the short model, with which stopped and staged builds are compared."""
    return tree(made_once("whole", lambda path: build(short_model, path, parse_recipe(RTN, "test"), [text])))


@pytest.fixture
def damaged(bundle: Path, tmp_path: Path) -> Path:
    """A copy of the bundle that a test may damage."""
    return Path(shutil.copytree(bundle, tmp_path / "damaged"))


@pytest.fixture
def edit_manifest() -> Callable[[Path, Callable[[dict], None]], None]:
    """Change a manifest and sign it again, so that what is tested is the rule and not the digest."""

    def edit(path: Path, change: Callable[[dict], None]) -> None:
        file = path / "manifest.json"
        document = json.loads(file.read_text())
        change(document)
        file.write_bytes(signed(document))

    return edit
