"""What tests of serving share: models are closed after each test; a small bundle, and a stand-in for a GPU."""

import gc
import logging
from pathlib import Path

import pytest
from live_models import close_all
from tiny_models import build_tiny

import moepack

SMALL = """
versions: [bf16, w4, w2]
quantize: {method: rtn, group_size: 32, loss_tokens: 64}
calibration: {samples: 4, length: 32, batch_size: 4}
allocation: {average_bits: 4}
"""


@pytest.fixture(autouse=True)
def models_are_closed():
    yield
    close_all()


@pytest.fixture
def silent():
    """Failures are a part of it: thousands of lines would be kept."""
    logging.getLogger("moepack.runtime").disabled = True
    yield
    logging.getLogger("moepack.runtime").disabled = False


@pytest.fixture(scope="session")
def small(demo_model, text, made_once):
    """A bundle of three layers of eight experts."""

    def make(folder):
        build_tiny("qwen3_moe", folder, SMALL, demo_model, text, num_hidden_layers=3)

    return Path(made_once("small", make) / "bundle")


@pytest.fixture
def gpu(request, monkeypatch):
    """A stand-in; at the end no rule was broken and everything was given back."""
    from gpu_stand_in import install

    made = install(monkeypatch, computes=getattr(request, "param", True))
    models, load = [], moepack.load
    monkeypatch.setattr(moepack, "load", lambda *args, **given: models.append(load(*args, **given)) or models[-1])
    yield made
    for model in models:  # while it is there: one that has gone gives back on a thread of its own
        model.moepack.close()
    gc.collect()
    assert made.wrong() == [] and made.leaks() == []
