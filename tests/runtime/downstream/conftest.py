"""The rows of docs/in-other-programs.md, and the models that their tests share.

A test names its row by `@pytest.mark.row(...)`; `row.refuses(call)` holds the call's error against the lines quoted
there, and when the test has passed each of those has been seen.
"""

import re
from contextlib import contextmanager

import pytest
import torch
from support import HOT, ROOT, ids, load_for_logits
from transformers import AutoModelForCausalLM, AutoTokenizer

import moepack

PAGE = ROOT / "docs" / "in-other-programs.md"
QUOTED = re.compile(r"refused[^:`]*: (`+) ?(.+?) ?\1(?!`)")


def rows():
    """By its first cell, what a row says without a budget and in one."""
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {name: (free, budget) for name, free, budget in cells if not name.startswith("what a program")}


class Row:
    """One row: the lines of its refusals, and which of them a test has met."""

    def __init__(self, name, bundle):
        self.cells = rows()[name]
        self.quoted = {found[1] for cell in self.cells for found in QUOTED.findall(cell)}
        self.seen = set()
        self._bundle = str(bundle)

    def refuses(self, call, *args, **options):
        with pytest.raises(Exception) as raised:
            call(*args, **options)
        line = str(raised.value).splitlines()[0].replace(self._bundle, "BUNDLE")
        if type(raised.value).__module__.startswith("torch._dynamo"):  # what was raised is inside its report
            line = next((q for q in self.quoted if q in str(raised.value)), line)
        same = {q for q in self.quoted if q == line or (q.endswith(" ...") and line.startswith(q[:-4]))}
        assert same, f"not on the page: {type(raised.value).__name__}: {line}"
        self.seen |= same


@contextmanager
def plain_code():
    """All but the experts by the model's own code, and BF16 rounded as torch's emulation does where there is one: what
    is compared here is to be the plain model's to the bit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MOEPACK_DENSE_KERNELS", "off")
        patch.setattr("moepack.pack.isa.ONEDNN_BOUND", "")
        patch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
        yield


@pytest.fixture(autouse=True)
def by_plain_code():
    with plain_code():
        yield


@pytest.fixture
def page():
    return rows()


@pytest.fixture
def row(request, bundle):
    marker = request.node.get_closest_marker("row")
    for library in marker.kwargs.get("needs", ()):
        pytest.importorskip(library, reason=f"{library} is not installed")
    made = Row(marker.args[0], bundle)
    yield made
    assert made.seen == made.quoted, "a refusal that the page quotes did not happen"


@pytest.fixture(scope="session")
def plain(demo_model):
    return AutoModelForCausalLM.from_pretrained(demo_model).requires_grad_(False)


@pytest.fixture(scope="session")
def tokenizer(demo_model):
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="session")
def free(bundle):
    """Without a budget; not to be changed."""
    with plain_code():
        return moepack.load(bundle)


@pytest.fixture(scope="session")
def hot(bundle):
    """In a budget; not to be changed."""
    with plain_code():
        made = load_for_logits(bundle, **HOT)
    yield made
    made.moepack.close()


@pytest.fixture
def another(bundle):
    """Loads models that a test may change: `another()`, `another(**HOT)`."""
    made = []

    def load(**options):
        made.append(load_for_logits(bundle, **options))
        return made[-1]

    yield load
    for model in made:
        model.moepack.close()


@pytest.fixture(scope="session")
def same(plain):
    """Whether a model's logits are the plain one's, to the bit; of many tokens, those of all but one in fifty.

    Kernels add an expert's products in another order than torch. Seldom, the sum is rounded to another BF16 number.
    """

    def compare(model, tokens=24):
        with torch.inference_mode():
            differs = (model(ids(tokens)).logits != plain(ids(tokens)).logits).any(-1)
        return int(differs.sum()) <= tokens // 50

    return compare
