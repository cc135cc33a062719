"""Text from a bundle or a checkpoint: a prompt's continuation, inside the budget it was loaded with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from moepack.pack.errors import InputError

from .opening import check, load_model, locate
from .progress import Reporter

PROMPT = 512  # tokens of a prompt that go in at once, in a budget
NEW_TOKENS = 64  # that a prompt is continued by


def generate(
    path: str | Path,
    prompt: str,
    policy: str | None = None,
    device: str = "cpu",
    dtype: str = "auto",
    device_memory: int | None = None,
    max_new_tokens: int = NEW_TOKENS,
    temperature: float = 0.0,
    seed: int = 0,
    batch: int = 1,
    kv_tokens: int | None = None,
    prefill_tokens: int | None = None,
    all_logits: bool = False,
) -> str:
    """The continuation of a prompt: greedy at temperature 0, sampled above it.

    A budget leaves room for `batch` sequences with the KV cache of `kv_tokens` tokens, or of the prompt and all new
    ones; and for passes of `prefill_tokens` tokens, or of the prompt's, at most 512: so many of it go in at once.
    """
    if not prompt:
        raise InputError("the prompt is empty")
    with Reporter().hub_bars():
        source, is_bundle = locate(path)
        import torch

        from moepack.calibrate.data import load_tokenizer

        check(source, is_bundle, policy, device, dtype, device_memory)
        tokenizer = load_tokenizer(Path(source))
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        if not ids.numel():
            raise InputError("the prompt is empty")
        whole = ids.shape[1] + max_new_tokens
        passes = min(ids.shape[1], PROMPT) if prefill_tokens is None else prefill_tokens
        chunk = passes or PROMPT
        workload = {"kv_tokens": whole if kv_tokens is None else kv_tokens, "batch": batch, "prefill_tokens": passes}
        model = load_model(source, is_bundle, policy, device, dtype, device_memory, **workload, all_logits=all_logits)
    ids = ids.to(model.device)
    torch.manual_seed(seed)
    options: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        options["temperature"] = temperature
    if device_memory is not None and ids.shape[1] > chunk:
        options["past_key_values"] = _prefill(model, ids, chunk)
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, pad_token_id=0, **options)
    return str(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _prefill(model: Any, ids: Any, chunk: int) -> Any:
    """The cache of a prompt's first tokens, put in a chunk at a time; the last chunk is left to generation."""
    import torch

    last: dict[str, Any] = {"logits_to_keep": 1} if model._supports_logits_to_keep() else {}
    cache = None
    with torch.inference_mode():
        for part in ids[:, : (ids.shape[1] - 1) // chunk * chunk].split(chunk, dim=1):
            cache = model(input_ids=part, past_key_values=cache, use_cache=True, **last).past_key_values
    return cache
