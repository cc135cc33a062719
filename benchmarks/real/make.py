"""The stages of making the upcycled model, each kept in a file of the user's cache once it is done."""

import hashlib
import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from moepack.pack.files import digest_of
from moepack.runtime.patches import quiet_libraries

from . import upcycle
from .source import SourceError, dense
from .texts import DOMAINS, Messages, domain_texts
from .upcycle import BRANCHES

MARK = "upcycled.json"  # of a directory that this command made: from what, how, and what it holds


def make(released: Path, output: Path, stages: Path, training: upcycle.Training, workers: int) -> None:
    """Train what is not yet trained, `workers` branches at a time, and save the model in BF16 with its tokenizer.

    `stages` keeps what is trained: a folder for all that the trained bytes depend on.

    Raises:
        SourceError: `output` is there and was not made by this command, which would replace it; or a branch's process
            was killed.
    """
    output = output.resolve()
    if output.exists() and not (output / MARK).is_file():
        raise SourceError(f"{output} is there, and was not made by this command")
    model, tokenizer = dense(released)
    data = {domain: upcycle.windows(tokens_of(tokenizer, domain), training.length) for domain in DOMAINS}
    work = stages / f"stages-{_digest(released, training, data)}"
    work.mkdir(parents=True, exist_ok=True)
    paths = {branch: work / f"{branch.domain}-{branch.half}.safetensors" for branch in BRANCHES}
    left = [branch for branch, path in paths.items() if not upcycle.whole(path)]
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    try:
        jobs = [
            pool.submit(_train_branch, released, branch, data[branch.domain], training, paths[branch])
            for branch in left
        ]
        for job in jobs:
            job.result()
    except BrokenProcessPool:
        raise SourceError("the process of a branch was killed: is there memory for two?") from None
    finally:
        pool.shutdown(cancel_futures=True)
    mixture = upcycle.experts_of(model)
    _prove_equal(model, mixture, data["prose"][:1])
    for branch in BRANCHES:
        upcycle.add_branch(mixture, branch, paths[branch])
    routers = work / "routers.safetensors"
    if not upcycle.whole(routers):
        upcycle.train_routers(mixture, data, training, routers)
    upcycle.set_routers(mixture, routers)
    mixture.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent) as folder:
        whole = Path(folder) / "model"
        mixture.bfloat16().save_pretrained(whole)
        tokenizer.save_pretrained(whole)
        digests = {path.name: digest_of(whole, path.name) for path in sorted(whole.glob("*.safetensors"))}
        made = {"source": str(released.name), "training": asdict(training), "sha256": digests}
        (whole / MARK).write_text(json.dumps(made, indent=1) + "\n")
        if output.exists():
            output.rename(Path(folder) / "before")
        whole.rename(output)
    print(f"saved {output}")
    for name, digest in digests.items():
        print(f"{digest}  {name}")


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


def _digest(released: Path, training: upcycle.Training, data: dict[str, torch.Tensor]) -> str:
    """What trained bytes depend on: the source, the training and its code, the text, torch and its instruction set."""
    file = released / "model.safetensors" if released.is_dir() else released
    code = Path(upcycle.__file__).read_text()
    facts = [
        digest_of(file.parent, file.name),
        asdict(training),
        code,
        torch.__version__,
        torch.backends.cpu.get_cpu_capability(),
    ]
    whole = hashlib.sha256(json.dumps(facts).encode())
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


def written(folder: Path, tokenizer: PreTrainedTokenizerBase, domain: str, *, held: bool) -> str:
    """Write the texts of a domain into a folder, a document a line; return the file's name."""
    path = folder / f"{domain}-{'held' if held else 'seen'}.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts_of(tokenizer, domain, held=held)))
    return str(path)
