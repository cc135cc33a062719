"""An embedding that stays in its file: the same numbers, less memory, and what a changed file is answered."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from support import for_logits, load_for_logits
from tiny_models import build_tiny
from torch import nn
from transformers import AutoConfig

from moepack.pack.errors import BundleError
from moepack.pack.reader import open_bundle
from moepack.reports.plan import plan
from moepack.runtime.dense import mapped
from moepack.runtime.dense.file_rows import FileRows
from moepack.runtime.planning.measure import lone_embedding, measure
from moepack.runtime.planning.options import Workload

RECIPE = "versions: [w4]\nquantize: {method: rtn, group_size: 32, loss_tokens: 32}\n"
IDS = torch.tensor([[5, 9, 5, 300, 0, 17]])


@pytest.fixture
def bundle(short_model, text, made_once, tmp_path):
    """A copy of a bundle whose embedding is not lm_head's."""

    def make(folder):
        build_tiny("qwen3_moe", folder, RECIPE, short_model, text, tie_word_embeddings=False)

    return Path(shutil.copytree(made_once("untied", make) / "bundle", tmp_path / "bundle"))


def test_under_a_memory_limit_rows_are_read_from_the_file(bundle):
    with torch.inference_mode():
        plain = load_for_logits(bundle, policy="static:w4", device_memory="1GB")
        wanted, size = plain(IDS).logits, plain.get_input_embeddings().weight.nbytes
        limited = load_for_logits(bundle, policy="static:w4", memory="4GB")
        assert torch.equal(limited(IDS).logits, wanted) and torch.equal(limited(IDS.int()).logits, wanted)
        assert isinstance(limited.get_input_embeddings(), FileRows)
        assert limited.moepack.fixed.dense == plain.moepack.fixed.dense - size
        planned = [plan(bundle, for_logits(policy="static:w4", **{how: "4GB"})) for how in ("device_memory", "memory")]
        assert planned[1].fixed.dense == planned[0].fixed.dense - size == limited.moepack.fixed.dense
        for known in (False, True):
            assert limited.num_parameters(False, known) == plain.num_parameters(False, known)
        assert limited.resize_token_embeddings(4096) is limited.get_input_embeddings(), "nothing to do"
        compiled = torch.compile(limited.get_input_embeddings(), fullgraph=True, backend="eager")
        assert torch.equal(compiled(IDS), plain.get_input_embeddings()(IDS))
        file = bundle / "model.safetensors"
        os.utime(file, ns=(1, 1))
        with pytest.raises(BundleError, match=r"model.safetensors: has changed since it was loaded"):
            limited(IDS)
    plain.moepack.close()
    limited.moepack.close()


def test_a_change_while_its_file_is_checked_is_found(bundle, monkeypatch):
    digest = mapped._digest

    def changed(file, *others):
        found = digest(file, *others)
        os.utime(file, ns=(1, 1))  # a writer that comes behind the reader
        return found

    monkeypatch.setattr(mapped, "_digest", changed)
    model = load_for_logits(bundle, policy="static:w4", memory="4GB")
    with torch.inference_mode(), pytest.raises(BundleError, match="has changed since it was loaded"):
        model(IDS)
    model.moepack.close()


def test_a_converted_embedding_is_in_memory(bundle):
    """A limit counts it: transformers makes a float32 table of a file in BF16."""
    bundle = open_bundle(bundle)
    config, workload, sizes = AutoConfig.from_pretrained(bundle.path), Workload(), []
    for dtype in (torch.bfloat16, torch.float32):
        sizes.append(measure(bundle, config, dtype, torch.device("cpu"), workload).embedding)
    assert sizes == [4096 * 64 * 2, 0]
    model = load_for_logits(bundle.path, policy="static:w4", memory="4GB", dtype="float32")
    assert type(model.get_input_embeddings()) is nn.Embedding
    model.moepack.close()


def test_rows_have_the_files_bits(tmp_path):
    of, file = nn.Embedding(7, 40, dtype=torch.bfloat16), tmp_path / "rows"
    file.write_bytes(b"x" * 24 + of.weight.detach().view(torch.uint8).numpy().tobytes() + b"y" * 9)
    rows = FileRows(of, os.open(file, os.O_RDONLY), 24, str(file))
    for ids in (torch.tensor([[6, 0, 3], [3, 3, 6]]), torch.tensor([2]), torch.empty(1, 0, dtype=torch.int64)):
        assert torch.equal(rows(ids), of(ids))
    like = of.weight.shape, of.weight.dtype, of.weight.device
    assert (rows.weight.shape, rows.weight.dtype, rows.weight.device) == like and rows.weight.isnan().all()
    for wrong in (7, -1):
        with pytest.raises(IndexError, match="the embedding has 7 rows"):
            rows(torch.tensor([wrong]))
    before = file.stat()
    os.truncate(file, 100)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BundleError, match="rows: has changed since it was loaded"):
        rows(torch.tensor([6]))
    descriptor = rows._file
    del rows
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_an_embedding_that_others_use_stays_in_memory():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)

        def get_input_embeddings(self):
            return self.rows

    model = Model()
    assert lone_embedding(model) == ("rows", model.rows)
    model.also = model.rows
    assert lone_embedding(model) is None, "a second module"
    del model.also
    model.head.weight = model.rows.weight
    assert lone_embedding(model) is None, "tied"
    model.head = nn.Linear(4, 9)
    model.rows.max_norm = 1.0
    assert lone_embedding(model) is None, "it changes rows as it reads them"
    model.rows = nn.Linear(4, 9)
    assert lone_embedding(model) is None
    assert lone_embedding(nn.Linear(2, 2)) is None
