"""Tensors that leave mapped files: their values, their files' digests, and what is in memory meanwhile."""

import contextlib
import hashlib
import mmap
import os
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import flip, load_for_logits

from moepack.pack.errors import BundleError
from moepack.runtime.dense import mapped
from moepack.runtime.store import host_limit
from moepack.runtime.store.page_file import PageFile, is_cached

MIB = 1 << 20


def opened(file):
    """What `own` reads of a bundle with this one file."""
    entry = SimpleNamespace(size=file.stat().st_size, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    return SimpleNamespace(path=file.parent, manifest=SimpleNamespace(files={file.name: entry, "config.json": None}))


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_a_model_serves_the_bytes_that_were_checked(budget, damaged):
    """Its tensors are the file's, in own memory, and stay when the file is cut; a changed byte is found before that."""
    file = damaged / "model.safetensors"
    whole = file.read_bytes()
    wanted = {name: tensor.clone() for name, tensor in load_file(file).items()}
    model = load_for_logits(damaged, policy="static:w4", device_memory=budget)
    os.truncate(file, 4096)
    held = dict(model.named_parameters())
    assert len(wanted.keys() & held.keys()) > 20
    for name, want in wanted.items():
        assert name not in held or torch.equal(want, held[name]), name
    model.moepack.close()
    file.write_bytes(whole)
    flip(file, -3)
    with pytest.raises(BundleError, match=r"model.safetensors: its bytes do not match their digest"):
        load_for_logits(damaged, policy="static:w4", device_memory=budget)
    flip(file, 9)
    with pytest.raises(BundleError, match=r"model.safetensors: its header cannot be parsed"):
        load_for_logits(damaged, policy="static:w4", device_memory=budget)


def test_what_another_mapping_had_is_left_alone(tmp_path, monkeypatch):
    """A model that was dropped may unmap the same file meanwhile: its addresses are then another allocation's."""
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(1 << 20)}, file)
    with safe_open(file, "pt") as tensors:
        model = torch.nn.ParameterDict({"a": tensors.get_slice("a")[...]}).requires_grad_(False)
    memory, found = mmap.mmap(-1, 8192, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), mapped._mapped
    memory[:] = b"x" * 8192
    at = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    gone = mapped._Mapping(at, at + 8192, 0, str(file))
    monkeypatch.setattr(mapped, "_mapped", lambda: iter(sorted([*found(), gone])))
    model["b"] = torch.ones(7)
    before = model["b"].data_ptr()
    mapped.own(model, opened(file))
    assert model["b"].data_ptr() == before, "it is the model's own already"
    assert memory[:] == b"x" * 8192 and bool((model["a"] == 1).all())


def test_weights_are_never_held_twice(tmp_path, monkeypatch):
    """Of 192 MB that are mapped none are read through the mapping, and four pieces wait to be copied; the page cache
    holds none afterwards. Tensors begin and end anywhere in pages and pieces; one that no parameter has is checked."""
    file = tmp_path / "x.safetensors"
    values = {name: torch.full(((32 << 20) + i,), i, dtype=torch.bfloat16) for i, name in enumerate("abc", 1)}
    save_file({**values, "d": torch.arange(7)}, file)
    with file.open("rb+") as written:
        os.fsync(written.fileno())
    bundle = opened(file)
    with file.open("rb") as read:
        os.posix_fadvise(read.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with safe_open(file, "pt") as tensors:
        model = torch.nn.ParameterDict({n: tensors.get_slice(n)[...] for n in "abc"}).requires_grad_(False)
    model["tied"] = model["a"]
    (own, shared), most = host_limit.resident(), []
    copied, pieces = mapped._copy, []

    def copy(made, at, wanted):
        copied(made, at, wanted)
        pieces.append(len(made))
        now = host_limit.resident()
        most.append(now[0] - own - sum(pieces))
        assert now[1] - shared < 4 * MIB

    monkeypatch.setattr(mapped, "_copy", copy)
    mapped.own(model, bundle, uncached=True)
    assert sum(pieces) == file.stat().st_size and max(most) < 64 * MIB, "other threads copy while this is measured"
    assert all(torch.equal(model[name], want) for name, want in values.items())
    assert model["tied"].data_ptr() == model["a"].data_ptr()
    with file.open("rb") as read, contextlib.closing(PageFile(read.fileno())) as pages:
        kept = [at for at in range(0, file.stat().st_size - MIB, MIB) if is_cached(read.fileno(), at, MIB)]
        assert not (pages.direct and kept)


def test_a_file_that_was_replaced_is_no_source(tmp_path):
    """The mapping is of the file that was there, and the digest of the one that is."""
    file, other = tmp_path / "x.safetensors", tmp_path / "y"
    for path in (file, other):
        save_file({"a": torch.ones(1 << 20)}, path)
    with safe_open(file, "pt") as tensors:
        model = torch.nn.ParameterDict({"a": tensors.get_slice("a")[...]}).requires_grad_(False)
    other.rename(file)
    with pytest.raises(BundleError, match="mapped from files that are not its own"):
        mapped.own(model, opened(file))
