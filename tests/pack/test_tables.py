"""The calibration tables: what is written is read, what is damaged is refused by the name of the tensor."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.hostile import small_bundle
from benchmarks.hostile.small_bundle import LAYERS
from moepack.pack.errors import BundleError
from moepack.pack.tables import TABLES, metadata, read_tables, write_tables

VERSIONS = tuple(v.name for v in small_bundle.VERSIONS)


def arrays(seed):
    """Routing statistics and losses of one layer; one w2 is of another method."""
    both = small_bundle.statistics(seed)
    named = [f"{loss}{error}" for loss in ("mse", "relative", "gated") for error in ("", "_error")]
    losses = {k: both.pop(k) for k in (*named, "method")}
    losses["method"][1, VERSIONS.index("w2")] = 2
    return both, losses


def write(root):
    files = {}
    for layer in LAYERS:
        pair = root / f"statistics-{layer.index}", root / f"losses-{layer.index}"
        for path, tensors in zip(pair, arrays(layer.index), strict=True):
            save_file(tensors, path, metadata(VERSIONS, ("none", "a", "b")))
        files[layer.index] = pair
    write_tables(root / TABLES, files)
    return root / TABLES


def test_what_is_written_is_read(tmp_path):
    tables = read_tables(write(tmp_path), LAYERS)
    assert (tables.versions, tables.methods) == (VERSIONS, ("none", "a", "b"))
    assert tables.columns(["w2", "bf16"]) == [4, 0]
    assert tables.made_by("w2") == {"a": 4, "b": 2} and tables.made_by("bf16") == {"none": 6}
    for position, layer in enumerate(LAYERS):
        statistics, losses = arrays(layer.index)
        read = tables.layers[position]
        assert read.index == layer.index
        for name, want in (statistics | losses).items():
            found = [tables.statistic(position, name), getattr(read, name, want)]
            assert all(np.array_equal(f, want) and f.dtype == want.dtype for f in found), name


def test_the_first_layer_is_checked_before_the_next_is_read(tmp_path):
    path = write(tmp_path)
    tensors = load_file(path)
    tensors["layers.1.method"][0] = 9
    del tensors["layers.4.mse"]
    save_file(tensors, path, metadata(VERSIONS, ("none", "a", "b")))
    with pytest.raises(BundleError, match="layer 1 has a method"):
        read_tables(path, LAYERS)
