"""Generation through transformers: with a cache, and with an assistant that drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import moepack

PROMPT = torch.tensor([[35, 412, 97, 1203, 55]])
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("memory", [None, "40MB"])
def test_greedy_uses_a_cache_and_an_assistant_changes_nothing(bundle: Path, memory: str | None) -> None:
    # In float32: a pass over drafted tokens rounds otherwise than passes over one, which in BF16 may settle a near tie.
    model = moepack.load(bundle, policy="static:w4", dtype=torch.float32, device_memory=memory)
    assistant = moepack.load(bundle, policy="static:w2", dtype=torch.float32)
    passes: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, args, kwargs: passes.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    want = model.generate(PROMPT, **GREEDY)
    assert passes == [5] + [1] * 11
    passes.clear()
    got = model.generate(PROMPT, assistant_model=assistant, **GREEDY)
    assert got.tolist() == want.tolist()
    assert max(passes[1:]) > 1, "the assistant drafts, and the model checks several tokens in a pass"
    hook.remove()
    model.moepack.close()
