"""What several test files share."""

import contextlib
import importlib.util
import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import moepack
from moepack.pack.codec.affine import AffineMatrix
from moepack.pack.reader import open_bundle
from moepack.pack.spec import Matrix, Version, expert_file
from moepack.runtime.planning.options import LoadOptions
from moepack.shared.progress import Reporter

HELPERS = Path(__file__).resolve().parent
ROOT = HELPERS.parent.parent
# Seconds that a test waits for what must come, on a machine however busy; what hangs is ended by pytest's own time-out.
PATIENCE = 300
# Options of a load in a budget with room for every expert of the demo model's bundle at bf16.
HOT = {"policy": "hotness:hi=bf16,lo=w2", "device_memory": "30MB"}
# A recipe by which the short model is built in a second.
RTN = "quantize: {method: rtn, group_size: 64, loss_tokens: 64}\ncalibration: {samples: 4, length: 64, batch_size: 2}\n"
# A recipe by which small checkpoints in released formats are built.
NATIVE = """
versions: [native, w2]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 2, length: 64, batch_size: 2}
"""
# A task of lm-evaluation-harness, of our own: the data of others are not to be had here.
CHOICES = """
task: choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


class Notes(Reporter):
    """Keeps the notes of a build."""

    def __init__(self):
        self.notes: list[str] = []

    def note(self, text: str):
        self.notes.append(text)


def for_logits(**options) -> LoadOptions:
    """The options of a load for passes that return all logits, without a cache, as `from_pretrained` has by default."""
    return LoadOptions(**{"kv_tokens": 0, "all_logits": True, **options})


def load_for_logits(bundle: str | Path, **options):
    """A model that is loaded for such passes, whatever moepack.load's own workload is."""
    return moepack.load(bundle, **{"kv_tokens": 0, "all_logits": True, **options})


def build_from(recipe: str, checkpoint: str | Path, target: str | Path, texts: Sequence[str | Path], **more):
    """Build a bundle by the text of a recipe; the report. `more` are further arguments of `build`."""
    from moepack.pipeline.build import build
    from moepack.pipeline.recipe import parse_recipe

    return build(checkpoint, target, parse_recipe(recipe, "test"), texts, **more)


def cli(*arguments: str | Path, stdin: str = "") -> tuple[int, str, str]:
    """Run a command line of moepack in this process; its exit code, stdout and stderr."""
    from moepack.cli import main

    out, err, code = io.StringIO(), io.StringIO(), 0
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["moepack", *map(str, arguments)])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            main()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    return code, out.getvalue(), err.getvalue()


def ok(result: tuple[int, str, str]) -> str:
    """What a command that succeeds prints."""
    code, out, err = result
    assert code == 0, out + err
    return out


def refused(result: tuple[int, str, str], *words: str):
    """See that a command failed with one line on stderr, which has these words."""
    code, out, err = result
    lines = [line for line in err.splitlines() if line.strip()]
    assert code == 2 and out == "" and len(lines) == 1 and lines[0].startswith("moepack: "), result
    assert [word for word in words if word not in lines[0]] == [], lines[0]


def python(*words: str | Path, **how) -> str:
    """What Python prints in a process of its own, which must end well."""
    environment = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    run = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **(environment | how))
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def documented(page: str, name: str, where: Path, block: int = 0) -> ModuleType:
    """A Python block of a page of docs/extending, word by word, as a module of this name."""
    file = where / f"{name.rpartition('.')[2]}.py"
    text = (ROOT / "docs" / "extending" / f"{page}.md").read_text()
    file.write_text(re.findall(r"```python\n(.*?)```", text, re.DOTALL)[block])
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    sys.modules[name] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def forked(work: Callable[[], object]) -> int:
    """Begin some work in a forked child, on one thread; its process number."""
    child = os.fork()
    if child:
        return child
    try:
        import torch

        torch.set_num_threads(1)  # OpenMP waits for ever for its threads, which a fork does not take along
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def spy(patch: pytest.MonkeyPatch, owner, name: str, look: Callable[..., object]):
    """Call `look` with a function's arguments before each of its calls, which `look` may stop by raising."""
    real = getattr(owner, name)

    def call(*args, **more):
        look(*args, **more)
        return real(*args, **more)

    patch.setattr(owner, name, call)


def running(patch: pytest.MonkeyPatch, owner, name: str) -> list[int]:
    """How many calls of a function run at once, noted as each begins."""
    real, lock, now, seen = getattr(owner, name), threading.Lock(), set[int](), list[int]()

    def counted(*args):
        with lock:
            now.add(threading.get_ident())
            seen.append(len(now))
        try:
            return real(*args)
        finally:
            with lock:
                now.discard(threading.get_ident())

    patch.setattr(owner, name, counted)
    return seen


def edit_tensors(checkpoint: Path, change: Callable[[dict[str, Any]], object]):
    """Change the tensors of a checkpoint of one file."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    change(tensors)
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})


def edit_config(checkpoint: Path, **entries: object):
    """Set entries of a checkpoint's config.json."""
    file = checkpoint / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **entries}))


def at_once(work: Callable[[int], object], count: int):
    """Call `work(0)`, `work(1)`, ... each on a thread of its own; wait for all, and raise the first error."""
    errors: list[BaseException] = []

    def guarded(n: int):
        try:
            work(n)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not any(thread.is_alive() for thread in threads), "a thread hangs"
    if errors:
        raise errors[0]


@contextlib.contextmanager
def files_of_at_most(size: int):
    """A limit on the size of files that are written, which stands in for a full disk."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))
        signal.signal(signal.SIGXFSZ, handler)


def flip(file: Path, *offsets: int):
    """Change a bit of the bytes at these offsets, which may count from the file's end."""
    data = bytearray(file.read_bytes())
    for at in offsets:
        data[at] ^= 1
    file.write_bytes(data)


def damage(bundle: Path, version: str, position: int, experts: Iterable[int], at: int = 100):
    """Change a bit of some experts of a layer, so many bytes after they begin; a second call undoes it."""
    opened = open_bundle(bundle)
    stored = opened.layer_file(version, position)
    flip(bundle / expert_file(version, opened.layers[position].index), *(stored.offset(e) + at for e in experts))


def ids(tokens: int = 24, seed: int = 0, batch: int = 1):
    """Random token numbers of the demo model, [batch, tokens]."""
    import torch  # not above: scripts set its environment first

    return torch.randint(1, 4000, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def random_matrix(m: Matrix, version: Version, seed: int) -> AffineMatrix:
    """Random codes, scales, zero points and bias of a matrix."""
    rng = np.random.default_rng(seed)
    groups = -(-m.cols // version.group_size)
    zero = rng.integers(0, 256, (m.rows, groups)).astype(np.uint8) if version.zero == "stored" else None
    bias = rng.integers(0, 1 << 16, m.rows).astype(np.uint16) if m.bias else None
    scale = (rng.normal(0, 1, (m.rows, groups)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if version.scale_bits == 8:  # from 2^-9 to 2^-1
        scale = (118 * 128 + 4 * rng.integers(0, 256, scale.shape)).astype(np.uint16)
    return AffineMatrix(rng.integers(0, 1 << version.bits, (m.rows, m.cols)).astype(np.uint8), scale, zero, bias)


def tree(root: Path) -> dict[str, bytes]:
    """Every file under a directory, by its relative path."""
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
