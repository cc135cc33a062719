"""Routers and attention of a served model on a CPU: the modules' own code, with one global name replaced in it.

A router that kernels reproduce (routers.py) takes two calls: its product, and its choice. In another router, `F.linear`
becomes the kernels' product. In attention, `ALL_ATTENTION_FUNCTIONS` gives a function that runs
the kernel, and the requested function otherwise: in the place of "sdpa" for a single new token, and of a family's own
"eager" function, which copies keys for each head that shares them, for all tokens. Several new tokens of "sdpa" attend
by torch, without such copies. A module whose code does not read these names stays as it is, and so does one whose
results would differ by more than rounding.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moepack.families.arguments import REGISTRY, attends_by_name, own_forward, unknown_to_attention
from moepack.runtime.kernels.affine_native import DTYPES
from moepack.runtime.kernels.by_torch import attend_by_groups
from moepack.runtime.kernels.dense_native import PLAIN_FORM, KernelMatrix, MatrixGroup, attend, dense
from moepack.runtime.kernels.kv_rows import plain as numbers_of
from moepack.runtime.kernels.token_native import Choices, rows_by
from moepack.runtime.step.context import current, observe_attention

from .linears import Uncopied, in_place_of, learns, most_tokens, with_name
from .routers import RouterForm, router_of, routers_of
from .selection import over_seen, sees_few
from .values import Trials, keeps, near, plain_values

Attention = Callable[..., tuple[Tensor, Tensor | None]]  # as transformers has such functions by name
SDPA = "transformers.integrations.sdpa_attention"


class _Names:
    """A namespace `of` functions, some of which are replaced."""

    def __init__(self, of: Any, **replaced: object) -> None:
        self._of = of
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> object:
        return getattr(self._of, name)


def _reads(module: nn.Module, name: str) -> types.FunctionType | None:
    """Return a module's own code if it reads this global name, not yet replaced; else `None`."""
    function = own_forward(module)
    if function is None or isinstance(function.__globals__.get(name), _Names):
        return None
    return function if name in function.__code__.co_names else None


def serve_routers(model: nn.Module, experts: Sequence[str]) -> dict[str, int]:
    """Let the kernels compute routers, or at least the linear maps of BF16 ones; return the number changed, by class.

    The model is on a CPU with loaded weights. `experts` names the modules of experts; routers are their siblings.
    """
    tried = Trials[bool]()
    found = Trials[RouterForm]()
    most = most_tokens()
    for name in experts:
        for module in routers_of(model, name):
            weight = module.weight
            function = _reads(module, "F")
            if function is None or weight.dtype not in DTYPES or not weight.is_contiguous():
                continue
            kind: Any = type(module)
            wide = weight.dtype == torch.float32
            own = kind.forward
            ways: list[Callable[..., object]] = []
            if not wide:
                shim = _Names(function.__globals__["F"], linear=_router_linear(weight.detach(), most))
                own = with_name(kind.forward, "F", shim)
                ways = [own]
            router = found.result(module, functools.partial(router_of, module, _tries, in_order=True))
            of = None
            if router is not None and not (wide and getattr(module, "bias", None) is not None):
                of = NativeRouter(module, router, most)
                ways = [_routing(own, of), *ways]
            agreed = next((way for way in ways if _agree(module, way, most)), None)
            if of is not None and agreed is ways[0]:
                of.flattens = _flattens(module)
                module._moepack_router = of
            if tried.count(module, agreed is not None):
                assert agreed is not None
                module.__class__ = in_place_of(kind, agreed)
    return tried.done()


def _tries(router: RouterForm, logits: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield the kernel's choices for all tokens."""
    yield slice(None), *Choices(router.form, logits.shape[1], logits.dtype, router.gates).choose(logits, bias)


class NativeRouter(Uncopied):
    """What the kernels read of a router, and how they choose."""

    flattens = False  # whether it returns rows of tokens for texts [batch, tokens] too

    def __init__(self, module: Any, router: RouterForm, most: int) -> None:
        """Take a router by which is known what it computes, and the most tokens of a call."""
        rows, cols = module.weight.shape
        self._bias = getattr(module, "bias", None)
        self._read = plain_values(module)
        self._at = module.weight.data_ptr()
        self.router = router
        self.most = most
        weight = module.weight.detach()
        self.matrix: MatrixGroup | Tensor = weight
        if weight.dtype == torch.bfloat16:
            limits = {dtype: [most] for dtype in DTYPES}
            self.matrix = MatrixGroup([KernelMatrix(PLAIN_FORM, rows, cols, weight, self._bias)], limits)
        of_bf16 = weight.dtype == torch.bfloat16 and not router.wide
        self.choices = Choices(router.form, rows, torch.bfloat16 if of_bf16 else torch.float32, router.gates)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits [tokens, experts] of x, bfloat16 [tokens, hidden]."""
        if isinstance(self.matrix, Tensor):
            return rows_by(self.matrix, x.float().contiguous())
        return dense(self.matrix, x.float() if self.router.wide else x)[0]

    def holds(self, module: Any) -> bool:
        """Whether the module's weights are still those that the kernels read, its numbers and flags as they were."""
        same = module.weight.data_ptr() == self._at and getattr(module, "bias", None) is self._bias
        return same and keeps(module, self._read)


def _routing(own: Callable[..., Any], of: NativeRouter) -> Callable[..., object]:
    """Return a router's forward for few tokens: its product and its choice by one call each; else `own` runs."""

    @functools.wraps(own)
    def forward(self: Any, x: Tensor) -> object:
        few = (x.dim() == 2 or of.flattens) and x.dtype == torch.bfloat16 and 0 < x.numel() <= of.most * x.shape[-1]
        watched = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()  # by who may choose in its place
        if not few or watched or not of.holds(self) or learns(x, *self.parameters(False)):
            return own(self, x)
        router = of.router
        logits = of.logits(x.reshape(-1, x.shape[-1]))
        index, gates = of.choices.choose(logits, router.bias(self))
        return logits if logits.dtype is router.logits else logits.to(router.logits), gates, index

    return forward


def _router_linear(weight: Tensor, most: int) -> Callable[..., Tensor]:
    rows, cols = weight.shape
    of = MatrixGroup([KernelMatrix(PLAIN_FORM, rows, cols, weight)])
    at = weight.data_ptr()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        few = x.dtype == torch.bfloat16 and 0 < x.numel() <= most * x.shape[-1]
        known = few and bias is None and weight.data_ptr() == at
        if known and not torch.compiler.is_compiling() and not learns(x, weight):
            return dense(of, x)[0]
        return nn.functional.linear(x, weight, bias)

    return linear


def _agree(module: nn.Module, own: Callable[..., object], most: int) -> bool:
    """Whether a router gives the same numbers with the forward `own`, except for rounding; choices follow from them.

    It is tried on one token, and on the most that the kernels multiply.
    """
    weight: Any = module.weight
    x = torch.randn(most, weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        with torch.no_grad():
            return all(_near(module(part), own(module, part)) for part in (x[:1], x))
    except Exception:  # of any kind, from a family's code
        return False


def _flattens(module: Any) -> bool:
    """Whether a router returns rows of tokens for a text [batch, tokens] too."""
    x = torch.randn(2, module.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    try:
        with torch.no_grad():
            return _near(module(x), module(x[None]))
    except Exception:  # of any kind, from a family's code
        return False


def _near(wanted: object, got: object) -> bool:
    """Whether two results of a router have tensors of the same shapes, and the first floats differ by rounding."""
    wanted, got = (found if isinstance(found, tuple) else (found,) for found in (wanted, got))
    pairs = [(a, b) for a, b in zip(wanted, got, strict=False) if isinstance(a, Tensor)]
    if len(wanted) != len(got) or any(a.shape != b.shape or a.dtype != b.dtype for a, b in pairs):
        return False
    first = next(((a, b) for a, b in pairs if a.is_floating_point()), None)
    return first is not None and near(first[1], first[0])


class _Registry(_Names):
    """transformers' table of attention functions, which gives what `change` returns for each."""

    def __init__(self, of: Any, change: Callable[[Attention], Attention]) -> None:
        super().__init__(of)
        self._change = change

    def get_interface(self, name: str, default: Attention) -> Attention:
        """Return an attention function by name, as transformers' own table does."""
        return self._change(self._of.get_interface(name, default))

    def __getitem__(self, name: str) -> Attention:
        return self._change(self._of[name])


@functools.lru_cache(64)
def is_sdpa(found: Attention) -> bool:
    """Whether an attention function is transformers' own "sdpa", or what stands in its place."""
    return getattr(inspect.unwrap(found), "__module__", "") == SDPA


def attends_alone(module: Any) -> bool:
    """Whether the kernel stands for the attention function of a served module, for a token without a mask."""
    named = vars(module.config).get("_attn_implementation_internal")
    if named == "eager":
        return getattr(module, "_moepack_eager", False)
    return named == "sdpa" and is_sdpa(ALL_ATTENTION_FUNCTIONS[named]) and "sinks" not in module._parameters


def _served(found: Attention) -> Attention:
    """Return the function in whose place the kernel runs; a registered one that is not "sdpa" stays as it is."""
    if is_sdpa(found):
        return _of_shared_keys(found)
    return _in_place_of_eager(found) if inspect.unwrap(found).__name__ == EAGER else found


def _fits(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, given: dict[str, Any]) -> bool:
    """Whether an attention call on a CPU is plain: of one dtype, with shared keys, without gradients and dropout."""
    return (
        not given.get("dropout")
        and query.dtype == key.dtype == value.dtype
        and query.device.type == "cpu"
        and not torch.compiler.is_compiling()
        and not learns(query, key, value)
        and query.shape[0] == key.shape[0]
        and key.shape[:3] == value.shape[:3]
        and query.shape[1] == key.shape[1] * getattr(module, "num_key_value_groups", 1)
    )


def keys_read(module: nn.Module, query: Tensor, length: int, mask: Tensor | None, given: dict[str, Any]) -> int:
    """Return how many of `length` keys "sdpa" reads: of a static cache that was empty, not the room behind a prompt."""
    tokens = query.shape[2]
    plain = mask is None and given.get("position_bias") is None
    return tokens if plain and 1 < tokens < length and in_order(module, given) else length


def in_order(module: nn.Module, given: dict[str, Any]) -> bool:
    """Whether a token without a mask sees the tokens up to its own alone."""
    ordered = given.get("is_causal")
    return bool(getattr(module, "is_causal", True) if ordered is None else ordered)


SPECIAL = ("softcap", "s_aux", "position_bias", "cache", "sinks")  # options that the kernel does not support
EAGER = "eager_attention_forward"  # the name of plain attention in a model's own file
MASKED = -1e30  # numbers of a mask that are below hide a key


@functools.cache
def _in_place_of_eager(plain: Attention) -> Attention:
    """Return an attention function that runs the kernel where a module's trial has found that `plain` does the same."""

    @functools.wraps(plain)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, Tensor | None]:
        step = current()
        seen = None
        sinks = given.get("s_aux")
        fits = (
            getattr(module, "_moepack_eager", False)
            and step is not None
            and not step.weighed
            and _fits(module, query, key, value, given)
            and query.dtype == torch.bfloat16
            and query.stride(3) == key.stride(3) == value.stride(3) == 1
            and given.get("scaling") is not None
            and not unknown_to_attention({**given, "scaling": None, "s_aux": None})
            and sinks is getattr(module, "sinks", None)  # with which the module was tried
            and not learns(sinks)
        )
        if fits and attention_mask is not None:
            seen = _seen(attention_mask, query, key)
        if not fits or (seen is None and (attention_mask is not None or query.shape[2] > 1)):
            return plain(module, query, key, value, attention_mask, **given)
        made = attend(query, key, value, given["scaling"], mask=seen, sinks=sinks)
        if step is not None and step.importance is not None:  # it ranks tokens by their keys
            step.importance.saw(module, query, numbers_of(key), attention_mask, given)
        return made, None

    return attention


def _seen(mask: Tensor, query: Tensor, key: Tensor, groups: int = 1) -> Tensor | None:
    """Return which keys tokens see by a mask of numbers to add; None if it says anything else.

    The mask is [batch, groups, tokens, length]: with several groups, of heads that share keys.
    """
    if mask.shape != (query.shape[0], groups, query.shape[2], key.shape[2]) or not mask.dtype.is_floating_point:
        return None
    seen = mask == 0
    return seen if bool((seen | (mask < MASKED)).all()) else None


def _agrees_with_eager(module: Any, plain: Attention) -> bool:
    """Whether a module's own attention function computes what the kernel does: of one token and of more, masked."""
    groups = int(module.num_key_value_groups)
    size = int(module.head_dim)
    generator = torch.Generator().manual_seed(0)
    sinks = getattr(module, "sinks", None)
    extra = {} if sinks is None else {"s_aux": sinks}
    heads = 2 * groups if sinks is None else len(sinks)
    for batch, tokens, length in ((1, 1, 40), (2, 3, 40), (1, 1, 1100)):
        held = (batch, heads // groups, length, size)
        shapes = ((batch, heads, tokens, size), held, held)
        query, key, value = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
        seen = torch.ones(tokens, length, dtype=torch.bool).tril_(length - tokens).repeat(batch, 1, 1, 1)
        seen[-1, :, :, :4] = False
        mask = torch.zeros(seen.shape, dtype=torch.bfloat16).masked_fill_(~seen, torch.finfo(torch.bfloat16).min)
        scaling = size**-0.5
        with torch.no_grad():
            wanted = plain(module, query, key, value, mask, scaling=scaling, dropout=0.0, **extra)[0]
            got = attend(query, key, value, scaling, mask=seen, sinks=sinks)
        if not near(got, wanted):
            return False
    return True


def _serve_eager(module: Any) -> None:
    """Mark a module whose own eager function the kernel may stand in for: tried with its sinks, if it has such."""
    names = inspect.unwrap(type(module).forward).__globals__
    plain = names.get(EAGER)
    try:
        ours = plain is not None and getattr(module.config, "_attn_implementation", None) == "eager"
        module._moepack_eager = ours and _agrees_with_eager(module, plain)
    except Exception:  # of any kind, from a family's code
        module._moepack_eager = False


@functools.cache
def _of_shared_keys(plain: Attention) -> Attention:
    """Return an attention function that does not copy keys for each head that shares them, in the place of "sdpa".

    It runs the kernel for one new token without a mask, or with one for each head by which heads that share keys see
    few of them, and the same. Several tokens with a mask attend by torch, the heads that share keys at a time.
    """

    @functools.wraps(plain)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not _fits(module, query, key, value, kwargs) or any(kwargs.get(name) is not None for name in SPECIAL):
            return plain(module, query, key, value, attention_mask, **kwargs)
        scaling = kwargs.get("scaling")
        shared = getattr(module, "num_key_value_groups", 1)
        if (read := keys_read(module, query, key.shape[2], attention_mask, kwargs)) < key.shape[2]:
            key = key[:, :, :read]
            value = value[:, :, :read]
        if query.shape[2] > 1 and shared > 1 and attention_mask is not None:
            numbers = numbers_of(key)
            made = attend_by_groups(query, numbers, numbers_of(value), attention_mask, scaling)
            observe_attention(module, query, numbers, attention_mask, kwargs)
            return made.transpose(1, 2).contiguous(), None
        if (
            query.shape[2] == 1
            and (attention_mask is None or attention_mask.shape[:2] == query.shape[:2])
            and query.dtype == torch.bfloat16
            and query.stride(3) == key.stride(3) == value.stride(3) == 1
        ):
            scale = query.shape[-1] ** -0.5 if scaling is None else scaling
            if attention_mask is None:
                return attend(query, key, value, scale), None
            few = _to_few(query, key, value, scale, attention_mask)
            if few is not None:
                return few, None
        return plain(module, query, key, value, attention_mask, **kwargs)

    return attention


def _to_few(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor) -> Tensor | None:
    """Return attention of one token by a mask for each head; None if heads that share keys see other ones, or many."""
    groups = key.shape[1]
    each = mask.unflatten(1, (groups, -1))
    seen = _seen(each[:, :, 0], query, key, groups)
    if type(key) is not Tensor or seen is None or not sees_few(seen) or not bool((each == each[:, :, :1]).all()):
        return None
    return over_seen(lambda asked, held: attend(asked[0], held[0], held[1], scale), (query,), (key, value), seen)


def with_attention(kind: Any, change: Callable[[Attention], Attention]) -> Callable[..., object]:
    """Return a class's forward, in which `change` has been given each attention function."""
    of = inspect.unwrap(kind.forward).__globals__[REGISTRY]
    return with_name(kind.forward, REGISTRY, _Registry(of, change))


@functools.cache
def _attention(kind: type[nn.Module]) -> type[nn.Module]:
    return in_place_of(kind, with_attention(kind, _served))


def serve_attention(model: nn.Module) -> dict[str, int]:
    """Let the kernel compute the attention of single new tokens; return the number of modules changed, by class."""
    done: dict[str, int] = {}
    for module in model.modules():
        kind: Any = type(module)
        if attends_by_name(module) and _reads(module, REGISTRY) is not None:
            module.__class__ = _attention(kind)
            _serve_eager(module)
            done[kind.__name__] = done.get(kind.__name__, 0) + 1
    return done
