"""Perplexity and text, of a bundle under a policy or of a plain checkpoint.

Perplexity is over the windows of `moepack.calibrate.data`: documents joined with the end-of-text token, cut into
windows of one length, each window scored from its second token on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moepack.pack.errors import InputError
from moepack.pack.manifest import MANIFEST

from .progress import Reporter

_LOGITS = 1 << 28  # bytes of float32 logits in one batch


@dataclass(frozen=True, slots=True)
class FileScore:
    """Perplexity over one file; `tokens` counts the scored ones."""

    file: str
    perplexity: float
    tokens: int
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of all files in one session, and what the session took of the device.

    Attributes:
        forward_waits: how often a forward pass waited for a copy; 0 but for policies that load on demand.
        transition_failures: copies that failed; their experts stayed on the versions they had.
        refusals: promotions put off for want of room.
        bytes_moved: stored bytes copied, those of loading included.
    """

    files: tuple[FileScore, ...]
    perplexity: float
    tokens: int
    tokens_per_second: float
    policy: str | None
    resident_bytes_peak: int
    budget_bytes: int | None
    promotions: int = 0
    demotions: int = 0
    forward_waits: int = 0
    cancelled: int = 0
    transition_failures: int = 0
    refusals: int = 0
    bytes_moved: int = 0


def locate(path: str | Path) -> tuple[str | Path, bool]:
    """A bundle or checkpoint by its directory or Hub id: where transformers finds it, and whether it is a bundle.

    Of a checkpoint on the Hub the directory it was downloaded to; a bundle there keeps its id, and is fetched when it
    is loaded.

    Raises:
        InputError: when it is neither a directory nor on the Hub, or a checkpoint that is not whole.
    """
    if Path(path).exists():
        return path, (Path(path) / MANIFEST).is_file()
    name = str(path)
    if not name.startswith((".", "/", "~")) and name.count("/") <= 1:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        try:
            hf_hub_download(name, MANIFEST)
            return name, True
        except (HfHubHTTPError, HFValidationError, OSError):
            pass  # no bundle: what else it is, or why it cannot be had, comes out below
    from moepack.calibrate.checkpoint import open_checkpoint

    return open_checkpoint(name).path, False


def load_model(
    path: str | Path, is_bundle: bool, policy: str | None, device: str, dtype: str, device_memory: int | None = None
) -> Any:
    """A bundle, or a plain checkpoint, as a transformers model; `path` and `is_bundle` as `locate` gives them."""
    import torch

    from moepack.calibrate.stream import quiet_transformers

    wanted: Any = "auto" if dtype == "auto" else getattr(torch, dtype)
    if is_bundle:
        from moepack.runtime.load import load

        with quiet_transformers():
            return load(path, device, device_memory, policy, wanted)
    if policy is not None or device_memory is not None:
        raise InputError(f"{path}: not a bundle: a policy and a memory budget need one")
    from transformers import AutoModelForCausalLM

    from moepack.calibrate.checkpoint import open_checkpoint

    opened = open_checkpoint(path)
    with quiet_transformers():
        return AutoModelForCausalLM.from_pretrained(opened.path, dtype=wanted, device_map=device)


def resident_bytes(model: Any) -> int:
    """Bytes of device memory that a model's weights take."""
    serving = getattr(model, "moepack", None)
    if serving is not None:
        return int(serving.resident_bytes(model))
    return sum(p.numel() * p.element_size() for p in model.parameters())


def evaluate(
    path: str | Path,
    data: Sequence[str],
    policy: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    device_memory: int | None = None,
    length: int = 512,
    samples: int = 256,
    reporter: Reporter | None = None,
    trace: Path | None = None,
) -> Evaluation:
    """Perplexity of a bundle or checkpoint on text files, one after another in one session.

    Args:
        path: a bundle or a checkpoint: its directory, or its Hub id.
        data: files or Hub data sets.
        policy: how a bundle is served; see `moepack.load`.
        device: where to run.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device_memory: bytes that weights may take; for bundles.
        length: tokens of a window; at most what the model was made for.
        samples: windows a file, from its beginning.
        reporter: who is told of progress.
        trace: write every forward pass into this file (moepack.runtime.trace); for bundles.
    """
    import torch

    from moepack.calibrate.data import load_tokenizer, windows

    reporter = reporter or Reporter()
    if not data:
        raise InputError("no text to evaluate on: name files with --data")
    with reporter.hub_bars():
        source, is_bundle = locate(path)
        model = load_model(source, is_bundle, policy, device, dtype, device_memory)
        tokenizer = load_tokenizer(Path(source))
    length = min(length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or length)
    pools = [windows(source, tokenizer, length, samples) for source in data]
    for source, pool in zip(data, pools, strict=True):
        if not len(pool):
            raise InputError(
                f"{source}: shorter than one window of {length} tokens: give more text or a shorter --length"
            )
    serving = getattr(model, "moepack", None)
    if trace is not None:
        if serving is None:
            raise InputError(f"{path}: not a bundle: a trace needs one")
        serving.trace(model, trace)
    vocabulary = model.config.get_text_config().vocab_size
    batch = max(1, min(16, _LOGITS // (4 * length * vocabulary)))
    scores, nll_all, seconds_all = [], 0.0, 0.0
    reporter.stage("evaluate", len(data))
    for source, pool in zip(data, pools, strict=True):
        reporter.step(Path(source).name)
        reporter.inner("tokens", pool.numel())
        nll, tokens, began = 0.0, 0, time.perf_counter()
        with torch.inference_mode():
            for ids in pool.split(batch):
                ids = ids.to(model.device)
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
                nll += float(
                    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
                )
                tokens += ids[:, 1:].numel()
                reporter.advance(ids.numel())
        seconds = time.perf_counter() - began
        scores.append(FileScore(str(source), math.exp(nll / tokens), tokens, tokens / seconds))
        nll_all, seconds_all = nll_all + nll, seconds_all + seconds
    reporter.step("done")
    total = sum(s.tokens for s in scores)
    if serving is not None:
        serving.close()
    return Evaluation(
        tuple(scores),
        math.exp(nll_all / total),
        total,
        total / seconds_all,
        None if serving is None else serving.policy,
        resident_bytes(model) if serving is None else serving.resident_bytes_peak,
        device_memory,
        **({} if serving is None else serving.counters()),
    )


def generate(
    path: str | Path,
    prompt: str,
    policy: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    device_memory: int | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
) -> str:
    """The continuation of a prompt: greedy at temperature 0, sampled above it."""
    import torch

    from moepack.calibrate.data import load_tokenizer

    with Reporter().hub_bars():
        source, is_bundle = locate(path)
        model = load_model(source, is_bundle, policy, device, dtype, device_memory)
        tokenizer = load_tokenizer(Path(source))
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids.to(model.device)
    if not ids.numel():
        raise InputError("the prompt is empty")
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, pad_token_id=0, **options)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
