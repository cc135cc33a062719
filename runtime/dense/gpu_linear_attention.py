"""Linear attention by the gated delta rule on a GPU: two launches between projections for one new token of sequences.

Modules are found and tried as on a CPU (linear_attention.py). Prompts, and what else the launches do not take, run the
module's own code. Weights are read where the module has them, so nothing is compared in a pass, which would wait.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from moepack.families.arguments import CACHE_NAMES
from moepack.runtime.kernels.current import current
from moepack.runtime.kernels.delta_native import DeltaSizes
from moepack.runtime.kernels.delta_triton import GpuDelta

from .by_row import by_row
from .gpu_modules import FLOATS
from .linear_attention import LinearPlace, alike, place_of, replace_linear_attention
from .linears import FamilyModule, in_place_of, learns


def serve_gpu_linear_attention(model: nn.Module) -> dict[str, int]:
    """Replace the modules of linear attention that the launches reproduce; return how many were changed, by class."""
    return replace_linear_attention(model, _place, _served, None)


def _place(module: FamilyModule, sigmoid: bool) -> LinearPlace | None:
    """Return what a module's launches read; None for a module that they do not fit."""
    if module.conv1d.weight.dtype not in FLOATS:
        return None

    def rule(sizes: DeltaSizes, places: Any, weights: Any) -> GpuDelta:
        if weights.scale is not None:
            weights = replace(weights, scale=module.A_log.detach(), bias=module.dt_bias.detach())
        return GpuDelta(sizes, places, weights)

    place = place_of(module, sigmoid, rule)
    if place is not None:
        place.states_of = tuple((address, None) for address, _ in place.states_of)
    return place


@functools.cache
def _served(kind: Any, cache_name: str) -> type[nn.Module]:
    """Make a subclass of `kind` that runs the launches when its arguments allow it."""
    plain = kind.forward
    older = {*CACHE_NAMES} - {cache_name}  # names of the cache that a decorator of `plain` may translate

    @functools.wraps(plain)
    def forward(self: FamilyModule, *args: Any, **kwargs: Any) -> object:
        x, *more = args or (kwargs.get("hidden_states"),)
        place: LinearPlace | None = self._moepack_linear
        known = place is not None and not more and kwargs.get("attention_mask") is None and older.isdisjoint(kwargs)
        if place is None or not known or torch.compiler.is_compiling() or not _fits(x, self.conv1d.weight):
            return plain(self, *args, **kwargs)
        rule: Any = place.rule
        held = _held(kwargs.get(cache_name), self.layer_idx, rule.sizes, x)
        if held is None or not place.holds(self):
            return plain(self, *args, **kwargs)
        projections, logs = place.project(self, x)
        if any(p.dtype != x.dtype or learns(p) for p in projections) or (logs is not None and learns(logs)):
            return plain(self, *args, **kwargs)
        with current(x.device):
            made = rule.run([p.contiguous() for p in projections], *held, logs)
        return self._modules[place.last](made[:, None])

    return in_place_of(kind, by_row(forward))


def _fits(x: Any, weight: Tensor) -> bool:
    """Whether a pass's input is one token of each sequence that the launches take."""
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] != 1 or not x.numel():
        return False
    return (x.dtype, x.device) == (weight.dtype, weight.device) and not learns(x)


def _held(cache: Any, number: int, sizes: DeltaSizes, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a cache's windows and states of a layer, which the launches change; None if it has none such."""
    if not isinstance(cache, Cache) or cache.is_recording_past(number) or cache.offloading:
        return None
    windows = cache.get_conv_state(number, state_idx=0)
    states = cache.get_recurrent_state(number, state_idx=0)
    if windows is None or states is None:
        return None
    window = torch.empty((), dtype=x.dtype).expand(len(x), *sizes.window)
    state = torch.empty(()).expand(len(x), *sizes.state)
    there = windows.device == states.device == x.device
    return (windows, states) if there and alike(windows, window) and alike(states, state) else None
