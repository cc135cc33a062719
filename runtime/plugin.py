"""The plug-in: transformers' quantiser hooks, through which a bundle loads like any model.

Imported when transformers' quantisers are (`moepack.hook` sees to that). Before the weights: take the expert parameters
off the skeleton. After: attach the handles.
"""

from __future__ import annotations

import re
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

from .experts import IMPLEMENTATION, LayerExperts, experts_forward
from .kernels.forms import resident_size
from .policies import Versions, parse_policy, static_map
from .store import BackingStore

METHOD = "moepack"


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
    table = static_map(bundle, policy.argument)
    fixed = sum(p.numel() * p.element_size() for p in model.parameters())
    needed = fixed + expert_bytes(bundle, table)
    if device_memory is not None and needed > device_memory:
        raise InputError(
            f"{bundle.path}: policy {policy} needs {needed} bytes of device memory ({fixed} of them outside the "
            f"experts), the budget is {device_memory}: name a smaller version or a larger budget"
        )
    store = BackingStore(bundle)
    for position, (layer, versions) in enumerate(zip(bundle.layers, table, strict=True)):
        parent = model.get_submodule(layer.module.rpartition(".")[0])
        device = next(parent.parameters()).device
        model.get_submodule(layer.module)._moepack = LayerExperts(store, position, versions, device)
    model.moepack = Serving(bundle, str(policy), table, fixed, device_memory)


class Serving:
    """What is being served: the bundle, the policy, and the bytes they take."""

    def __init__(self, bundle: Bundle, policy: str, versions: Versions, fixed_bytes: int, budget: int | None) -> None:
        self.bundle, self.policy, self.versions = bundle, policy, versions
        self.fixed_bytes, self.budget_bytes = fixed_bytes, budget

    def resident_bytes(self, model: Any) -> int:
        """Bytes of device memory that weights take: dense tensors and active versions."""
        layers: list[LayerExperts] = [model.get_submodule(layer.module)._moepack for layer in self.bundle.layers]
        return self.fixed_bytes + sum(layer.resident_bytes for layer in layers)


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
