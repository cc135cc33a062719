"""The plug-in: transformers' quantiser hooks, through which a bundle loads like any model.

Imported when transformers' quantisers are (`moepack.hook` sees to that). Before the weights: take the expert parameters
off the skeleton. After: attach the handles.
"""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from typing import Any

from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from moepack.pack.errors import BundleError, InputError, Problem
from moepack.pack.manifest import MANIFEST
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.writer import sha256_of

from .allocation import BudgetError, uniform
from .experts import IMPLEMENTATION, LayerExperts, experts_forward
from .kernels.forms import resident_size
from .live import Live, make_plan
from .policies import Versions, parse_policy, static_map
from .store import BackingStore
from .windows import Windows

METHOD = "moepack"
COUNTERS = (
    "promotions",
    "demotions",
    "forward_waits",
    "cancelled",
    "transition_failures",
    "refusals",
    "bytes_moved",
)


class MoepackConfig(QuantizationConfigMixin):
    """What config.json and `moepack.load` say about serving: the policy and the device-memory budget in bytes."""

    def __init__(self, policy: str | None = None, device_memory: int | None = None, **kwargs: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # its enum lists transformers' own methods
        self.policy = policy
        self.device_memory = device_memory


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
            for name in ("gate_up_proj", "up_proj", "down_proj", "gate_up_proj_bias", "up_proj_bias", "down_proj_bias"):
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
        attach(model, self._bundle, getattr(config, "policy", None), getattr(config, "device_memory", None))
        return model


def attach(model: Any, bundle: Bundle, policy_text: str | None, device_memory: int | None) -> None:
    """Give every experts module its handles under a policy.

    Raises:
        InputError: when the policy does not fit the bundle, or its versions do not fit the device memory.
        BundleError: when an extent is damaged.
    """
    policy = parse_policy(policy_text)
    fixed = sum(p.numel() * p.element_size() for p in model.parameters())
    devices = [
        next(model.get_submodule(layer.module.rpartition(".")[0]).parameters()).device for layer in bundle.layers
    ]
    live: Live | None = None
    table: Versions | None = None
    if policy.is_live:
        if device_memory is None:
            raise InputError(f"policy {policy}: needs a memory budget: device_memory, or --device-memory")
        plan = make_plan(bundle, policy.live_options(), fixed, device_memory)
        live = Live(bundle, policy, plan, devices)
        layers = live.layers
    else:
        table = (
            _uniform(bundle, fixed, device_memory) if policy.name == "uniform" else static_map(bundle, policy.argument)
        )
        needed = fixed + expert_bytes(bundle, table)
        if device_memory is not None and needed > device_memory:
            raise InputError(
                f"{bundle.path}: policy {policy} needs {needed} bytes of device memory ({fixed} of them outside the "
                f"experts), the budget is {device_memory}: name a smaller version or a larger budget"
            )
        store = BackingStore(bundle)
        layers = [LayerExperts(store, p, row, d) for p, (row, d) in enumerate(zip(table, devices, strict=True))]
    for layer, experts in zip(bundle.layers, layers, strict=True):
        model.get_submodule(layer.module)._moepack = experts
    model.moepack = Serving(bundle, str(policy), layers, fixed, device_memory, live)
    model.moepack.watch(model)


def _uniform(bundle: Bundle, fixed: int, device_memory: int | None) -> Versions:
    """One version for all experts, and the next better one for as many as the budget still holds."""
    if device_memory is None:
        raise InputError("policy uniform: needs a memory budget: device_memory, or --device-memory")
    sizes = [
        [resident_size(layer.matrices, v) for v in bundle.versions]
        for layer in bundle.layers
        for _ in range(layer.experts)
    ]
    try:
        chosen = iter(uniform(sizes, device_memory - fixed))
    except BudgetError as error:
        raise InputError(
            f"{bundle.path}: a budget of {device_memory} bytes does not hold the smallest versions: the least that "
            f"would do is {fixed + int(error.least)} bytes"
        ) from None
    return tuple(tuple(bundle.versions[next(chosen)].name for _ in range(x.experts)) for x in bundle.layers)


class Serving:
    """What is being served: the bundle, the policy, the bytes they take, and what has happened since loading."""

    def __init__(
        self,
        bundle: Bundle,
        policy: str,
        layers: list[LayerExperts],
        fixed_bytes: int,
        budget: int | None,
        live: Live | None = None,
    ) -> None:
        self.bundle, self.policy, self.layers, self.live = bundle, policy, layers, live
        self.fixed_bytes, self.budget_bytes = fixed_bytes, budget
        self._windows: Windows | None = None

    def watch(self, model: Any, always: bool = False) -> None:
        """Count what the router chooses, from now on; without `always`, only where a policy needs it."""
        if self._windows is None and (always or self.live is not None):
            self._windows = Windows(model, self.layers, self.live)
        if self.live is not None and not always:
            weakref.finalize(model, self.live.close)

    def trace(self, model: Any, path: str | Path) -> None:
        """Write every window from now on into a file (trace.py)."""
        self.watch(model, always=True)
        assert self._windows is not None
        self._windows.trace_to(path, self.policy, self.bundle, lambda: self.resident_bytes())

    def close(self) -> None:
        """End the trace and stop changing versions; the model goes on with those it has."""
        if self._windows is not None:
            self._windows.close()
        if self.live is not None:
            self.live.close()

    @property
    def versions(self) -> Versions:
        """The active version of every expert, by layer."""
        return tuple(tuple(h.version.name for h in layer.handles) for layer in self.layers)

    def resident_bytes(self, model: Any = None) -> int:
        """Bytes of device memory that weights take: dense tensors and experts; under a live policy all that is
        reserved."""
        if self.live is not None:
            return self.live.tracker.reserved
        return self.fixed_bytes + sum(layer.resident_bytes for layer in self.layers)

    @property
    def resident_bytes_peak(self) -> int:
        """The most of `resident_bytes` since loading began."""
        return self.live.tracker.peak if self.live is not None else self.resident_bytes()

    def counters(self) -> dict[str, int]:
        """What transitions did since loading; all zero under a policy that changes nothing."""
        live = self.live
        if live is None:
            return dict.fromkeys(COUNTERS, 0)
        counts = live.residency.counts
        values = (
            counts.promotions,
            counts.demotions,
            live.waits,
            counts.cancelled,
            live.transitions.failures,
            live.transitions.refusals,
            live.device.moved,
        )
        return dict(zip(COUNTERS, values, strict=True))


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
