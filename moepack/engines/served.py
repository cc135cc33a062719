"""A bundle for an engine with model code of its own: dense tensors by name, and modules that run packed experts.

This module knows no engine. A budget bounds the experts alone, with the buffer from which a lossless version is
decoded where versions change: the engine owns all other memory. Versions change only on a CPU, and only under a policy
that no pass waits for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from moepack.pack.errors import InputError
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.attach import load_map
from moepack.runtime.dense.choice import choose_dense
from moepack.runtime.experts import backends
from moepack.runtime.experts.forward import experts_forward
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.planning.choice import choose_policy, ladders_of
from moepack.runtime.planning.config import read_config
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.fixed import Fixed
from moepack.runtime.planning.matrices import EXPERT_PARAMETERS
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.plan import Plan, make_plan, unchanging
from moepack.runtime.planning.skeleton import on_meta
from moepack.runtime.policies.contract import Versions
from moepack.runtime.policies.placements import Where
from moepack.runtime.policies.registry import Policy, parse_policy
from moepack.runtime.residency.manager import ResidencyManager
from moepack.runtime.serving import Serving
from moepack.runtime.store.checked import recording

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("moepack.engines")
CPU = torch.device("cpu")
HELD = (Where.DEVICE, Where.ABSENT)  # no pass waits for an expert there, nor asks the host
OPTIONS = ("policy", "dense", "device_memory")  # what an engine's quantisation config may say, beside the method's name


def options_in(config: Mapping[str, object]) -> JsonObject:
    """Return the options of a quantisation config. Raises InputError for any other key, and for a wrong policy."""
    given: JsonObject = {name: value for name, value in config.items() if name != "quant_method"}
    if unknown := sorted(given.keys() - set(OPTIONS)):
        raise InputError(f"quantization_config has {', '.join(unknown)}: a bundle takes {', '.join(OPTIONS)} there")
    LoadOptions(**given)
    return given


class ServedBundle:
    """A bundle under a policy."""

    def __init__(self, path: str | Path, given: JsonObject) -> None:
        """Open a bundle and choose its versions; reads no weights.

        Args:
            given: options as from `options_in`; MOEPACK_POLICY, MOEPACK_DEVICE_MEMORY and MOEPACK_DENSE complete them.

        Raises:
            InputError: for a policy that is not served here or does not fit the bundle, or a name that is no directory.
            TooSmallError: for a budget that does not hold the experts; it says how much is enough.
            BundleError: for a damaged manifest, configuration or tokenizer.
        """
        if not Path(path).is_dir():
            raise InputError(f"{path}: not a directory: fetch the bundle first, by moepack pull {path} -o DIRECTORY")
        self.bundle = open_bundle(path)
        self.bundle.check()
        options = LoadOptions(**given).with_environment(bool(self.bundle.manifest.dense))
        budget = options.budget
        if options.memory is not None:
            raise InputError(f"{path}: a process's memory is not limited here: set MOEPACK_DEVICE_MEMORY, for experts")
        if budget is None and options.policy is not None and parse_policy(options.policy).entry.needs_budget:
            raise InputError(
                f"{path}: policy {options.policy} needs a budget for experts: give device_memory beside the policy, or "
                "set MOEPACK_DEVICE_MEMORY"
            )
        self.dense = choose_dense(options.dense, self.bundle, options.policy)
        self._policy = choose_policy(options.policy, self.bundle, ["cpu"], budget is not None)
        self._checked = bool(options.checked)
        self.table: Versions = ()  # the versions served, [layers][experts]; empty if they change
        self.plan: Plan | None = None  # the placements that fit the budget, if they change
        try:
            if self._policy.is_live:
                self.plan = _plan(self.bundle, self._policy, budget or 0)
            else:
                self.table, _ = unchanging(self.bundle, self._policy, Fixed(0), budget)
        except TooSmallError as error:
            raise TooSmallError(f"{error.text}; this budget is for experts alone", error.least) from None
        self.serving: Serving | None = None  # counters and versions once loaded, if versions change
        self.handed_over = False  # whether the engine has read all dense tensors
        self._modules: list[nn.Module] = []
        self._model: PreTrainedModel | None = None  # has these modules; without it they are let go

    @property
    def policy(self) -> str:
        """The policy, as users write it."""
        return str(self._policy)

    @property
    def layers(self) -> tuple[ExpertLayer, ...]:
        """The layers that have experts."""
        return tuple(self.bundle.layers)

    @property
    def loaded(self) -> bool:
        """Whether the experts are in memory."""
        return bool(self._modules)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor outside the experts, by the checkpoint's name, in the order of names.

        A matrix that has versions comes dequantised: BF16 from the lossless one, else float32. Digests are checked.
        """
        dense = self.bundle.dense()
        read: dict[str, Callable[[], Tensor]] = {name: partial(dense.torch, name) for name in dense}
        for described, version in zip(self.bundle.manifest.dense, self.dense, strict=True):
            for part in ("weight", *(["bias"] if described.matrix.bias else [])):
                read[f"{described.module}.{part}"] = partial(self._matrix, described.module, version, part)
        for name in sorted(read):
            yield name, read[name]()
        self.handed_over = True

    def _matrix(self, module: str, version: Version, part: str) -> Tensor:
        return self.bundle.dense_matrix(version.name, module).torch()[part]

    def module(self, position: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """Return the experts module of the layer at `position`, for `experts_forward`; the first call loads all layers.

        Args:
            dtype: of activations.

        Raises:
            InputError: where the engine did not read the dense tensors from `tensors`, or experts have norms beside.
            BundleError: when an extent is damaged.
        """
        if not self.handed_over:
            raise InputError(
                f"{self.bundle.path}: this model's tensors were not read through its bundle: the engine's load format, "
                "or its code for this family, does not fit"
            )
        if not self._modules:
            if self.plan is not None and device.type != "cpu":
                raise InputError(f"{self.bundle.path}: policy {self.policy} is served on a CPU here, not on {device}")
            model = _bare(self, dtype)
            self._model = model
            modules: list[Any] = [model.get_submodule(layer.module) for layer in self.layers]
            with recording(self.bundle, self._checked):
                loaded = self._load(model, [device] * len(modules))
            for module, experts in zip(modules, loaded, strict=True):
                module._moepack = experts
            backends.prepare(dtype, loaded[0].of.versions, device)
            held = sum(experts.resident_bytes for experts in loaded)
            within = "" if self.plan is None else f" in a budget of {self.plan.budget}"
            log.info("%s: %s, %d bytes of packed experts%s", self.bundle.path, self.policy, held, within)
            self._modules = modules
        return self._modules[position]

    def _load(self, model: PreTrainedModel, devices: list[torch.device]) -> list[LayerExperts]:
        if self.plan is None:
            return load_map(self.bundle, self.table, devices)
        manager = ResidencyManager(self.bundle, self._policy, self.plan, devices)
        layers = manager.layers
        fixed = Fixed(0, staging=manager.plan.staging)
        self.serving = Serving(model, self.bundle, self.policy, layers, fixed, manager, manager.tracker, {})
        return layers


def run_layer(module: Any, hidden: Tensor, index: Tensor, weights: Tensor, traffic: bool = True) -> Tensor:
    """Run the experts of one layer, as `experts_forward` does.

    If versions change, a pass is one step, from its first layer to its last in one thread. A pass that raises between
    layers ends with the thread's next pass, or with the thread. Without `traffic` (an engine's trial passes) each layer
    is a step, and nothing is counted.
    """
    steps = module._moepack.steps
    if steps is None or not traffic:
        return experts_forward(module, hidden, index, weights)
    out: Tensor = steps.compiled_layer(module, hidden, index, weights)
    return out


def _plan(bundle: Bundle, policy: Policy, budget: int) -> Plan:
    """Plan for the experts alone. Raises InputError for a policy whose passes wait, or that uses host memory."""
    ladders = ladders_of(bundle, policy.options)
    moved = policy.options.on_demand or any(p.where not in HELD for ladder in ladders for p in ladder)
    plan = None if moved else make_plan(bundle, policy.options, 0, budget)
    if plan is None or plan.policy(policy)[0].needs.layers:
        raise InputError(
            f"{bundle.path}: policy {policy} lets passes wait for experts, or keeps some in host memory, which "
            "moepack serve alone does"
        )
    return plan


def _bare(served: ServedBundle, dtype: torch.dtype) -> PreTrainedModel:
    """Transformers' own model, whose experts modules know gate and activation, without weights."""
    model: PreTrainedModel = on_meta(read_config(served.bundle.path, served.bundle.manifest), dtype)
    for layer in served.layers:
        module = model.get_submodule(layer.module)
        for name in EXPERT_PARAMETERS:
            module._parameters.pop(name, None)
        if left := [name for name, _ in module.named_parameters()]:
            raise InputError(f"{served.bundle.path}: {layer.module} has {left[0]} beside experts: not supported here")
    return model
