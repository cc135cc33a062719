"""Linear attention by the gated delta rule and Mamba-2: a kernel call between projections, for tokens and for prompts.
Of Mamba's layers (Jamba) the kernel runs the scan alone.

Such a module projects its input, convolves queries, keys and values, moves its state on by each token, normalises and
gates the result, and multiplies it once more. transformers' own code does that by some thirty operations of torch, of
which five copy the state. A module is known by the names that its code reads, and it is tried: if its results or the
states that it leaves in a cache differ by more than rounding, it keeps its own code. The trial is of a prompt, of
single tokens and of a few after it, of one sequence without a mask and of two, one of which begins with padding.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers.cache_utils import Cache, DynamicCache

from moepack.families.arguments import CACHE_NAMES
from moepack.runtime.kernels import mamba_native
from moepack.runtime.kernels.delta_native import DeltaRule, DeltaSizes, DeltaWeights, Lies
from moepack.runtime.kernels.mamba_native import Mamba, MambaSizes, MambaWeights
from moepack.runtime.step.context import PackedCache

from .by_row import by_row, in_rows
from .linears import FamilyModule, Uncopied, in_place_of, is_observed, learns
from .norms import epsilon_of
from .projections import NUMBER, cache_argument
from .scans import has_scan
from .values import CLOSE, Trials

TOKENS = (5, 1, 3, 1)  # random tokens of a trial's passes, one after another
SCANNED = (5, 1, 1)  # likewise: transformers' scan of later tokens, if they are several, does not go on from its state
# What the code of all these modules reads, and what some read. A name beyond these may be a step that the kernel lacks.
ALL = """apply_mask_to_padding_states causal_conv1d_fn causal_conv1d_update conv1d conv_kernel_size get_conv_state
    get_recurrent_state layer_idx update_conv_state update_recurrent_state"""
SOME = """A_log D F activation b_proj bias cat chunk_kimi_delta_attention contiguous dt_bias exp
    fix_query_key_value_ordering float float32 forget_gate g_a_proj g_b_proj g_proj head_dim head_k_dim head_v_dim
    in_proj_a in_proj_b in_proj_ba in_proj_qkv in_proj_qkvz in_proj_z is_recording_past k_proj key_dim norm o_norm
    o_proj out_proj pop q_proj qkv_dim recurrent_kimi_delta_attention reshape shape sigmoid softplus split squeeze
    to torch torch_chunk_gated_delta_rule torch_recurrent_gated_delta_rule transpose update v_proj value_dim
    view weight
    chunk_size conv_dim dtype expand in_proj intermediate_size mamba2_chunk_scan mamba2_selective_state_update
    mamba2_split_conv1d_scan_combined n_groups num_heads ssm_state_size time_step_limit training variance_epsilon"""
NEEDED = frozenset(ALL.split())
KNOWN = NEEDED.union(SOME.split())
States = tuple[Sequence[int], Sequence[Tensor], Sequence[Tensor]]  # first tokens, windows and states of sequences
# A kernel by a layer's sizes, places and weights; and a class whose modules run it, by the argument that is a cache
Rule = Callable[[DeltaSizes, Sequence[Lies], DeltaWeights], Any]
Served = Callable[[Any, str], Any]


@dataclass(slots=True, eq=False)
class LinearPlace(Uncopied):
    """A module's rule, and the names of the modules that make what it reads."""

    rule: DeltaRule | Mamba  # of a GPU: a GpuDelta (gpu_linear_attention.py)
    maps: tuple[str, ...]  # each of projections by its maps, one after another: "g_a_proj g_b_proj"
    decays: str | None  # a module that computes decays' logarithms
    last: str  # the last product
    read: tuple[tuple[str, str], ...]  # modules and parameters whose values the rule has
    states_of: tuple[tuple[int, Tensor | None], ...]  # each one's address, and its values if the rule has copies
    own_first: bool = False  # whether the module's own code runs a sequence that begins with a single token

    def holds(self, module: nn.Module) -> bool:
        """Whether what the rule has of a module is as it was: at its address, frozen, without hooks."""
        if _has_any_global_hook():
            return False
        for (owner, name), (address, copied) in zip(self.read, self.states_of, strict=True):
            m = module._modules[owner] if owner else module
            weight = None if m is None else m._parameters.get(name)
            if m is None or weight is None or weight.data_ptr() != address or learns(weight):
                return False
            if copied is not None and not torch.equal(weight, copied):
                return False
            if owner and is_observed(m):
                return False
        return True

    def project(self, module: FamilyModule, x: Tensor) -> tuple[list[Tensor], Tensor | None]:
        """Return a module's projections of x, and its decays' logarithms if it computes them by itself."""
        made = []
        for names in self.maps:
            y = x
            for name in names.split():
                y = module._modules[name](y)
            made.append(y)
        return made, None if self.decays is None else module._modules[self.decays](x).float().contiguous()

    def states(self, cache: Any, number: int, batch: int, tokens: int) -> list[States] | None:
        """Return a cache's states of layer `number` for each call; None if the cache keeps them in another way."""
        if not isinstance(cache, PackedCache):
            held = self._held(cache, number, batch, tokens)
            return None if held is None else [(range(0, batch * tokens + 1, tokens), (held[0],), (held[1],))]
        made: list[States] = []
        for rows in cache.by_row(number, torch.device("cpu")):
            first = [rows[0][0].start]
            windows = []
            states = []
            for span, row in rows:
                held = self._held(row, number, 1, span.stop - span.start)
                if held is None:
                    return None
                first.append(span.stop)
                windows.append(held[0])
                states.append(held[1])
            made.append((first, windows, states))
        return made

    def run(self, projections: Sequence[Tensor], logs: Tensor | None, states: States, live: Tensor | None) -> Tensor:
        """Run the rule for the tokens of these states' sequences: of all, or of a pass [1, tokens]."""
        first, windows, held = states
        start = first[0]
        if start or first[-1] < projections[0].shape[:-1].numel():
            projections = [p[:, start : first[-1]] for p in projections]
            logs = None if logs is None else logs[:, start : first[-1]]
            first = [n - start for n in first]
        if isinstance(self.rule, Mamba):
            return self.rule.run(projections[0], first, windows, held, live)
        return self.rule.run(projections, first, windows, held, logs)

    def _held(self, cache: Any, number: int, batch: int, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Return a cache's windows and states of a layer, made if it has none yet; None for the module's own code."""
        sizes = self.rule.sizes
        window = torch.zeros((), dtype=torch.bfloat16).expand(batch, *sizes.window)
        state = torch.zeros(()).expand(batch, *sizes.state)
        own = self.own_first and tokens == 1
        if cache is None:
            return None if own else (window.contiguous(), state.contiguous())
        if not isinstance(cache, Cache) or cache.is_recording_past(number) or cache.offloading:
            return None
        if cache.get_conv_state(number, state_idx=0) is None:
            if own:
                return None
            cache.update_conv_state(window, number, conv_kernel_size=sizes.width)
            cache.update_recurrent_state(state, number)
        windows = cache.get_conv_state(number, state_idx=0)
        states = cache.get_recurrent_state(number, state_idx=0)
        if windows is None or states is None or not (alike(windows, window) and alike(states, state)):
            return None
        return windows, states


def alike(held: Tensor, like: Tensor) -> bool:
    """Whether a cache's tensor is one that the kernel changes in place."""
    return held.shape == like.shape and held.dtype == like.dtype and held.is_contiguous()


def serve_linear_attention(model: nn.Module) -> dict[str, int]:
    """Replace the modules of linear attention that the kernel reproduces; return how many were changed, by class."""
    return replace_linear_attention(model, place_of, _served, torch.bfloat16)


def replace_linear_attention(
    model: nn.Module,
    place: Callable[[FamilyModule, bool], LinearPlace | None],
    served: Served,
    dtype: torch.dtype | None,
) -> dict[str, int]:
    """Replace the modules of linear attention that kernels reproduce; return how many were changed, by class.

    Args:
        model: whose modules are tried.
        place: returns what kernels read of a module, by whether its gate is a sigmoid; None where they do not fit.
        served: makes a class whose modules run the kernels.
        dtype: of a trial; None for each module's own.
    """
    trials = Trials[bool]()
    for module in model.modules():
        kind: Any = type(module)
        cache = cache_argument(module, NEEDED, KNOWN)
        if cache is None:
            continue
        # KNOWN names let the code use the layer's number for nothing but to find its layer of the cache
        trial = functools.partial(_sigmoid_of, module, place, served, dtype, cache, model.config)
        sigmoid = trials.result(module, trial, without=NUMBER)
        found = None if sigmoid is None else place(module, sigmoid)
        if trials.count(module, found is not None):
            module._moepack_linear = found  # type: ignore[assignment]
            module.__class__ = served(kind, cache)
    return trials.done()


def _sigmoid_of(
    module: FamilyModule,
    place: Callable[[FamilyModule, bool], LinearPlace | None],
    served: Served,
    dtype: torch.dtype | None,
    cache: str,
    config: Any,
) -> bool | None:
    """Return whether a module's gate is a sigmoid; None if its own results differ either way."""
    given = dtype or module.conv1d.weight.dtype
    for sigmoid in (False, True):
        if _agrees(module, place(module, sigmoid), served, given, cache, config):
            return sigmoid
    return None


def serve_scans(model: nn.Module) -> dict[str, int]:
    """Let Mamba's layers run the scan that the kernel reproduces; return how many were changed, by class."""
    trials = Trials[bool]()
    for module in model.modules():
        kind: Any = type(module)
        if not has_scan(kind) or "forward" in module.__dict__:
            continue
        cache = next((name for name in CACHE_NAMES if name in inspect.signature(kind.forward).parameters), "")
        trial = functools.partial(_scans_alike, module, cache, model.config)
        if trials.count(module, trials.result(module, trial, without=NUMBER) is not None):
            module._moepack_scan = mamba_native.scan  # type: ignore[assignment]
            module.__class__ = in_rows(kind)
    return trials.done()


def _scans_alike(module: FamilyModule, cache_name: str, config: Any) -> bool | None:
    """Return true if a module's results and states are those that the kernel's scan leads to, else None."""
    kind: Any = type(module)
    runs = kind.forward, in_rows(kind).forward
    module._moepack_scan = mamba_native.scan
    try:
        agree = _run_alike(module, runs, module.conv1d.weight.dtype, SCANNED, cache_name, config)
        return True if agree else None
    finally:
        del module._moepack_scan


def place_of(module: FamilyModule, sigmoid: bool, rule: Rule = DeltaRule) -> LinearPlace | None:
    """Return what a module's rule reads; None for a module that the kernel does not fit."""
    has = module._modules.keys()
    try:
        if "forget_gate" in has:
            return _with_own_decays(module, sigmoid, rule)
        if "in_proj" in has:
            return None if sigmoid or rule is not DeltaRule else _mamba(module)
        r = module.num_v_heads // module.num_k_heads
        sizes = DeltaSizes(module.num_k_heads, r, module.head_k_dim, module.head_v_dim, module.conv_kernel_size)
        k = sizes.k_dim
        v = r * sizes.v_dim
        if "in_proj_qkvz" in has:  # by heads of keys: its query, its key, its values, their gates
            maps: tuple[str, ...] = ("in_proj_qkvz", "in_proj_ba")
            each = 2 * (k + v)
            places = [Lies(0, at, each) for at in (0, k, 2 * k, 2 * k + v)]
            places += [Lies(1, 0, 2 * r), Lies(1, r, 2 * r)]
        else:
            maps = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
            keys = sizes.keys * k
            places = [
                Lies(0, 0, k),
                Lies(0, keys, k),
                Lies(0, 2 * keys, v),
                Lies(1, 0, v),
                Lies(2, 0, r),
                Lies(3, 0, r),
            ]
        own = {"scale": module.A_log.detach().float().exp(), "bias": module.dt_bias.detach().float().clone()}
        return _made(module, rule, sizes, places, maps, ("norm", "out_proj", None), sigmoid, own)
    except (AttributeError, KeyError, TypeError, ValueError):
        return None


def _with_own_decays(module: FamilyModule, sigmoid: bool, rule: Rule) -> LinearPlace:
    """Return the place of a module with one head of values for one of keys, which computes decays of a state's rows."""
    dim = module.head_dim
    sizes = DeltaSizes(module.num_heads, 1, dim, dim, module.conv_kernel_size)
    gate = "g_proj" if "g_proj" in module._modules else "g_a_proj g_b_proj"
    places = [*(Lies(i, 0, dim) for i in range(4)), Lies(4, 0, 1)]
    maps = ("q_proj", "k_proj", "v_proj", gate, "b_proj")
    return _made(module, rule, sizes, places, maps, ("o_norm", "o_proj", "forget_gate"), sigmoid, {})


def _made(
    module: FamilyModule,
    rule: Rule,
    sizes: DeltaSizes,
    places: Sequence[Lies],
    maps: tuple[str, ...],
    names: tuple[str, str, str | None],
    sigmoid: bool,
    own: Mapping[str, Tensor],
) -> LinearPlace:
    norm, last, decays = names
    inner = module._modules[norm]
    epsilon = epsilon_of(inner)
    filters = module.conv1d.weight.detach()
    if epsilon is None or module.conv1d.bias is not None:
        raise ValueError("the kernel does not fit")
    weights = DeltaWeights(filters.flatten(1), inner.weight.detach(), epsilon, sigmoid, **own)
    read = (("conv1d", "weight"), (norm, "weight"), *((("", "A_log"), ("", "dt_bias")) if own else ()))
    for name in (*" ".join(maps).split(), last, *((decays,) if decays else ())):
        module._modules[name]
    return LinearPlace(rule(sizes, places, weights), maps, decays, last, read, _states(module, read))


def _mamba(module: FamilyModule) -> LinearPlace:
    """Return the place of a module of Mamba-2."""
    norm = module._modules["norm"]
    sizes = MambaSizes(
        module.num_heads,
        module.head_dim,
        module.ssm_state_size,
        module.n_groups,
        module.conv_kernel_size,
        module.intermediate_size // norm.group_size,
    )
    epsilon = epsilon_of(norm)
    filters = module.conv1d.weight.detach()
    bias = module.conv1d.bias
    least, most = module.time_step_limit
    if epsilon is None or filters.device.type != "cpu":
        raise ValueError("the kernel does not fit")
    weights = MambaWeights(
        filters.flatten(1),
        None if bias is None else bias.detach(),
        norm.weight.detach(),
        epsilon,
        scale=module.A_log.detach().float().exp(),
        bias=module.dt_bias.detach().float().clone(),
        limits=(least, most),
        skip=module.D.detach().float().clone(),
    )
    read = [("conv1d", "weight"), ("norm", "weight"), ("", "A_log"), ("", "dt_bias"), ("", "D")]
    if bias is not None:
        read.append(("conv1d", "bias"))
    at = _states(module, read)
    return LinearPlace(
        Mamba(sizes, weights), ("in_proj",), None, "out_proj", tuple(read), at, (least, most) != (0, math.inf)
    )


def _states(module: FamilyModule, read: Sequence[tuple[str, str]]) -> tuple[tuple[int, Tensor | None], ...]:
    """Return the address of each weight, and the values of a module's own, of which rules have copies."""
    out: list[tuple[int, Tensor | None]] = []
    for owner, name in read:
        weight = getattr(getattr(module, owner) if owner else module, name)
        out.append((weight.data_ptr(), None if owner else weight.detach().clone()))
    return tuple(out)


@functools.cache
def _served(kind: type[nn.Module], cache_name: str) -> type[nn.Module]:
    """Make a subclass of `kind` that runs the kernel when its arguments allow it."""
    plain = by_row(kind.forward)
    older = {*CACHE_NAMES} - {cache_name}  # names of the cache that a decorator of `plain` may translate

    @functools.wraps(kind.forward)
    def forward(self: FamilyModule, *args: object, **kwargs: Any) -> object:
        x, *more = args or (kwargs.get("hidden_states"),)
        place: LinearPlace | None = self._moepack_linear
        if more or place is None or torch.compiler.is_compiling() or not older.isdisjoint(kwargs):
            return plain(self, *args, **kwargs)
        if not _fits(x) or not place.holds(self):
            return plain(self, *args, **kwargs)
        mask = kwargs.get("attention_mask")
        given = x if mask is None else (x * mask[:, :, None]).to(x.dtype)
        projections, logs = place.project(self, given)
        if any(p.dtype != torch.bfloat16 or learns(p) for p in projections) or (logs is not None and learns(logs)):
            return plain(self, *args, **kwargs)
        batch, tokens, _ = x.shape
        cache = kwargs.get(cache_name)
        states = place.states(cache, self.layer_idx, batch, tokens)
        if states is None:
            return plain(self, *args, **kwargs)
        projections = [p.contiguous() for p in projections]
        live = None if mask is None else mask.bool().contiguous()
        parts = []
        for number, held in enumerate(states):
            parts.append(place.run(projections, logs, held, live))
            if isinstance(cache, PackedCache):
                cache.ran(self.layer_idx, number)
        made = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._modules[place.last](made.view(batch, tokens, -1))

    return in_place_of(kind, forward)


def _fits(x: object) -> TypeGuard[Tensor]:
    """Whether the kernel takes a pass's input."""
    return (
        isinstance(x, Tensor)
        and x.dtype == torch.bfloat16
        and x.dim() == 3
        and x.numel() > 0
        and x.device.type == "cpu"
        and not learns(x)
    )


def _agrees(
    module: FamilyModule,
    place: LinearPlace | None,
    served: Served,
    dtype: torch.dtype,
    cache_name: str,
    config: Any,
) -> bool:
    """Whether a module's own results, and the states that it keeps, are those of `place`."""
    if place is None:
        return False
    kind: Any = type(module)
    module._moepack_linear = place
    try:
        runs = kind.forward, served(kind, cache_name).forward
        return _run_alike(module, runs, dtype, TOKENS, cache_name, config)
    except Exception:  # of any kind, from a family's code
        return False
    finally:
        del module._moepack_linear


def _run_alike(
    module: FamilyModule,
    runs: Sequence[Callable[..., Tensor]],
    dtype: torch.dtype,
    lengths: Sequence[int],
    cache_name: str,
    config: Any,
) -> bool:
    """Whether two forwards of a module agree in passes of these lengths, of one sequence and of two."""
    generator = torch.Generator().manual_seed(0)
    for batch in (1, 2):
        x = torch.randn(batch, sum(lengths), module.hidden_size, generator=generator).to(
            module.conv1d.weight.device, dtype
        )
        wanted, got = (_passes(module, run, x, lengths, DynamicCache(config=config), cache_name) for run in runs)
        if not all(map(_near, wanted, got)):
            return False
    return True


def _passes(
    module: FamilyModule,
    run: Callable[..., Tensor],
    x: Tensor,
    lengths: Sequence[int],
    cache: Cache,
    cache_name: str,
) -> list[Tensor]:
    """Return what a module's passes make of `x`, and the states that the cache then holds.

    The second sequence of two begins with a token of padding.
    """
    out = []
    start = 0
    for tokens in lengths:
        mask = None
        if len(x) > 1 and not start:
            mask = torch.ones(len(x), tokens, dtype=torch.bool, device=x.device)
            mask[1, 0] = False
        given = {"hidden_states": x[:, start : start + tokens].contiguous(), "attention_mask": mask, cache_name: cache}
        with torch.no_grad():
            out.append(run(module, **given))
        start += tokens
    layer = cache.layers[module.layer_idx]
    return [*out, layer.conv_states[0], layer.recurrent_states[0]]


def _near(wanted: Tensor, got: Tensor) -> bool:
    """Whether results agree but for rounding; where all are zero, as of weights of zeros, any code would agree.

    The model's own code rounds to BF16 at every step, so some numbers of many differ by more than CLOSE.
    """
    apart = (wanted - got).float()
    same = wanted.shape == got.shape and wanted.dtype == got.dtype
    within = apart.norm() <= CLOSE * wanted.float().norm() and apart.abs().max() <= 4 * CLOSE * wanted.abs().max()
    return same and bool(within) and bool(wanted.any())
