"""The stages of making the upcycled model, each kept in a file of the user's cache once it is done."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from moepack.runtime.patches import quiet_libraries

from . import upcycle
from .source import dense
from .texts import DOMAINS, Messages, domain_texts
from .upcycle import BRANCHES


def make(released: Path, output: Path, stages: Path, training: upcycle.Training, workers: int) -> None:
    """Train what is not yet trained, `workers` branches at a time, and save the model in BF16 with its tokenizer.

    `stages` keeps what is trained: a folder for each training and its text.
    """
    model, tokenizer = dense(released)
    data = {domain: upcycle.windows(tokens_of(tokenizer, domain), training.length) for domain in DOMAINS}
    work = stages / f"stages-{_digest(training, data)}"
    work.mkdir(parents=True, exist_ok=True)
    paths = {branch: work / f"{branch.domain}-{branch.half}.safetensors" for branch in BRANCHES}
    left = [branch for branch, path in paths.items() if not path.exists()]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs = [
            pool.submit(_train_branch, released, branch, data[branch.domain], training, paths[branch])
            for branch in left
        ]
        for job in jobs:
            job.result()
    mixture = upcycle.experts_of(model)
    _prove_equal(model, mixture, data["prose"][:1])
    for branch in BRANCHES:
        upcycle.add_branch(mixture, branch, paths[branch])
    routers = work / "routers.safetensors"
    if not routers.exists():
        upcycle.train_routers(mixture, data, training, routers)
    upcycle.set_routers(mixture, routers)
    partial = output.with_name(f"{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    mixture.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    mixture.bfloat16().save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(output, ignore_errors=True)
    partial.replace(output)
    print(f"saved {output}")
    for path in sorted(output.glob("*.safetensors")):
        with path.open("rb") as file:
            print(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}")


def _train_branch(
    released: Path, branch: upcycle.Branch, data: torch.Tensor, training: upcycle.Training, path: Path
) -> None:
    """In a process of its own: one thread, because a sum over several depends on how many there are."""
    quiet_libraries()
    torch.set_num_threads(1)
    upcycle.train_branch(dense(released)[0], branch, data, training, path)


def texts_of(tokenizer: PreTrainedTokenizerBase, domain: str, *, held: bool = False) -> list[str]:
    """A domain's documents, chats in the model's own template."""

    def template(messages: Messages) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))

    return domain_texts(domain, template, held=held)


def tokens_of(tokenizer: PreTrainedTokenizerBase, domain: str, *, held: bool = False) -> list[int]:
    """The tokens of a domain's documents, each ended by the token that ends an answer."""
    ids: list[int] = []
    for text in texts_of(tokenizer, domain, held=held):
        ids += tokenizer.encode(text, add_special_tokens=False)
        ids.append(tokenizer.eos_token_id)
    return ids


def _digest(training: upcycle.Training, data: dict[str, torch.Tensor]) -> str:
    """What trained bytes depend on, besides the released file."""
    whole = hashlib.sha256(json.dumps(asdict(training)).encode())
    for rows in data.values():
        whole.update(rows.numpy().tobytes())
    return whole.hexdigest()[:12]


def _prove_equal(model: torch.nn.Module, mixture: torch.nn.Module, ids: torch.Tensor) -> None:
    """Eight copies and routers of zeros must give the released model's logits, to the bit."""
    with torch.no_grad():
        equal = torch.equal(model(input_ids=ids).logits, mixture(input_ids=ids).logits)
    if not equal:
        raise AssertionError("the copies do not compute what the released model does")
    print(f"before training: logits of {ids.numel()} tokens are the released model's, to the bit")
