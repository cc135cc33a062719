"""The heavy hitters of a prompt: the tokens that receive most attention (dymoe, section 4.2.1).

transformers' table of attention functions gives one that calls the requested function (so results are the same to the
bit). If the running step reads a prompt whose tokens are to be ranked, it then computes from queries and keys how much
attention each token receives. Configurations stay as they are: families and other threads read their names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from moepack.pack.errors import InputError
from moepack.pack.spec import ExpertLayer
from moepack.runtime.step.context import observe_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WATCHED = ("eager", "sdpa")  # names of attention functions
ELEMENT = 12  # bytes of memory to compute one attention weight: the product, in float32, and its softmax
EAGER = "eager_attention_forward"  # the name of plain attention in a model's own file


@torch.no_grad()
def attention_received(
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scaling: float,
    causal: bool = True,
    text: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    workspace: int = 1 << 20,
) -> Tensor:
    """The attention that each key receives, float32 [batch, keys]: a mean over heads (dymoe, equation 1).

    Args:
        query: [batch, heads, queries, size].
        key: [batch, key heads, keys, size]; groups of heads share keys.
        mask: [batch or 1, heads or 1, queries, keys], bool (True: the key is seen) or numbers to add to logits. With
            `None` a query sees all keys, or if `causal` the keys up to its own index.
        causal: whether a query sees only keys up to its own; the last query's key is the last key.
        text: bool [batch, queries], False for padding; `None` without padding.
        softcap: the limit that tanh sets to logits; `None` sets no limit.
        sinks: [heads], logits that take up attention and belong to no key.
        workspace: bytes of memory for a chunk of queries.
    """
    batch, heads, queries, size = query.shape
    groups = key.shape[1]
    keys = key.shape[2]
    shared = heads // groups
    weights = max(1, workspace // ELEMENT)
    if weights < shared * keys:  # too little memory for one query of all heads that share keys
        key = key.repeat_interleave(shared, dim=1)
        groups = heads
        shared = 1
    out = torch.zeros(batch, keys, dtype=torch.float32, device=query.device)
    step = max(1, min(groups, weights // (shared * keys)))  # groups of heads at a time; `rows` queries at a time
    rows = max(1, min(queries, weights // (step * shared * keys)))
    for b in range(batch):
        at = torch.arange(queries, device=query.device) if text is None else text[b].nonzero()[:, 0]
        for begin, some in zip(range(0, max(1, len(at)), rows), at.split(rows), strict=True):
            last = begin + len(some) - 1
            if text is not None:
                last = int(some[-1]) if len(some) else queries - 1
            seen = keys
            if causal:
                seen = last + 1 if mask is None else last + 1 + keys - queries
            hidden: Tensor | None = None  # [heads or 1, rows, seen]
            if mask is not None:
                hidden = mask[b if len(mask) > 1 else 0][:, some, :seen]
            elif causal:
                hidden = torch.arange(seen, device=query.device)[None, None] <= some[None, :, None]
            for g in range(0, groups, step):
                here = min(step, groups - g)
                q = query[b, g * shared : (g + here) * shared, some].reshape(here, shared * len(some), size)
                products = torch.matmul(q, key[b, g : g + here, :seen].transpose(1, 2)).float().mul_(scaling)
                products = products.view(here * shared, len(some), seen)
                if softcap is not None:
                    products = torch.tanh(products / softcap) * softcap
                if hidden is not None:
                    part = hidden if len(hidden) == 1 else hidden[g * shared : (g + here) * shared]
                    products = products.masked_fill_(~part, -math.inf) if part.dtype == torch.bool else products + part
                if sinks is not None:
                    beside = sinks[g * shared : (g + here) * shared].float().view(-1, 1, 1)
                    products = torch.cat([products, beside.expand(-1, len(some), 1)], dim=-1)
                out[b, :seen] += products.softmax(-1)[..., :seen].sum((0, 1))
    return out / heads


def heavy_hitters(scores: Tensor, share: float, text: Tensor | None = None) -> Tensor:
    """Mark the tokens with the highest scores, bool [batch, tokens]: the `share` of each sequence, rounded up.

    Among equal `scores` [batch, tokens] the first are chosen, but never padding: False in `text`, bool [batch, tokens].
    """
    real = torch.ones_like(scores, dtype=torch.bool) if text is None else text
    most = (real.sum(1, keepdim=True) * share - 1e-6).ceil()
    order = scores.masked_fill(~real, -math.inf).argsort(dim=1, descending=True, stable=True)
    numbers = torch.arange(order.shape[1], device=order.device).expand_as(order)
    rank = torch.empty_like(order).scatter_(1, order, numbers)
    return (rank < most) & real


class TokenImportance:
    """The heavy hitters of the prompt that is being read, by layer. Passes take turns: their policy blocks."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[ExpertLayer], share: float, workspace: int) -> None:
        """Find the attention of each layer with experts. A `share` of a sequence's tokens are heavy hitters.

        `workspace` bytes hold attention weights. Raises InputError when a layer's attention cannot be observed.
        """
        self._share = share
        self._workspace = workspace
        self._positions = {id(_attention_of(model, layer.module)): i for i, layer in enumerate(layers)}
        configs: list[Any] = [m.config for m in model.modules() if hasattr(m, "config")]
        self._configs = list({id(c): c for c in configs if hasattr(c, "_attn_implementation_internal")}.values())
        self._kind = type(model).__name__
        # what the pass reads, and its heavy hitters by layer
        self._shape: tuple[int, int] = (0, 0)
        self._cached = 0
        self._text: Tensor | None = None
        self._heavy: dict[int, Tensor] = {}
        _watch_all()
        self._check()

    def _check(self) -> None:
        for config in self._configs:
            if config._attn_implementation not in WATCHED:
                raise refused(self._kind, f"attention {config._attn_implementation!r}")

    @contextlib.contextmanager
    def watching(self, shape: tuple[int, int], text: Tensor | None, cached: int) -> Iterator[None]:
        """Observe the attention of a pass over a prompt inside the context.

        Args:
            shape: the shape of the pass's tokens, (batch, tokens).
            text: [batch x tokens], 0 for padding; `None` without padding.
            cached: tokens that the caches hold before the pass.

        Raises InputError when the model's attention was changed to one that cannot be observed.
        """
        self._check()
        try:
            self._heavy.clear()  # of a pass that was interrupted
            self._shape = shape
            self._cached = cached
            self._text = None if text is None else (text != 0).view(shape)
            yield
        finally:
            if self._shape is shape:  # else an interrupted pass ends late, when another one is watched
                self._shape = (0, 0)
                self._text = None
                self._heavy.clear()

    def saw(
        self,
        module: object,
        query: Tensor,
        key: Tensor | Iterable[Tensor],
        mask: Tensor | None,
        given: dict[str, Any],
    ) -> None:
        """Compute and keep the heavy hitters of one attention layer's call; `given` are its further arguments.

        Keys may be given some heads after others, one key head for each head of the query.
        """
        position = self._positions.get(id(module))
        if position is None or (query.shape[0], query.shape[2]) != self._shape:
            return
        causal = given.get("is_causal")
        scaling = given.get("scaling")
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
        softcap = given.get("softcap")
        sinks = given.get("s_aux")
        batch, heads, tokens, _ = query.shape
        received = torch.zeros(batch, 0, device=query.device)
        head = 0
        for part in [key] if isinstance(key, Tensor) else key:
            some = query if isinstance(key, Tensor) else query[:, head : head + part.shape[1]]
            head += part.shape[1]
            mean = attention_received(some, part, mask, scaling, causal, self._text, softcap, sinks, self._workspace)
            share = mean * (some.shape[1] / heads)
            received = received + share if received.numel() else share
        first = min(self._cached, received.shape[1] - tokens)  # a cache of fixed length has keys behind the pass's, too
        self._heavy[position] = heavy_hitters(received[:, first : first + tokens], self._share, self._text)

    def heavy(self, position: int, tokens: int) -> Tensor | None:
        """Return whether each token is a heavy hitter, bool [tokens]; `None` if the attention was not observed."""
        heavy = self._heavy.pop(position, None)
        return None if heavy is None or heavy.numel() != tokens else heavy.view(-1)


def refused(kind: str, why: str) -> InputError:
    """Return the error for a model whose attention cannot be observed."""
    return InputError(
        f"the policy needs attention weights, which {kind}'s layers do not give ({why}): load it with "
        "attn_implementation='sdpa' or 'eager' where it has those, or name importance:by=counts, which does without"
    )


def _attention_of(model: PreTrainedModel, experts: str) -> nn.Module:
    """Find the attention module in the decoder layer that has these experts. Raises InputError if there is none."""
    path = experts.split(".")
    ends = [
        n for n in range(1, len(path)) if isinstance(model.get_submodule(".".join(path[: n - 1])), torch.nn.ModuleList)
    ]
    name = ".".join(path[: ends[-1]]) if ends else ""  # the decoder layer, or else the whole model
    for module in model.get_submodule(name).modules():
        forward = inspect.unwrap(type(module).forward)
        code = getattr(forward, "__code__", None)
        if code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names:
            if not hasattr(sys.modules[type(module).__module__], EAGER):
                break
            return module
    raise refused(type(model).__name__, name or experts)


def _watched(run: Callable[..., object]) -> Callable[..., object]:
    """Return an attention function that calls `run`, and lets the running step's `TokenImportance` see the call."""

    @functools.wraps(run)  # who asks whose function it is, as for kernels that stand in for transformers' own, is told
    def forward(*args: Any, **given: Any) -> object:
        out = run(*args, **given)
        observe_attention(*_called(*args, **given))
        return out

    forward.is_watched = True  # type: ignore[attr-defined]
    return forward


_kept = functools.cache(_watched)  # others keep one function for each that they get


def _called(
    module: object, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[object, Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """The arguments of `saw`, by the names that families may call an attention function with."""
    return module, query, key, attention_mask, given


@functools.cache
def _watch_all() -> None:
    """From now on let transformers' table give functions that can be watched, to code that is not being compiled."""
    by_name = AttentionInterface.get_interface
    by_index = AttentionInterface.__getitem__

    def seen(name: str, found: Callable[..., object]) -> Callable[..., object]:
        if name not in WATCHED or torch.compiler.is_compiling() or getattr(found, "is_watched", False):
            return found
        plain = isinstance(found, types.FunctionType) and found.__closure__ is None  # which lives as long as its module
        return _kept(found) if plain else _watched(found)

    def get_interface(
        self: AttentionInterface, attn_implementation: str, default: Callable[..., object]
    ) -> Callable[..., object]:
        return seen(attn_implementation, by_name(self, attn_implementation, default))

    def getitem(self: Any, name: str) -> Callable[..., object]:
        return seen(name, by_index(self, name))  # type: ignore[no-untyped-call]

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
    AttentionInterface.__getitem__ = getitem  # type: ignore[method-assign]
