"""vLLM's quantisation config of a bundle: which layers are whose, and which tensors vLLM's loader is given."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.models.utils import WeightsMapper

from moepack.pack.errors import InputError
from moepack.pack.manifest.strict_json import JsonObject
from moepack.runtime.planning.options import METHOD

from .served import ServedBundle, options_in
from .vllm_experts import MoepackExperts

if not hasattr(QuantizationConfig, "get_checkpoint_weight_mapper"):  # vLLM's loader would never ask for the tensors
    raise ImportError("its QuantizationConfig has no get_checkpoint_weight_mapper")


class BundleTensors(WeightsMapper):  # type: ignore[misc]
    """Gives vLLM a bundle's tensors, under the names that `mapper` gives, in place of the files that vLLM would read.

    vLLM reads every file of tensors beside config.json, calibration tables too, and none of the folders below it.
    """

    def __init__(self, served: ServedBundle, mapper: WeightsMapper) -> None:
        super().__init__(**vars(mapper))
        self._served = served

    def __or__(self, other: WeightsMapper) -> BundleTensors:
        return BundleTensors(self._served, WeightsMapper(**_fields(self)) | WeightsMapper(**_fields(other)))

    def __ror__(self, other: WeightsMapper) -> BundleTensors:  # Python asks the subclass first
        return BundleTensors(self._served, WeightsMapper(**_fields(other)) | WeightsMapper(**_fields(self)))

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """Return the bundle's tensors, mapped. Of `weights` the first is read, with which vLLM's clock begins."""
        next(iter(weights), None)
        mapped: Iterable[tuple[str, Tensor]] = super().apply(self._served.tensors())
        return mapped


def _fields(mapper: WeightsMapper) -> dict[str, object]:
    return {name: value for name, value in vars(mapper).items() if name.startswith("orig_to_new")}


class BundleConfig(QuantizationConfig):  # type: ignore[misc]
    """A bundle under a policy, from config.json, `--hf-overrides` or the environment."""

    def __init__(self, given: JsonObject) -> None:
        super().__init__()
        self.given = dict(given)
        self.path = ""
        self._renames: list[WeightsMapper] = []
        self._served: ServedBundle | None = None
        self._loads = 0

    def __getstate__(self) -> dict[str, object]:
        """A copy opens the bundle anew: vLLM sends its config to other processes, and experts stay in theirs."""
        return {**self.__dict__, "_served": None, "_loads": 0}

    @classmethod
    def get_name(cls) -> str:
        """The method's name in config.json."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Dtypes of activations that moepack's kernels take."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """No GPU is required."""
        return 0

    @staticmethod
    def get_config_filenames() -> list[str]:
        """No file beside config.json."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, object]) -> BundleConfig:
        """Read the quantization_config of config.json. Raises InputError for a key that is unknown."""
        return cls(options_in(config))

    def maybe_update_config(self, model_name: str, hf_config: object = None, revision: str | None = None) -> None:
        """Take the bundle's path, and choose its versions before any process starts. Raises as `ServedBundle`."""
        self.path = model_name
        self._served = ServedBundle(model_name, self.given)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: WeightsMapper) -> None:
        """Keep how a model of vLLM renames transformers' modules."""
        self._renames.append(hf_to_vllm_mapper)

    @property
    def served(self) -> ServedBundle:
        """The open bundle of this process."""
        if self._served is None:
            self._served = ServedBundle(self.path, self.given)
        return self._served

    def position(self, prefix: str) -> int:
        """The position in the bundle of the experts that vLLM names `prefix`. Raises InputError if there are none."""
        for at, layer in enumerate(self.served.layers):
            name: str | None = layer.module
            for mapper in self._renames:
                name = None if name is None else mapper.map_name(name)
            if name == prefix:
                return at
        raise InputError(f"{self.path}: has no experts that vLLM calls {prefix}")

    def get_checkpoint_weight_mapper(self) -> WeightsMapper:
        """The bundle's tensors for a model's loader, which asks first; vLLM's own rules for loaders of its parts.

        Raises InputError once the model is loaded: packed experts would stay as they are under other weights.
        """
        if self.served.loaded:
            raise InputError(f"{self.path}: weights of a bundle are not reloaded: start vLLM again")
        base: WeightsMapper = super().get_checkpoint_weight_mapper()
        self._loads += 1
        return base if self._loads > 1 else BundleTensors(self.served, base)

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> MoepackExperts | UnquantizedLinearMethod | None:
        """Run experts from the bundle; leave all other layers to vLLM. Raises InputError for experts in parts."""
        if isinstance(layer, RoutedExperts):
            return MoepackExperts(layer, self.served, self.position(prefix))
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
