"""Score the tokens of a text under a model, and compare the model with a reference. Tensors in, tensors out.

The logits of all tokens are by far the largest tensor of a forward pass, so they are made in pieces: the decoder runs
once, and the model's own forward runs on some tokens of the decoder's output at a time. A comparison keeps the
reference's decoder output, one hidden state for each token, and makes the reference's logits from it when it needs
them, by the same head or a kept one. So the two models need not be in memory at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moepack.pack.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers.modeling_outputs import BaseModelOutput

    from moepack.runtime.served_model import CausalModel


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Scores of every token of a batch but the first of each row, float64 [batch, length - 1]."""

    nll: Tensor  # negative log-likelihood, nats
    kl: Tensor | None  # Kullback-Leibler divergence KL(reference, model), nats; None without a reference
    agrees: Tensor | None  # 1 where both models find the same token most likely; None without a reference
    hidden: Tensor | None  # the decoder's output [batch, length, hidden]; None if the head cannot run by itself


def products(model: CausalModel) -> contextlib.AbstractContextManager[object]:
    """Enclose passes of a plain checkpoint: where the CPU emulates BF16, products are those of calibration."""
    if hasattr(model, "moepack"):
        return contextlib.nullcontext()
    from moepack.calibrate.products import widened

    return widened(model.device, model.dtype)


def token_scores(
    model: CausalModel, ids: Tensor, room: int, reference: Tensor | None = None, head: nn.Module | None = None
) -> TokenScores:
    """Score the tokens of `ids` [batch, length]. A model with coded caches reads each token's keys from one.

    Args:
        model: a causal language model.
        ids: int64, on the model's device.
        room: bytes for a piece of logits.
        reference: the reference's `hidden` for the same ids.
        head: the reference's output projection, on the CPU; None if both models have the same one.

    Raises:
        InputError: with a reference, for a model whose head cannot run by itself.
    """
    import torch

    decoder = getattr(model, model.base_model_prefix)
    if decoder is model or not model._supports_logits_to_keep():
        if reference is not None:
            raise InputError(f"{type(model).__name__} makes the logits of all tokens at once: no comparison")
        logits = model(input_ids=ids, use_cache=_reads_codes(model)).logits[:, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return TokenScores(nll.double(), None, None, None)
    output = _decoded(model, decoder, ids)
    theirs = None if reference is None else type(output)(last_hidden_state=reference.to(output.last_hidden_state))
    # A logit takes 2 or 4 bytes as the model makes it, 4 in float32, 4 more as a logarithm; thrice with a reference.
    each = 12 * len(ids) * model.config.get_text_config().vocab_size * (1 if theirs is None else 3)
    piece = max(1, room // each)
    last = ids.shape[1] - 1
    parts: list[tuple[Tensor, Tensor | None, Tensor | None]] = []
    for start in range(0, last, piece):
        these = torch.arange(start, min(start + piece, last), device=ids.device)
        with _logits(model, decoder, output) as logits_of:
            logs = torch.log_softmax(logits_of(ids, these), -1)
        nll = -logs.gather(2, ids[:, these + 1].unsqueeze(2)).squeeze(2).double()
        if theirs is None:
            parts.append((nll, None, None))
            continue
        with _logits(model, decoder, theirs, head) as logits_of:
            best = torch.log_softmax(logits_of(ids, these), -1)
        kl = (best.exp() * (best - logs)).sum(-1).double()
        parts.append((nll, kl, (best.argmax(-1) == logs.argmax(-1)).double()))
    joined = [None if p[0] is None else torch.cat(p, 1) for p in zip(*parts, strict=True)]
    assert joined[0] is not None
    return TokenScores(joined[0], joined[1], joined[2], output.last_hidden_state)


def _reads_codes(model: CausalModel) -> bool:
    """Whether a model's attention reads codes from its cache, so that a pass without one would score another model."""
    return bool(getattr(getattr(model, "moepack", None), "kv", ()))


def _decoded(model: CausalModel, decoder: nn.Module, ids: Tensor) -> BaseModelOutput:
    """Run the whole model, make logits of the last token alone, and return the decoder's output."""
    kept: list[BaseModelOutput] = []
    hook = decoder.register_forward_hook(lambda _, args, out: kept.append(out))
    try:
        model(input_ids=ids, use_cache=_reads_codes(model), logits_to_keep=1)
    finally:
        hook.remove()
    return kept[0]


@contextlib.contextmanager
def _logits(
    model: CausalModel, decoder: nn.Module, output: BaseModelOutput, head: nn.Module | None = None
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Yield a function (ids, positions) -> float32 logits, which runs the model's head, or `head`, on `output`."""
    import torch

    from moepack.runtime.forward_wrapper import unwrapped_forward

    forward = unwrapped_forward(model)
    own = model.get_output_embeddings()
    decoder.forward = lambda *_, **__: output
    try:
        if head is not None:
            on_the_host = torch.nn.Module()
            on_the_host.forward = lambda x: head(x.cpu()).to(x.device)
            model.set_output_embeddings(on_the_host)
        yield lambda ids, these: forward(input_ids=ids, use_cache=False, logits_to_keep=these).logits.float()
    finally:
        del decoder.forward
        model.set_output_embeddings(own)
