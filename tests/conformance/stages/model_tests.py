"""transformers' own tests of a model, tests/test_modeling_common.py of its source distribution, over loaded bundles.

Each test makes its models from a config. Here such a model is made, saved, built into a bundle of `bf16` experts and
loaded in FP32. A test that the plain model skips or fails is no case. Usage: model_tests.py FAMILY.
"""

import atexit
import copy
import os
import shutil
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from cases import say
from shipped import ROOT, RTN, common, config_of
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import moepack
from moepack.pipeline.build import build
from moepack.pipeline.recipe import parse_recipe

FAMILY = os.environ.get("CONFORMANCE_FAMILY") or sys.argv[1]  # pytest imports this file again, without arguments
RECIPE = parse_recipe("versions: [bf16]\n" + RTN, "conformance")
# The tests make models of as few as 10 tokens.
FEW_WORDS = Tokenizer(WordLevel({"?": 0, "the": 1, "of": 2}, unk_token="?"))
FEW_WORDS.pre_tokenizer = Whitespace()
WORK = Path(tempfile.mkdtemp(prefix="moepack-model-tests-"))
atexit.register(shutil.rmtree, WORK, ignore_errors=True)
MADE = list[Path]()  # the bundles


def saved_by_copy(model, bundle):
    """The model, saved as its refusal says: by a copy of its bundle."""

    def save_pretrained(folder, **more):
        if not bundle.samefile(folder):
            shutil.copytree(bundle, folder, dirs_exist_ok=True)

    model.save_pretrained = save_pretrained
    return model


def loaded(real, config):
    """A bundle of a random model of this config, loaded as a test of transformers' would make the model."""
    where = WORK / str(len(MADE))
    MADE.append(where)
    torch.set_default_dtype(torch.float32)  # a test may make its models under another, and sets it back itself
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)  # of a config that a test took from a loaded bundle
    real(config).save_pretrained(where / "checkpoint")
    PreTrainedTokenizerFast(tokenizer_object=FEW_WORDS, unk_token="?").save_pretrained(where / "checkpoint")
    build(where / "checkpoint", where / "bundle", RECIPE, [ROOT / "examples/text/calibration.jsonl"])
    shutil.rmtree(where / "checkpoint")
    model = moepack.load(where / "bundle", dtype=torch.float32, attn_implementation=config._attn_implementation)
    return saved_by_copy(model, where / "bundle")


class Bundled(type):
    """Of a subclass of a model's class: what a call of it gives is a loaded bundle."""

    def __call__(cls, config, *given, **more):
        return loaded(cls.__base__, config)


def bundled(real):
    """A class as a model's own, whose objects are loaded bundles. From a folder it reads what is there."""

    def from_pretrained(pretrained_model_name_or_path, **more):
        made, folder = real.from_pretrained(pretrained_model_name_or_path, **more), pretrained_model_name_or_path
        is_bundle = folder is not None and (Path(folder) / "manifest.json").exists()
        return saved_by_copy(made, Path(folder)) if is_bundle and not isinstance(made, tuple) else made

    own = {"from_pretrained": from_pretrained, "_from_config": lambda config, **more: loaded(real, config)}
    return Bundled(
        real.__name__, (real,), {k: staticmethod(f) for k, f in own.items()} | {"__module__": real.__module__}
    )


class Small:
    """What the tests ask of a family: a small config, and inputs."""

    batch_size, seq_length, num_hidden_layers, is_training = 3, 7, 2, True

    def __init__(self):
        config = self.get_config()
        self.hidden_size, self.num_attention_heads = config.hidden_size, config.num_attention_heads
        self.vocab_size = config.vocab_size

    def get_config(self):
        """The family's small config, of two layers."""
        return config_of(FAMILY, {"num_hidden_layers": self.num_hidden_layers})

    def prepare_config_and_inputs_for_common(self):
        """The config, and inputs of a batch."""
        config = self.get_config()
        ids = common.ids_tensor([self.batch_size, self.seq_length], config.vocab_size).clamp_min(1)
        return config, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    prepare_config_and_inputs = prepare_config_and_inputs_for_common


class Common(common.ModelTesterMixin):
    """Their tests, with what a Mixture-of-Experts model sets."""

    test_all_params_have_gradient = False
    model_split_percents: ClassVar = [0.5, 0.7, 0.8]

    def setUp(self):
        self.model_tester = Small()


REAL = MODEL_FOR_CAUSAL_LM_MAPPING[type(Small().get_config())]


class Plain(Common, unittest.TestCase):
    all_model_classes = (REAL,)


class OfBundle(Common, unittest.TestCase):
    all_model_classes = (bundled(REAL),)


class Saying:
    """Keeps what pytest reports, and says the cases: what passes on the plain model, by how it goes on the bundle.

    A test that made no bundle, as it tries what the model does not have, is no case.
    """

    RANK = ("skipped", "passed", "failed")  # of a test and its subtests, the last of these counts

    def __init__(self):
        self.found = {"Plain": {}, "OfBundle": {}}
        self.made = {}

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Iterator[None]:
        before = len(item.module.MADE)
        yield
        self.made[item.name] = len(item.module.MADE) > before  # of both, that of bundles comes last

    def pytest_runtest_logreport(self, report):
        kind, name = report.nodeid.split("::")[-2:]
        if report.when == "call" or report.outcome != "passed":
            lines = [line[2:].strip() for line in report.longreprtext.splitlines() if line.startswith("E ")]
            now, before = (report.outcome, next(iter(lines), "")[:300]), self.found[kind].get(name, ("skipped", ""))
            self.found[kind][name] = max(before, now, key=lambda found: self.RANK.index(found[0]))

    def pytest_sessionfinish(self):
        for name, (outcome, _) in self.found["Plain"].items():
            if outcome == "passed" and self.made[name]:
                how, why = self.found["OfBundle"][name]
                say(name, how == "passed", why or how)


if __name__ == "__main__":
    os.environ["CONFORMANCE_FAMILY"] = FAMILY
    sys.exit(
        int(pytest.main([__file__, "-q", "-c", os.devnull, "--tb=short", "-p", "no:cacheprovider"], [Saying()]) > 1)
    )
