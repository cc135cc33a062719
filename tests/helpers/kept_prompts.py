"""A prompt of several chunks, read by an engine as the scheduler has it read."""

import torch
from tiny_models import save_tiny

from moepack.server.batching.engine import Engine, StepInput
from moepack.server.batching.tokens import Tokens

STEP, MOST = 256, 1 << 30
SYSTEM = [1 + n * 37 % 900 for n in range(200)]  # three whole chunks and a rest


def model_of(family, folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(save_tiny(family, folder / family, dtype=torch.float32)).eval()


def read(engine, prompt, ends, new=0):
    """Read a prompt in passes that end there, or from where kept chunks end: the tokens taken, and all last logits."""
    slot, logits, taken = engine.add(len(prompt), engine.keys(prompt)), [], 0
    tokens = list(prompt)
    for end in [*ends, *range(len(prompt) + 1, len(prompt) + new + 1)]:
        ahead = engine.kept_ahead(slot, end - slot.length - 1)
        taken += ahead
        part, is_prompt = tokens[slot.length + ahead : end], end <= len(prompt)
        out = engine.run([StepInput(slot, part, 1, is_prompt, ahead, keeps=9 * is_prompt)])[0]
        logits.append(out[0])
        tokens.append(int(out[0].argmax()))
        tokens[:] = tokens if end >= len(prompt) else tokens[:-1]
    engine.remove(slot)
    return taken, torch.stack(logits[len(ends) - 1 :])


def scheduled(bench, model, tokenizer, most, before=lambda items: None, **limits):
    """A scheduler of a model that keeps so many bytes; `before` is called with the inputs of each pass."""
    engine = Engine(model, STEP, most)
    run = engine.run
    engine.run = lambda items: (before(items), run(items))[1]
    return bench(engine, Tokens(tokenizer), step_tokens=STEP, waiting=100, context=2000, **limits)
