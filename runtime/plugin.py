"""The plug-in: transformers' quantiser hooks, through which a bundle loads like any model.

Imported when transformers' quantisers are (`moepack.hook` sees to that). Before the weights: take the expert parameters
off the skeleton. After: attach the handles.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from transformers.integrations.moe import ExpertsInterface
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import extract_commit_hash
from transformers.utils.quantization_config import QuantizationConfigMixin

from moepack.families.layouts import adapt
from moepack.families.mtp import mtp_patterns
from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle, open_bundle
from moepack.pack.spec import HINT, Version
from moepack.runtime.dense.choice import choose_dense
from moepack.runtime.dense.linears import prepare
from moepack.runtime.experts.forward import IMPLEMENTATION, experts_forward
from moepack.runtime.planning.choice import check_policy
from moepack.runtime.planning.fixed import Workload
from moepack.runtime.planning.sizes import DEVICE_MEMORY, parse_bound, parse_size, read_tier
from moepack.runtime.planning.skeleton import EXPERT_PARAMETERS
from moepack.runtime.policies.registry import parse_policy

from .attach import attach
from .snapshot import fetch

METHOD = "moepack"
POLICY, DENSE = "MOEPACK_POLICY", "MOEPACK_DENSE"  # the environment's
HUB = ("token", "cache_dir", "local_files_only", "force_download")  # how files are fetched


@dataclass(frozen=True, slots=True)
class Asked:
    """What a call of `from_pretrained` asked for, as far as transformers does not tell.

    Attributes:
        name: of the model.
        hub: those of HUB that were given.
        experts: the experts' implementation.
    """

    name: str = "the model"
    hub: Mapping[str, Any] = field(default_factory=dict)
    experts: str | Mapping[str, str] | None = None


asked: ContextVar[Asked] = ContextVar("moepack_asked", default=Asked())  # noqa: B039 (frozen)


class MoepackConfig(QuantizationConfigMixin):
    """What config.json, `moepack.load` or a caller of `from_pretrained` says about serving.

    Args:
        policy, dense, max_tpot, device_memory, host_memory, host_rate, host_threads: as of `moepack.load`. Where
            nobody names them, the environment's MOEPACK_POLICY, MOEPACK_DENSE and MOEPACK_DEVICE_MEMORY do: for
            programs that load by path.
        workload: what a budget must leave room for, as `Workload` has it.
    """

    def __init__(
        self,
        policy: str | None = None,
        device_memory: int | str | None = None,
        workload: Mapping[str, Any] | None = None,
        host_memory: int | str | None = None,
        host_rate: int | str | None = None,
        host_threads: int | None = None,
        dense: str | None = None,
        max_tpot: str | int | None = None,
        **kwargs: Any,
    ) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # its enum lists transformers' own methods
        parse_policy(policy)
        self.policy, self.dense, self.max_tpot = policy, dense, max_tpot
        parse_bound(max_tpot)
        self.device_memory = parse_size(device_memory)
        self.workload = dict(workload or {})
        if unknown := self.workload.keys() - set(Workload.__slots__):
            raise InputError(f"workload has no {', '.join(sorted(map(str, unknown)))}: {', '.join(Workload.__slots__)}")
        self.host_memory = parse_size(host_memory)
        self.host_rate, self.host_threads = read_tier(host_rate, host_threads)

    def get_loading_attributes(self) -> dict[str, Any]:
        """What `from_pretrained(bundle, quantization_config=MoepackConfig(...))` puts over config.json's."""
        names = (
            "policy", "dense", "max_tpot", "device_memory", "workload", "host_memory", "host_rate", "host_threads",
        )  # fmt: skip
        return {name: value for name in names if (value := getattr(self, name)) not in (None, {})}


class MoepackQuantizer(HfQuantizer):
    """Loads a bundle's experts in place of expert parameters."""

    requires_calibration = True

    def __init__(self, quantization_config: MoepackConfig, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise _no_bundle()
        super().__init__(quantization_config, **kwargs)
        self._bundle: Bundle | None = None
        self._dense: tuple[Version, ...] = ()

    @property
    def is_trainable(self) -> bool:
        """Adapters beside a bundle are trained; transformers asks this of a model that has some. The experts stay."""
        return True

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        """A loaded bundle cannot be saved as a checkpoint: copy the bundle."""
        return False

    def _dequantize(self, model: Any, dtype: Any = None) -> NoReturn:
        raise InputError("a loaded bundle does not become a plain model: load the checkpoint that it was made from")

    def _process_model_before_weight_loading(self, model: Any, checkpoint_files: Any = None, **kwargs: Any) -> None:
        named = asked.get().experts
        for other in set(named.values() if isinstance(named, Mapping) else [named]) - {None, IMPLEMENTATION}:
            raise InputError(f"experts_implementation={other!r}: a bundle's experts are run by moepack's own")
        bundle = self._bundle = _bundle_of(
            model, checkpoint_files, self._policy(), self._budget() is not None, self._dense_name()
        )
        if policy := self._policy():
            check_policy(policy, bundle, self._budget() is not None)
        bundle.check(*bundle.manifest.files)
        adapt(model)
        self._dense = choose_dense(self._dense_name(bundle), bundle, self._policy())
        prepare(model, bundle, self._dense)
        for layer in bundle.layers:
            try:
                module = model.get_submodule(layer.module)
            except AttributeError:
                kind = type(model).__name__
                own = bundle.manifest.model["architecture"]
                raise InputError(
                    f"{bundle.path}: its experts are at {layer.module}, which {kind} does not have: load it as {own}, "
                    "as moepack.load does"
                ) from None
            for name in EXPERT_PARAMETERS:
                module._parameters.pop(name, None)
            above = model.get_submodule(layer.module.rpartition(".")[0])
            for initialised in (module, *([] if above._non_persistent_buffers_set else [above])):
                initialised._is_hf_initialized = True  # a block may fill its experts' parameters with numbers, too
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation_internal = IMPLEMENTATION
        tripwire = (re.escape(name) for name in (f"{bundle.layers[0].module}.down_proj", HINT))
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, *tripwire}
        if bundle.manifest.model.get("mtp") == "keep":
            patterns = mtp_patterns(bundle.dense(check_digests=False), bundle.manifest.model["decoder_layers"])
            model._keys_to_ignore_on_load_unexpected |= patterns

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._bundle is not None
        config: Any = self.quantization_config
        workload = Workload(**config.workload)
        host = config.host_memory, config.host_rate, config.host_threads
        attach(
            model,
            self._bundle,
            self._policy(),
            self._budget(),
            workload,
            *host,
            dense=self._dense,
            bound=parse_bound(config.max_tpot),
        )
        return model

    def _policy(self) -> str | None:
        config: Any = self.quantization_config
        return config.policy or os.environ.get(POLICY) or None

    def _dense_name(self, bundle: Bundle | None = None) -> str | None:
        """What was asked for; the environment's is for bundles that have dense versions."""
        config: Any = self.quantization_config
        wanted = os.environ.get(DENSE) if bundle is None or bundle.manifest.dense else None
        return config.dense or wanted or None

    def _budget(self) -> int | None:
        config: Any = self.quantization_config
        text = os.environ.get(DEVICE_MEMORY)
        if config.device_memory is not None or not text:
            return config.device_memory  # type: ignore[no-any-return]
        try:
            return parse_size(text)
        except InputError as error:
            raise InputError(f"{DEVICE_MEMORY}: {error}") from None


def _bundle_of(model: Any, checkpoint_files: Any, policy: str | None, in_budget: bool, dense: str | None) -> Bundle:
    """The bundle that transformers is loading from: a directory, or a Hub snapshot that is completed by what a policy
    needs."""
    if not checkpoint_files:
        raise InputError("a bundle is loaded from its directory or its Hub id, not from a state dict")
    root = Path(checkpoint_files[0]).parent
    name = model.config._name_or_path
    commit = None if Path(name).is_dir() else extract_commit_hash(checkpoint_files[0], None)
    return open_bundle(root) if commit is None else fetch(name, commit, policy, in_budget, asked.get().hub, dense)


def _no_bundle() -> InputError:
    return InputError(f"{asked.get().name}: not a bundle; moepack build makes one")


def _merge(own: Any, given: Any) -> Any:
    """config.json's quantisation and what a caller of `from_pretrained` gave: transformers' own would warn that most of
    the latter is ignored."""
    if not isinstance(given, MoepackConfig):
        return _merge_theirs(own, given)
    if (own.get("quant_method") if isinstance(own, dict) else own.quant_method) != METHOD:
        raise _no_bundle()
    merged = MoepackConfig(**own) if isinstance(own, dict) else own
    for name, value in given.get_loading_attributes().items():
        setattr(merged, name, value)
    return merged


register_quantization_config(METHOD)(MoepackConfig)
register_quantizer(METHOD)(MoepackQuantizer)
ExpertsInterface.register(IMPLEMENTATION, experts_forward)
_merge_theirs = AutoHfQuantizer.merge_quantization_configs
AutoHfQuantizer.merge_quantization_configs = staticmethod(_merge)  # type: ignore[method-assign,assignment]
