"""A bundle for an engine with model code of its own: dense tensors by name, and modules that run packed experts.

This module knows no engine. The versions served never change, and there is no budget: the engine owns the memory beside
experts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.pack.spec import ExpertLayer, Version
from moepack.runtime.attach import load_map
from moepack.runtime.dense.choice import choose_dense
from moepack.runtime.experts import backends
from moepack.runtime.planning.choice import choose_policy
from moepack.runtime.planning.config import read_config
from moepack.runtime.planning.fixed import Fixed
from moepack.runtime.planning.options import LoadOptions
from moepack.runtime.planning.plan import unchanging
from moepack.runtime.planning.skeleton import EXPERT_PARAMETERS, on_meta
from moepack.runtime.policies.registry import parse_policy
from moepack.runtime.store.checked import recording

log = logging.getLogger("moepack.engines")
OPTIONS = ("policy", "dense")  # what an engine's quantisation config may say, beside the method's name


def options_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a quantisation config. Raises InputError for any other key, and for a wrong policy."""
    given = {name: value for name, value in config.items() if name != "quant_method"}
    if unknown := sorted(given.keys() - set(OPTIONS)):
        raise InputError(f"quantization_config has {', '.join(unknown)}: a bundle takes {' and '.join(OPTIONS)} there")
    LoadOptions(**given)
    return given


class ServedBundle:
    """A bundle under a policy that never changes versions."""

    def __init__(self, path: str | Path, given: Mapping[str, Any]) -> None:
        """Open a bundle and choose its versions; reads no weights.

        Args:
            given: options as from `options_in`; MOEPACK_POLICY and MOEPACK_DENSE complete them.

        Raises:
            InputError: for a policy that needs a budget or does not fit the bundle, or a name that is no directory.
            BundleError: for a damaged manifest, configuration or tokenizer.
        """
        if not Path(path).is_dir():
            raise InputError(f"{path}: not a directory: fetch the bundle first, by moepack pull {path} -o DIRECTORY")
        self.bundle = open_bundle(path)
        self.bundle.check()
        options = LoadOptions(**given).with_environment(bool(self.bundle.manifest.dense))
        if options.in_budget:
            raise InputError(f"{path}: no budget is kept here: unset MOEPACK_DEVICE_MEMORY and MOEPACK_MEMORY")
        if options.policy is not None and parse_policy(options.policy).entry.needs_budget:
            raise InputError(
                f"{path}: policy {options.policy} needs a budget, which moepack serve keeps: name a static one"
            )
        self.dense = choose_dense(options.dense, self.bundle, options.policy)
        policy = choose_policy(options.policy, self.bundle, (), False)
        self.table, self.expert_bytes = unchanging(self.bundle, policy, Fixed(0), None)
        self.policy, self._checked = str(policy), bool(options.checked)
        self.handed_over = False  # whether the engine has read all dense tensors
        self._modules: list[Any] = []

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

    def module(self, position: int, device: torch.device, dtype: torch.dtype) -> Any:
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
            modules = _bare(self, dtype)
            with recording(self.bundle, self._checked):
                loaded = load_map(self.bundle, self.table, [device] * len(self.layers))
            for module, experts in zip(modules, loaded, strict=True):
                module._moepack = experts
            backends.prepare(dtype, loaded[0].of.versions, device)
            log.info("%s: %s, %d bytes of packed experts", self.bundle.path, self.policy, self.expert_bytes)
            self._modules = modules
        return self._modules[position]


def _bare(served: ServedBundle, dtype: torch.dtype) -> list[Any]:
    """The experts modules of transformers' own model, which know gate and activation, without weights."""
    model = on_meta(read_config(served.bundle.path, served.bundle.manifest), dtype)
    modules = [model.get_submodule(layer.module) for layer in served.layers]
    for layer, module in zip(served.layers, modules, strict=True):
        for name in EXPERT_PARAMETERS:
            module._parameters.pop(name, None)
        if left := [name for name, _ in module.named_parameters()]:
            raise InputError(f"{served.bundle.path}: {layer.module} has {left[0]} beside experts: not supported here")
    return modules
