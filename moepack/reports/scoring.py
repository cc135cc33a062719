"""What a model makes of each token of a text, and how far that is from another's. Tensors in, tensors out.

The logits of all tokens are the largest thing in a forward pass by far. They are made in pieces: the model's own
forward runs again and again on what its decoder has returned once, for some tokens of it at a time. For a comparison
the other model's decoder output is kept, a hidden state a token, and its logits are made beside, by the same head or a
kept one: so the two models need not be in memory at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moepack.pack.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenScores:
    """Of every token of a batch but the first of each row, float64 [batch, length - 1].

    Attributes:
        nll: negative log-likelihood, nats.
        kl: Kullback-Leibler divergence of the reference's distribution from this one's, nats; None without a reference.
        agrees: 1 where both find the same token most likely.
        hidden: what the decoder returned, [batch, length, hidden]; None of a model whose head cannot run by itself.
    """

    nll: Tensor
    kl: Tensor | None
    agrees: Tensor | None
    hidden: Tensor | None


def products(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Around passes: a plain model multiplies as calibration does where BF16 is emulated; a served one has its own."""
    if hasattr(model, "moepack"):
        return contextlib.nullcontext()
    from moepack.calibrate.products import widened

    return widened(model.device, model.dtype)


def token_scores(model: Any, ids: Tensor, room: int, reference: Tensor | None = None, head: Any = None) -> TokenScores:
    """Score the tokens of `ids` [batch, length].

    Args:
        model: a causal language model.
        ids: int64, on the model's device.
        room: bytes that a piece of logits may take.
        reference: `hidden` of the model that this one is compared with, as that gave it for the same ids.
        head: that model's output projection, on the CPU; None where this model has the same.

    Raises:
        InputError: with a reference, for a model whose head cannot run by itself.
    """
    import torch

    decoder = getattr(model, model.base_model_prefix)
    if decoder is model or not model._supports_logits_to_keep():
        if reference is not None:
            raise InputError(f"{type(model).__name__} makes the logits of all tokens at once: no comparison")
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
        return TokenScores(nll.double(), None, None, None)
    output = _decoded(model, decoder, ids)
    theirs = None
    if reference is not None:
        theirs = type(output)(last_hidden_state=reference.to(output.last_hidden_state))
    # A logit takes 2 or 4 bytes as the model makes it, 4 in float32, 4 more as a logarithm; twice with a reference.
    each = 12 * len(ids) * model.config.get_text_config().vocab_size * (1 if theirs is None else 3)
    piece, last = max(1, room // each), ids.shape[1] - 1
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


def _decoded(model: Any, decoder: Any, ids: Tensor) -> Any:
    """What the decoder returns in a pass of the whole model, whose logits are of the last token alone."""
    kept: list[Any] = []
    hook = decoder.register_forward_hook(lambda _, args, out: kept.append(out))
    try:
        model(input_ids=ids, use_cache=False, logits_to_keep=1)
    finally:
        hook.remove()
    return kept[0]


@contextlib.contextmanager
def _logits(model: Any, decoder: Any, output: Any, head: Any = None) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """The model's forward on what a decoder has returned, by another head if one is given: (ids, positions) to logits,
    float32."""
    from moepack.runtime.forward_wrapper import unwrapped_forward

    forward, own = unwrapped_forward(model), model.get_output_embeddings()

    def logits(ids: Tensor, these: Tensor) -> Tensor:
        made: Tensor = forward(input_ids=ids, use_cache=False, logits_to_keep=these).logits.float()
        return made

    decoder.forward = lambda *_, **__: output
    try:
        if head is not None:
            model.set_output_embeddings(_on_the_host(head))
        yield logits
    finally:
        del decoder.forward
        model.set_output_embeddings(own)


def _on_the_host(head: Any) -> Any:
    """A module that multiplies by a head on the CPU, wherever its input is."""
    from torch import nn

    class Host(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = head(x.cpu()).to(x.device)
            return made

    return Host()
