"""The plug-in: transformers' quantiser hooks, through which a bundle loads like any model.

patches.py imports it right after transformers' quantisers, and registers it with them. The plug-in removes the
expert parameters from the empty model before weights are loaded, and attaches the bundle's experts afterwards.
"""

from __future__ import annotations

import logging
import re
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from transformers.quantizers.base import HfQuantizer
from transformers.utils.hub import extract_commit_hash
from transformers.utils.quantization_config import QuantizationConfigMixin

from moepack.families.layouts import adapt
from moepack.families.mtp import mtp_patterns
from moepack.pack.errors import BundleError, InputError
from moepack.pack.manifest import DENSE, LEFTOVERS
from moepack.pack.reader import TENSORS, Bundle, open_bundle
from moepack.pack.spec import HINT, Version
from moepack.runtime.dense.choice import choose_dense
from moepack.runtime.dense.linears import prepare
from moepack.runtime.experts.forward import IMPLEMENTATION
from moepack.runtime.load import check_options
from moepack.runtime.planning.exceeded import TooSmallError
from moepack.runtime.planning.matrices import EXPERT_PARAMETERS
from moepack.runtime.planning.options import METHOD, SERVED, WORKLOAD, LoadOptions
from moepack.runtime.store.checked import recording

from .attach import attach
from .load_turns import load_turns
from .process_limit import ProcessLimit, check_budget, keep_limit
from .profile import profiled
from .snapshot import fetch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger("moepack.runtime")
HUB = ("token", "cache_dir", "local_files_only", "force_download")  # how files are fetched


@dataclass(frozen=True, slots=True)
class Asked:
    """Arguments of `from_pretrained` that transformers does not tell a quantiser."""

    name: str = "the model"
    hub: Mapping[str, object] = field(default_factory=dict)  # the arguments of HUB that were given
    experts: str | Mapping[str, str] | None = None  # the experts' implementation
    held: ExitStack | None = None  # ends with the call


asked: ContextVar[Asked] = ContextVar("moepack_asked", default=Asked())  # noqa: B039 (frozen)


class MoepackConfig(QuantizationConfigMixin):
    """Options for serving, from config.json, `moepack.load` or a caller of `from_pretrained`.

    Args:
        workload: fields of `Workload`, in one mapping.
        given: fields of `LoadOptions`; other names, which config.json may have, are ignored.
    """

    def __init__(self, workload: Mapping[str, Any] | None = None, **given: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # its enum lists transformers' own methods
        if unknown := (workload or {}).keys() - set(WORKLOAD):
            raise InputError(f"workload has no {', '.join(sorted(map(str, unknown)))}: {', '.join(WORKLOAD)}")
        both = {**given, **(workload or {})}
        named = {name: both[name] for name in SERVED if both.get(name) is not None}
        options = LoadOptions(**named)
        self.given = {name: getattr(options, name) for name in named}

    def options(self, has_dense: bool = False) -> LoadOptions:
        """Return the given options, completed by the environment's."""
        return LoadOptions(**self.given).with_environment(has_dense)

    def merged(self, own: MoepackConfig | dict[str, Any]) -> MoepackConfig:
        """Return both configurations as one: these fields override those of config.json's, `own`."""
        if (own.get("quant_method") if isinstance(own, dict) else own.quant_method) != METHOD:
            raise _no_bundle()
        return MoepackConfig(**{**(MoepackConfig(**own) if isinstance(own, dict) else own).given, **self.given})

    def to_dict(self) -> dict[str, object]:
        """Return the fields for config.json, which also shows how a loaded model is served."""
        return {"quant_method": METHOD, **self.given}


class MoepackQuantizer(HfQuantizer):
    """Loads a bundle's experts in place of expert parameters."""

    requires_calibration = True

    def __init__(self, quantization_config: MoepackConfig, **kwargs: Any) -> None:
        if not kwargs.get("pre_quantized", True):
            raise _no_bundle()
        super().__init__(quantization_config, **kwargs)
        if (held := asked.get().held) is not None:
            held.enter_context(load_turns.loading())
        self._bundle: Bundle | None = None
        self._options = quantization_config.options()
        self._dense: tuple[Version, ...] = ()
        self._limit: ProcessLimit | None = None
        self._model: weakref.ref[PreTrainedModel] | None = None  # the model whose weights are to be read
        self._places: set[str] | None = None  # the kinds of devices that it goes to; None until they are known

    @property
    def is_trainable(self) -> bool:
        """Whether adapters beside a bundle can be trained. The experts do not change."""
        return True

    def is_serializable(self, *args: object, **kwargs: object) -> bool:
        """Return False: a loaded bundle cannot be saved as a checkpoint. Copy the bundle instead."""
        return False

    def _dequantize(self, model: PreTrainedModel, dtype: object = None) -> NoReturn:
        raise InputError("a loaded bundle does not become a plain model: load the checkpoint that it was made from")

    def validate_environment(self, *args: object, device_map: object = None, **kwargs: object) -> None:
        """Note where the model goes. Of "auto" and the like transformers tells the map once there is a model.

        Raises:
            InputError: for a map with the disk, or with the host beside a GPU.
        """
        if isinstance(device_map, str):
            return
        named = device_map.values() if isinstance(device_map, Mapping) else ["cpu"]
        self._places = {str(place).partition(":")[0] for place in named}
        if self._places & {"disk", "meta"} or ("cpu" in self._places and len(self._places) > 1):
            raise InputError(
                "device_map puts layers on the host or the disk, which a bundle does not do: where its experts do not "
                "fit, give device= and device_memory= instead"
            )
        self._check()

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] | None = None, **kwargs: Any
    ) -> None:
        named = asked.get().experts
        for other in set(named.values() if isinstance(named, Mapping) else [named]) - {None, IMPLEMENTATION}:
            raise InputError(f"experts_implementation={other!r}: a bundle's experts are run by moepack's own")
        config: Any = self.quantization_config
        bundle = _bundle_of(model, checkpoint_files, config.options(True))
        check_options(bundle, config.options())
        self._bundle = bundle = profiled(bundle, config.options().profile)
        self._model = weakref.ref(model)
        bundle.check()
        bundle.dense(check_digests=False)  # a damaged header, before safetensors reads it
        adapt(model)
        options = self._options = config.options(bool(bundle.manifest.dense))
        self._dense = choose_dense(options.dense, bundle, options.policy)
        wanted = own_tensors(model, bundle)
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
        # With a head of a task of its own, transformers fills that head with random numbers, to be trained.
        lost = sorted(wanted - set(bundle.dense(check_digests=False)))
        own_classes = {bundle.manifest.model["architecture"], *(model.config.architectures or ())}
        if lost and not own_classes.isdisjoint(kind.__name__ for kind in type(model).__mro__):
            raise BundleError.single(str(bundle.path / DENSE), "missing", f"has no tensor {lost[0]} of its model")
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation_internal = IMPLEMENTATION
        tripwire = (re.escape(name) for name in (f"{bundle.layers[0].module}.down_proj", HINT))
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        model._keys_to_ignore_on_load_unexpected = {*ignored, *tripwire}
        if bundle.manifest.model.get("mtp") == "keep":
            patterns = mtp_patterns(bundle.dense(check_digests=False), bundle.manifest.model["decoder_layers"])
            model._keys_to_ignore_on_load_unexpected |= patterns

    def update_weight_conversions(self, weight_conversions: object, *model: object) -> object:
        """Check what is known before weights are read: this is called no longer among patches of model code.

        Up to 5.19 at least, transformers does not hand over the model.
        """
        self._check()
        return super().update_weight_conversions(weight_conversions, *model)  # type: ignore[no-untyped-call]

    def _check(self) -> None:
        """Once model and places are known, check the budget on a CPU, and elsewhere the files of tensors.

        On a CPU these are checked as they are read (dense/mapped.py).
        """
        model = None if self._model is None else self._model()
        places = self._places
        bundle = self._bundle
        options = self._options
        if model is None or places is None:
            return
        assert bundle is not None
        if places != {"cpu"}:
            options.check_limit(", ".join(sorted(places)))
            bundle.check(*(name for name in bundle.files if name.endswith(TENSORS) and name != LEFTOVERS))
        elif options.memory is not None:
            self._options, self._limit = keep_limit(model, bundle, options, self._dense)
        elif options.in_budget:
            self._options = check_budget(model, bundle, options, self._dense)

    def _process_model_after_weight_loading(self, model: Any, **kwargs: object) -> Any:
        assert self._bundle is not None
        try:
            with recording(self._bundle, bool(self._options.checked)):
                attach(model, self._bundle, self._options, self._dense)
        except TooSmallError as error:
            if self._limit is None:
                raise
            raise self._limit.too_small(self._bundle, error) from None
        model.moepack.limit = self._limit
        if self._limit is not None:
            log.info("%s", self._limit)
        return model


def own_tensors(model: PreTrainedModel, bundle: Bundle) -> set[str]:
    """The names of a model's tensors, without those of experts, those with versions, and those tied to others."""
    packed = {f"{layer.module}.{name}" for layer in bundle.layers for name in EXPERT_PARAMETERS}
    packed |= {f"{matrix.module}.{name}" for matrix in bundle.manifest.dense for name in ("weight", "bias")}
    return set(model.state_dict()) - set(model.all_tied_weights_keys) - packed


def _bundle_of(model: PreTrainedModel, checkpoint_files: Sequence[str] | None, options: LoadOptions) -> Bundle:
    """Open the bundle that transformers loads: a directory, or a Hub snapshot with the files that a policy needs."""
    if not checkpoint_files:
        raise InputError("a bundle is loaded from its directory or its Hub id, not from a state dict")
    root = Path(checkpoint_files[0]).parent
    name = model.config._name_or_path
    commit = None if Path(name).is_dir() else extract_commit_hash(checkpoint_files[0], None)
    return open_bundle(root) if commit is None else fetch(name, commit, options, asked.get().hub)


def _no_bundle() -> InputError:
    return InputError(f"{asked.get().name}: not a bundle; moepack build makes one")
