"""The plug-in: transformers' quantiser hooks, through which a bundle loads like any model.

Imported when transformers' quantisers are (`moepack.hook` sees to that). Before the weights: take the expert parameters
off the skeleton. After: attach the handles.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moepack.pack.errors import BundleError, InputError, Problem, TooSmallError
from moepack.pack.manifest import MANIFEST
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.writer import sha256_of
from moepack.runtime.allocation.knapsack import BudgetError, uniform
from moepack.runtime.devices import glibc
from moepack.runtime.experts.forward import IMPLEMENTATION, experts_forward
from moepack.runtime.experts.handles import LayerExperts
from moepack.runtime.kernels.forms import resident_size
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.planning.fixed import Fixed, Needs, Workload, dense_bytes, measure, on_cuda
from moepack.runtime.planning.skeleton import EXPERT_PARAMETERS
from moepack.runtime.policies.registry import Policy, Versions, parse_policy, static_map
from moepack.runtime.residency.live import Live, make_plan
from moepack.runtime.store.files import BackingStore

from .serving import Serving

log = logging.getLogger("moepack.runtime")
METHOD = "moepack"


class MoepackConfig(QuantizationConfigMixin):
    """What config.json and `moepack.load` say about serving: the policy, the device-memory budget in bytes, and what
    that must leave room for, as `Workload` has it."""

    def __init__(
        self,
        policy: str | None = None,
        device_memory: int | None = None,
        workload: Mapping[str, Any] | None = None,
        host_memory: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # its enum lists transformers' own methods
        self.policy = policy
        self.device_memory = device_memory
        self.workload = dict(workload or {})
        self.host_memory = host_memory


class MoepackQuantizer(HfQuantizer):
    """Loads a bundle's experts in place of expert parameters."""

    requires_calibration = True

    def __init__(self, quantization_config: MoepackConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._bundle: Bundle | None = None

    @property
    def is_trainable(self) -> bool:
        """A bundle is for inference."""
        return False

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """A loaded bundle cannot be saved as a checkpoint: copy the bundle."""
        return False

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        bundle = self._bundle = _bundle_of(model, checkpoint_files)
        _check_files(bundle)
        for layer in bundle.layers:
            try:
                module = model.get_submodule(layer.module)
            except AttributeError:
                kind = type(model).__name__
                raise InputError(
                    f"{bundle.path}: its experts are at {layer.module}, which {kind} does not have"
                ) from None
            for name in EXPERT_PARAMETERS:
                module._parameters.pop(name, None)
            module._is_hf_initialized = True
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation_internal = IMPLEMENTATION
        tripwire = re.escape(f"{bundle.layers[0].module}.down_proj")
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, tripwire}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._bundle is not None
        config = self.quantization_config
        workload = Workload(**(getattr(config, "workload", None) or {}))
        policy, budget = getattr(config, "policy", None), getattr(config, "device_memory", None)
        attach(model, self._bundle, policy, budget, workload, getattr(config, "host_memory", None))
        return model


def attach(
    model: Any,
    bundle: Bundle,
    policy_text: str | None,
    device_memory: int | None,
    workload: Workload,
    host_memory: int | None = None,
) -> None:
    """Give every experts module its handles under a policy.

    Raises:
        InputError: when the policy does not fit the bundle, or its versions do not fit the device memory.
        BundleError: when an extent is damaged.
    """
    policy = parse_policy(policy_text)
    devices = [
        next(model.get_submodule(layer.module.rpartition(".")[0]).parameters()).device for layer in bundle.layers
    ]
    if device_memory is None and (policy.is_live or policy.name == "uniform"):
        raise InputError(f"policy {policy}: needs a memory budget: device_memory, or --device-memory")
    fixed, needs = Fixed(dense_bytes(model)), None
    if device_memory is not None:
        fixed, needs = _held_back(model, bundle, devices[0], workload, fixed)
    live: Live | None = None
    tracker: BudgetTracker | None = None
    if policy.is_live:
        assert device_memory is not None
        plan = make_plan(bundle, policy.live_options(), fixed.total, device_memory)
        live = Live(bundle, policy, plan, devices, host_memory)
        fixed = replace(fixed, staging=live.plan.staging)
        layers, tracker = live.layers, live.tracker
    else:
        table, needed = unchanging(bundle, policy, fixed, device_memory)
        if device_memory is not None:
            tracker = BudgetTracker(device_memory, fixed.total)
            tracker.try_reserve("experts", needed)
        store = BackingStore(bundle)
        with store.reading_ahead((name, p, e) for p, row in enumerate(table) for e, name in enumerate(row)):
            layers = [LayerExperts(store, p, row, d) for p, (row, d) in enumerate(zip(table, devices, strict=True))]
    if device_memory is not None and devices[0].type == "cpu":
        glibc.own(model)
        glibc.bound()
        glibc.trim()
    log.info("%s", fixed)
    for layer, experts in zip(bundle.layers, layers, strict=True):
        model.get_submodule(layer.module)._moepack = experts
    model.moepack = Serving(bundle, str(policy), layers, fixed, device_memory, live, tracker)
    model.moepack.watch(model)
    if needs is not None:
        model.moepack.watch_caches(model, needs)


def _held_back(
    model: Any, bundle: Bundle, device: torch.device, workload: Workload, fixed: Fixed
) -> tuple[Fixed, Needs]:
    """M_fixed without a staging buffer, and what was measured for it."""
    needs, _ = measure(bundle, model.config, model.dtype, device, workload)
    activations = needs.activations
    if device.type == "cuda":
        activations = max(activations, on_cuda(model, bundle.layers, device, needs))
    return Fixed(fixed.dense, needs.kv_bytes, activations), replace(needs, activations=activations)


def unchanging(bundle: Bundle, policy: Policy, fixed: Fixed, device_memory: int | None) -> tuple[Versions, int]:
    """The map of a policy that changes nothing, and the bytes its experts take.

    Raises:
        InputError: when the policy does not fit the bundle.
        TooSmallError: when the map does not fit the budget.
    """
    if policy.name == "uniform":
        assert device_memory is not None
        table = _uniform(bundle, fixed, device_memory)
    else:
        table = static_map(bundle, policy.argument)
    experts = expert_bytes(bundle, table)
    if device_memory is not None and fixed.total + experts > device_memory:
        raise TooSmallError(
            f"{bundle.path}: policy {policy} needs {fixed.total + experts} bytes of device memory ({fixed}), the "
            f"budget is {device_memory}: name a smaller version or a larger budget",
            fixed.total + experts,
        )
    return table, experts


def _uniform(bundle: Bundle, fixed: Fixed, device_memory: int) -> Versions:
    """One version for all experts, and the next better one for as many as the budget still holds."""
    sizes = [
        [resident_size(layer.matrices, v) for v in bundle.versions]
        for layer in bundle.layers
        for _ in range(layer.experts)
    ]
    try:
        chosen = iter(uniform(sizes, device_memory - fixed.total))
    except BudgetError as error:
        least = fixed.total + int(error.least)
        raise TooSmallError(
            f"{bundle.path}: a budget of {device_memory} bytes does not hold the smallest versions: the least that "
            f"would do is {least} bytes ({fixed})",
            least,
        ) from None
    return tuple(tuple(bundle.versions[next(chosen)].name for _ in range(x.experts)) for x in bundle.layers)


def expert_bytes(bundle: Bundle, table: Versions) -> int:
    """Bytes of device memory the experts take under a map; the lossless version is resident decoded."""
    return sum(
        resident_size(layer.matrices, bundle.manifest.version(name))
        for layer, versions in zip(bundle.layers, table, strict=True)
        for name in versions
    )


def _bundle_of(model: Any, checkpoint_files: Any) -> Bundle:
    """The bundle that transformers is loading from: a directory, or a Hub snapshot that is then completed."""
    if not checkpoint_files:
        raise InputError("a bundle is loaded from its directory or its Hub id, not from a state dict")
    root = Path(checkpoint_files[0]).parent
    if not (root / MANIFEST).exists() or not (root / "experts").is_dir():
        from transformers.utils.hub import extract_commit_hash

        commit = extract_commit_hash(checkpoint_files[0], None)
        if commit is not None:
            from huggingface_hub import snapshot_download

            root = Path(snapshot_download(model.config._name_or_path, revision=commit))
    return open_bundle(root)


def _check_files(bundle: Bundle) -> None:
    problems = [
        Problem(f"{bundle.path}/{name}", "digest", "its bytes do not match their digest")
        for name, entry in bundle.manifest.files.items()
        if sha256_of(bundle.path / name) != entry.sha256
    ]
    if problems:
        raise BundleError(problems)


register_quantization_config(METHOD)(MoepackConfig)
register_quantizer(METHOD)(MoepackQuantizer)
ExpertsInterface.register(IMPLEMENTATION, experts_forward)
