"""Decoder layers of a served model on a CPU by one call a token, from the first norm to the last addition.

Between a layer's kernels Python and torch take as long as half of the kernels do: 1.4 ms a layer of Qwen3-30B-A3B on a
Zen 3, where weights that stream through its caches leave no code there. A layer is replaced if a trial with stand-ins
for its parts shows that it does h = x + attention(norm(x)) and h + mlp(norm(h)), and nothing else: experts or a dense
MLP. Where attention is more than projections.py knows, or the cache has no rows to append to, its own code runs and one
call follows. Where the experts' block is more than a router and experts, the call ends before it. Results have the bits
of the parts.

After streamed weights Python's own code is cold, and a layer's checks take 0.2 to 0.3 ms of it, beside 1 ms of kernels.
So one call runs all layers that followed one another in an earlier pass, for one token of each sequence, with the
arguments of the first. The model then calls each of them as ever; a layer hands out what is made if it is given the
very objects that were foreseen, unchanged as far as torch counts changes, and computes if not. Modules are checked
before the first call: what code between two layers of a pass does to the modules behind it counts from the next pass
on, unless it is a layer's hook. A layer of linear attention changes its states when it runs. So its call is made ready
with the others, and run when the model calls the layer, with those behind it up to the next such layer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers.cache_utils import DynamicCache

from moepack.families.arguments import CACHE_NAMES
from moepack.runtime.experts.cpu import FEW, in_one_call
from moepack.runtime.experts.forward import count
from moepack.runtime.experts.handles import LayerExperts, Snapshot, seen
from moepack.runtime.kernels.delta_native import DeltaRule
from moepack.runtime.kernels.dense_native import PLAIN_FORM, KernelMatrix, MatrixGroup
from moepack.runtime.kernels.token_native import (
    Block,
    DecoderLayer,
    ExpertsBlock,
    LinearProjection,
    Ready,
    SharedExpert,
    run_layers,
)
from moepack.runtime.kv.growing import GrowingLayer, keep, takes_token, with_room
from moepack.runtime.policies.placements import Where
from moepack.runtime.step.context import PackedCache, Step, step_of

from .borrowed import NativeRouter, attends_alone
from .layer_structure import MIXERS, SHARED_GATE, Structure, named_arguments, structure_of
from .linear_attention import LinearPlace
from .linears import FamilyModule, Uncopied, in_place_of
from .norms import described
from .packed import matrices_of
from .projections import CpuProjections
from .values import Trials, near
from .watched import Watched, listens

MASK = "attention_mask"
NORMS = ("input_layernorm", "post_attention_layernorm")
PROBES = 16  # random rows on which a shared expert is tried
APART = 256  # passes in which a layer is not run ahead after one in which that was in vain
ROWS = 16  # results for which memory is taken at once
EQUAL = 0.98  # share of a row's results that have the same bits
# What a layer names of what it is given; one that names more may do more than a trial sees
ARGUMENTS = {"hidden_states", MASK, "position_ids", "position_embeddings", "use_cache", *CACHE_NAMES}
FREE = {"position_ids", "position_embeddings", "use_cache"}  # of these what a layer may leave to itself


@dataclass(eq=False)
class _Place(Uncopied):
    """What the kernels read of one layer, and what they make of it."""

    structure: Structure
    attention: FamilyModule
    mlp: FamilyModule
    cache_name: str
    own: frozenset[str]  # arguments that the layer does not hand on
    whole: DecoderLayer | None  # with attention
    linear: bool  # whether it attends linearly: its states change when it runs, so it is made ready, and not run ahead
    most: int  # tokens of its calls
    rest: DecoderLayer  # after attention
    experts: FamilyModule | None  # the layer's own, or of a layer without experts those of another
    router: NativeRouter | None
    shared: SharedExpert | None  # beside experts, or all of a layer's MLP
    parts: Watched
    # By the number of tokens and threads and the experts' own gate, for the last snapshot of the layer's experts
    made: dict[Hashable, tuple[weakref.ref[Snapshot], ExpertsBlock | None]] = field(default_factory=dict)
    # The layer that took this one's result as it is in an earlier pass, and for how many passes it is not run ahead
    follower: weakref.ref[FamilyModule] | None = None
    apart: int = 0

    def step(self) -> Step | None:
        """Return the running step, if nothing in it stands between a layer's parts."""
        experts: LayerExperts | None = None if self.experts is None else getattr(self.experts, "_moepack", None)
        step = None if experts is None else step_of(experts.model)
        if step is None:
            return None
        between = step.loader is not None or step.importance is not None or step.logits is not None
        return None if between or step.weighed or is_in_torch_dispatch_mode() else step

    def block(self, tokens: int, step: Step) -> tuple[Block, int] | None:
        """Return the step's experts, or a dense MLP, if the kernels compute what the layer's code would.

        With experts comes the layer's position among those that have some.
        """
        assert self.experts is not None
        position: int = self.experts._moepack.position
        if self.router is None:
            return None if self.shared is None or tokens > self.shared.most else (self.shared, position)
        snapshot = seen(step)[position]
        key = tokens, torch.get_num_threads(), vars(self.experts).get("_apply_gate")
        made = self.made.get(key)
        if made is None or made[0]() is not snapshot:
            made = self.made[key] = weakref.ref(snapshot), self._block(snapshot, tokens)
        block = made[1]
        return None if block is None else (block, position)

    def handed_on(self, given: dict[str, Any]) -> dict[str, Any] | None:
        """Return what attention is given of a layer's arguments; None if the others mean something to the layer."""
        if any(value is inspect.Parameter.empty for value in given.values()):
            return None
        out = dict(given)
        for name in self.own:
            if out.pop(name) is not None and name not in FREE:
                return None
        return out

    def _block(self, snapshot: Snapshot, tokens: int) -> ExpertsBlock | None:
        assert self.experts is not None
        of = snapshot.of
        if of.backend != "native" or (of.tier is not None and Where.HOST in snapshot.places):
            return None
        found = in_one_call(of, self.experts, tokens)
        router = self.router
        assert router is not None and self.structure.router is not None
        most = router.most if self.shared is None else min(router.most, self.shared.most)
        if found is None or tokens > most or router.choices.experts != len(snapshot.table):
            return None
        bias = router.router.bias(self.mlp._modules[self.structure.router])
        return ExpertsBlock(
            router.matrix, router.choices, found[0], snapshot.table, found[1], tokens, bias, self.shared
        )


def serve_layers(model: nn.Module) -> dict[str, int]:
    """Let one call run the decoder layers that are known by trial; return the number of layers changed, by class.

    The model's linear maps, norms, routers and attention are served already.
    """
    trials = Trials[Structure]()
    shared = Trials[bool]()
    anywhere = next((m for name, m in model.named_modules() if name.endswith(".mlp.experts")), None)
    for module in model.modules():
        kind: Any = type(module)
        inside = {name for name, part in module._modules.items() if part is not None} - {*NORMS, "mlp"}
        known = len(inside) == 1 and inside <= {*MIXERS} and not module._parameters and not module._buffers
        if not known or "forward" in module.__dict__:
            continue
        named = named_arguments(kind.forward)
        cache = next((n for n in CACHE_NAMES if n in named), None)
        if cache is None or "hidden_states" not in named or not named.keys() <= ARGUMENTS:
            continue
        structure = trials.result(module, functools.partial(structure_of, module, cache))
        place = None
        if structure is not None:
            with contextlib.suppress(Exception):  # of any kind, from a family's code
                own = frozenset(named.keys() - structure.given - {"hidden_states"})
                place = _place(module, structure, cache, own, shared, anywhere)
        if trials.count(module, place is not None):
            module._moepack_layer = place  # type: ignore[assignment]
            module.__class__ = _served(kind, cache)
    return trials.done()


def _place(
    module: FamilyModule,
    structure: Structure,
    cache_name: str,
    own: frozenset[str],
    trials: Trials[bool],
    anywhere: nn.Module | None,
) -> _Place | None:
    """Return what the kernels read of a layer; None if a norm is not theirs.

    `anywhere`: experts of any layer, by which one without experts finds the running step.
    """
    before = described(module.input_layernorm)
    after = described(module.post_attention_layernorm)
    if before is None or after is None:
        return None
    mixer = module._modules[structure.mixer]
    mlp = module.mlp
    projections: CpuProjections | None = getattr(mixer, "_moepack_projection", None)
    last = matrices_of(mixer, "o_proj")
    whole = None
    most = 0
    linear: LinearPlace | None = getattr(mixer, "_moepack_linear", None)
    if linear is not None and isinstance(linear.rule, DeltaRule) and linear.decays is None:
        of = matrices_of(mixer, *linear.maps)  # None where a projection takes two maps
        last = matrices_of(mixer, linear.last)
        if of is not None and last is not None:
            most = min(FEW, *of.limits[torch.bfloat16], *last.limits[torch.bfloat16])
            whole = DecoderLayer(before, after, LinearProjection(of, linear.rule), last)
    elif projections is not None and last is not None:
        most = min(projections.most, *last.limits[torch.bfloat16])
        whole = DecoderLayer(before, after, projections.projection, last, mixer.scaling)
    router = getattr(mlp._modules.get(structure.router or ""), "_moepack_router", None)
    experts = mlp._modules.get("experts") if router is not None else anywhere
    shared = None
    if structure.router is None:
        shared = _shared(module, "mlp", trials)
    elif structure.shared is not None and router is not None:
        shared = _shared(mlp, structure.shared, trials)
        router = None if shared is None else router
    if router is None and structure.router is not None:
        experts = None
    parts = Watched(module, (*NORMS, structure.mixer, "mlp"))
    rest = DecoderLayer(before, after)
    attends_linearly = whole is not None and linear is not None
    return _Place(
        structure, mixer, mlp, cache_name, own, whole, attends_linearly, most, rest, experts, router, shared, parts
    )


def _shared(mlp: FamilyModule, name: str, trials: Trials[bool]) -> SharedExpert | None:
    """Return a block's shared expert as the kernels read it, if they make its results; else None."""
    expert = mlp._modules[name]
    up = matrices_of(expert, "gate_proj", "up_proj")
    down = matrices_of(expert, "down_proj")
    gate = mlp._modules.get(SHARED_GATE)
    weight = None
    if up is None or down is None or up.matrices[0].rows != down.cols:
        return None
    if gate is not None:
        if type(gate) is not nn.Linear or gate.bias is not None or gate.weight.dtype != torch.bfloat16:
            return None
        weight = MatrixGroup([KernelMatrix(PLAIN_FORM, *gate.weight.shape, gate.weight.detach())])
    agrees = trials.result(expert, functools.partial(_makes, SharedExpert(up, down), expert))
    return SharedExpert(up, down, weight) if agrees else None


def _makes(made: SharedExpert, expert: nn.Module) -> bool:
    """Whether nearly all of a shared expert's results have the module's bits, for rows of all sizes."""
    x = torch.randn(PROBES, made.up.cols, generator=torch.Generator().manual_seed(0))
    x = (x * torch.logspace(-3, 3, PROBES)[:, None]).bfloat16()
    with torch.no_grad():
        pairs = [(made.run(row), expert(row)) for row in x.split(1)]
    close = all(near(got, wanted) for got, wanted in pairs)
    return close and all(float((got == wanted).float().mean()) >= EQUAL and bool(wanted.any()) for got, wanted in pairs)


@functools.cache
def _served(kind: type[nn.Module], cache_name: str) -> type[nn.Module]:
    """Make a subclass of `kind` that runs by one call, or by its attention and one call, when arguments allow it."""
    plain = kind.forward
    named = named_arguments(plain)
    older = {*CACHE_NAMES} - {cache_name}  # names of the cache that a decorator of `plain` may translate

    @functools.wraps(plain)
    def forward(self: FamilyModule, *args: Any, **kwargs: Any) -> object:
        place: _Place | None = self._moepack_layer
        if place is None or len(args) > 1 or torch.compiler.is_compiling() or not older.isdisjoint(kwargs):
            return plain(self, *args, **kwargs)
        given = {**named, **kwargs}
        x = args[0] if args else given["hidden_states"]
        del given["hidden_states"]
        step = place.step()
        fits = _fits(x)
        if step is not None and fits and (known := _Line.of(step).take(place, x, given, step)) is not None:
            return known.handed_out(step)
        handed = place.handed_on(given) if fits and place.parts.unchanged(self) else None
        if handed is None:
            return plain(self, *args, **kwargs)
        if step is not None and x.shape[1] == 1 and (made := _whole(place, x, handed, step, _room(x)[0])) is not None:
            _Line.of(step).run(self, place, x, made, given, step)
            return made.handed_out(step)
        found = None if step is None else place.block(x.numel() // x.shape[-1], step)
        attended = place.attention(hidden_states=self.input_layernorm(x), **handed)
        if isinstance(attended, tuple):
            attended = attended[0]
        if attended.shape != x.shape or attended.dtype != x.dtype:  # as no trial showed: the layer's code adds it
            h = x + attended
            normed = self.post_attention_layernorm(h)
        elif found is not None and step is not None:
            block, position = found
            ready = place.rest.goes_on(x, attended.contiguous(), block, torch.empty_like(x))
            run_layers([ready])
            return _Made(ready, position).handed_out(step)
        else:
            h, normed = place.rest.up_to_experts(x, attended.contiguous())
        moved = self.mlp(normed)
        return h + (moved[0] if isinstance(moved, tuple) else moved)

    return in_place_of(kind, forward)


@dataclass(frozen=True, slots=True)
class _Made:
    """A layer's result, and what changes once the model has it.

    Attributes:
        ready: the result, and its experts.
        position: of the layer among those with experts.
        row: of the cache, for the token. None: attention's own code wrote it.
    """

    ready: Ready
    position: int
    row: _Row | None = None

    def handed_out(self, step: Step) -> Tensor:
        """Return the result; count its routing, and keep its keys and values."""
        if self.row is not None:
            self.row.keep()
        if self.ready.choice is not None:
            count(step, self.position, *self.ready.choice)
        return self.ready.out


@dataclass(frozen=True, slots=True)
class _Foreseen:
    """A layer's call that was made ready, or also run, before the model called the layer."""

    made: _Made
    before: _Place  # of the layer whose result is this one's input
    x: Tensor
    tensors: tuple[tuple[Tensor, tuple[int, int]], ...]  # x and angles, and the mark of each
    given: dict[str, Any]

    def is_for(self, place: _Place, x: object, given: dict[str, Any], step: Step) -> bool:
        """Whether a layer is called with what was foreseen, and with no mask that hides anything."""
        if x is not self.x or given.keys() != self.given.keys():
            return False
        if any(value is not self.given[name] for name, value in given.items() if name != MASK):
            return False
        row = self.made.row
        if row is None or not row.is_next() or any(_mark(t) != mark for t, mark in self.tensors):
            return False
        mask = given.get(MASK)
        return mask is None if place.linear else _sees_all(place, mask, len(self.x), row.keys.shape[2], step)


def _mark(x: Tensor) -> tuple[int, int]:
    """How often a tensor was changed in place (in inference mode torch does not count), and where its memory is."""
    return 0 if x.is_inference() else x._version, x.data_ptr()


class _Line:
    """What layers leave in a step for those behind them."""

    def __init__(self) -> None:
        self.foreseen: dict[_Place, _Foreseen] = {}
        self.ran = 0  # how many of these are run
        self.last: tuple[_Place, Tensor] | None = None  # the last layer that a call ran whole, and its result

    @staticmethod
    def of(step: Step) -> _Line:
        """Return a step's own."""
        if not isinstance(step.line, _Line):
            step.line = _Line()
        return step.line

    def take(self, place: _Place, x: object, given: dict[str, Any], step: Step) -> _Made | None:
        """Return what was made for a layer, if it was made for this call."""
        found = self.foreseen.get(place)
        if found is None or found is not next(iter(self.foreseen.values())) or not found.is_for(place, x, given, step):
            self.ended()
            return None
        del self.foreseen[place]
        if not self.ran:
            self._run([found.made.ready])
        else:
            self.ran -= 1
        return found.made

    def _run(self, calls: list[Ready]) -> None:
        """Run a call, and with it what is foreseen behind it, up to a layer that changes states."""
        for behind, foreseen in self.foreseen.items():
            if behind.linear:
                break
            calls.append(foreseen.made.ready)
        run_layers(calls)
        self.ran = len(calls) - 1

    def ended(self) -> None:
        """Forget what no layer took, and do not run the first of those layers ahead for a while."""
        for left in self.foreseen.values():
            left.before.apart = APART
            break
        self.foreseen.clear()
        self.ran = 0

    def run(
        self, module: FamilyModule, place: _Place, x: Tensor, made: _Made, given: dict[str, Any], step: Step
    ) -> None:
        """Run a layer's call, and with it those of the layers behind it as the model will ask for them."""
        if self.last is not None and self.last[1] is x:
            self.last[0].follower = weakref.ref(module)
        before = made.ready.out
        foreseen: dict[_Place, _Foreseen] = {}
        known = {place}
        seen = {**given, MASK: None} if MASK in given else given  # layers with a window have a mask of their own
        turn = given.get("position_embeddings")
        angles = [t for t in (turn if isinstance(turn, tuple) else (turn,)) if isinstance(t, Tensor)]
        room = None
        while (after := _follower(module, place)) is not None and after[1] not in known:
            behind = after[1]
            handed = behind.handed_on(seen) if behind.parts.unchanged(after[0]) else None
            if handed is None:
                break
            number = len(foreseen) % ROWS
            if room is None or not number:
                room = _room(x, ROWS)
            next_made = _whole(behind, before, handed, step, room[number], ahead=True)
            if next_made is None:
                break
            tensors = tuple((t, _mark(t)) for t in (before, *angles))
            foreseen[behind] = _Foreseen(next_made, place, before, tensors, given)
            before = next_made.ready.out
            known.add(behind)
            module, place = after
        self.foreseen = foreseen
        self._run([made.ready])
        self.last = place, before


def _follower(module: FamilyModule, place: _Place) -> tuple[FamilyModule, _Place] | None:
    """Return the layer that took a layer's result as it is in an earlier pass, if nobody listens between them."""
    if place.apart > 0:
        place.apart -= 1
        return None
    behind = None if place.follower is None else place.follower()
    found: _Place | None = None if behind is None else vars(behind).get("_moepack_layer")
    if behind is None or found is None or "forward" in vars(behind) or found.whole is None:
        return None
    listened = listens(module._forward_hooks) or listens(behind._forward_pre_hooks)
    return None if listened else (behind, found)


def _room(x: Tensor, results: int = 1) -> Tensor:
    """Return memory for results like x, [results, ...], which counts how often it is changed: torch's `_version`."""
    with torch.inference_mode(False):
        return torch.empty(results, *x.shape, dtype=x.dtype)


def _whole(
    place: _Place, x: Tensor, handed: dict[str, Any], step: Step, out: Tensor, ahead: bool = False
) -> _Made | None:
    """Return the call of all of a layer, to be run; None if its parts run one by one.

    `ahead`: of the layers before it, whose caches have not let go what they copy: it may copy none.
    """
    if place.whole is None:
        return None
    found = place.block(x.numel() // x.shape[-1], step)
    if place.linear:
        return None if found is None else _linear(place, x, handed, *found, out, ahead)
    row = None if found is None else _row(handed, place, x, step, ahead)
    if found is None or row is None:
        return None
    block, position = found
    sinks = place.attention._parameters.get("sinks")
    ready = place.whole.attends(x, handed.get("position_embeddings"), row.keys, row.values, block, sinks, out)
    return _Made(ready, position, row)


def _linear(
    place: _Place, x: Tensor, given: dict[str, Any], block: Block, position: int, out: Tensor, ahead: bool
) -> _Made | None:
    """Return the call of all of a layer that attends linearly, to be run; None if its parts run one by one.

    `ahead`: only over states that the cache has already.
    """
    assert place.whole is not None
    attention = place.attention
    linear: LinearPlace = attention._moepack_linear
    others = given.keys() - {place.cache_name, "position_embeddings", "position_ids", "use_cache"}
    if len(x) > place.most or any(given[name] is not None and given[name] is not False for name in others):
        return None
    cache = given.get(place.cache_name)
    number: int = attention.layer_idx
    packed = isinstance(cache, PackedCache)
    begun = type(cache) is DynamicCache and cache.get_conv_state(number, state_idx=0) is not None
    if (ahead and not packed and not begun) or not linear.holds(attention):
        return None
    states = linear.states(cache, number, len(x), 1)
    if states is None or len(states) != 1:
        return None
    first, windows, held = states[0]
    ready = place.whole.attends_linearly(x, first, windows, held, block, out)
    marks = _mark(windows[0]), _mark(held[0])

    def is_next() -> bool:
        if not packed:
            again = linear.states(cache, number, len(x), 1)
            if again is None or again[0][1][0] is not windows[0] or again[0][2][0] is not held[0]:
                return False
        return (_mark(windows[0]), _mark(held[0])) == marks

    ran = functools.partial(cache.ran, number, 0) if isinstance(cache, PackedCache) else _nothing
    return _Made(ready, position, _Row(windows[0], held[0], ran, is_next))


def _nothing() -> None:
    """Keep nothing: states are in the cache as they are."""


def _fits(x: object) -> bool:
    """Whether the kernels take a pass's input: a few BF16 tokens, in a pass without gradients."""
    return (
        isinstance(x, Tensor)
        and x.dtype is torch.bfloat16
        and x.dim() == 3
        and 0 < x.numel() <= FEW * x.shape[-1]
        and x.device.type == "cpu"
        and x.is_contiguous()
        and not torch.is_grad_enabled()
    )


@dataclass(frozen=True, slots=True)
class _Row:
    """Room in a cache for one token of each sequence.

    Attributes:
        keys, values: whose last row a kernel may write; of linear attention windows and states, which it changes.
        keep: lets the cache have that row.
        is_next: whether the cache is still as it was.
    """

    keys: Tensor
    values: Tensor
    keep: Callable[[], None]
    is_next: Callable[[], bool]


def _row(given: dict[str, Any], place: _Place, x: Tensor, step: Step, ahead: bool) -> _Row | None:
    """Make room in a cache for one token of each sequence; None for other caches and passes.

    `ahead`: only where nothing is copied.
    """
    cache = given.get(place.cache_name)
    turn = given.get("position_embeddings")
    others = given.keys() - {place.cache_name, "position_embeddings", "position_ids", "use_cache", MASK}
    if x.shape[1] != 1 or any(given[name] is not None and given[name] is not False for name in others):
        return None
    tried: CpuProjections = place.attention._moepack_projection
    if len(x) > place.most or not tried.takes(turn, len(x)) or not tried.follows(place.attention):
        return None
    number: int = place.attention.layer_idx
    if isinstance(cache, PackedCache):
        own = vars(place.attention.config).get("_attn_implementation_internal") == cache.attention
        packed = cache.with_room(number) if own and given.get(MASK) is None else None
        if packed is None or not _alike(tried, x, *packed):
            return None
        return _Row(*packed, functools.partial(cache.keep, number), lambda: True)
    if type(cache) is not DynamicCache or cache.offloading or not attends_alone(place.attention):
        return None
    layer = cache.layers[number] if number < len(cache.layers) else None
    if not takes_token(layer) or not isinstance(layer.keys, Tensor) or not isinstance(layer.values, Tensor):
        return None
    if ahead and not (isinstance(layer, GrowingLayer) and layer.has_place()):
        return None
    keys = layer.keys
    if keys.dim() != 4 or not keys.numel() or not _alike(tried, x, keys, layer.values):
        return None
    if not _sees_all(place, given.get(MASK), len(x), keys.shape[2] + 1, step):
        return None
    values = layer.values
    marks = _mark(keys), _mark(values)
    longer = with_room(layer)

    def is_next() -> bool:
        held = cache.layers[number] is layer and layer.keys is keys and layer.values is values
        return held and (_mark(keys), _mark(values)) == marks

    return _Row(*longer, functools.partial(keep, layer, *longer), is_next)


def _alike(tried: CpuProjections, x: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether a kernel writes what it makes of x behind these keys and values."""
    if keys.stride(3) != 1 or values.stride(3) != 1:
        return False
    return keys.dtype is x.dtype and values.dtype is x.dtype and tried.projection.fits(x, keys, values)


def _sees_all(place: _Place, mask: object, batch: int, length: int, step: Step) -> bool:
    """Whether one token of each sequence sees all keys by a mask: none, of flags, or of numbers to add.

    In a pass all layers with a window are given one mask, and all others another.
    """
    if mask is None:
        return True
    plain = getattr(place.attention, "_moepack_eager", False)  # other functions with a mask are torch's
    if not plain or not isinstance(mask, Tensor) or mask.shape != (batch, 1, 1, length):
        return False
    if any(mask is known for known in step.unmasked):
        return True
    hidden = ~mask if mask.dtype == torch.bool else mask != 0
    if bool(hidden.any()):
        return False
    step.unmasked.append(mask)
    return True
