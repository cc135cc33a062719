"""Every lasting change that moepack makes to other libraries in its process, each with its reason.

`import moepack` calls `install`; the command line calls `leave_out`, `quiet_libraries` and `wait_briefly`. Other
process-wide settings are made where they are needed: the C library's allocator (devices/glibc.py) and transformers'
reports (calibrate/stream.py), undone there, and an attribute that Llama-4 lacks (families/llama4.py). Importing this
module imports neither torch nor transformers.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from .load_turns import load_turns

SERVING = frozenset({"serve", "generate", "chat", "plan"})
SPINS = 1000  # rounds of a waiting thread; GNU OpenMP's default is 300,000
UNUSED = ("hqq", "scipy", "sklearn", "torchao")


def quiet_libraries() -> None:
    """Silence torch's warning of torchao's enumerations at every import of transformers: users cannot act on it."""
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)


def leave_out(command: str) -> None:
    """Let Python report the UNUSED libraries as missing, in a process that runs a command of SERVING, or plans it.

    transformers imports them wherever it finds them, for other ways to quantise and for losses. No bundle needs them,
    and importing them takes a second of such a command's start (`python -m benchmarks.start`).
    """
    for name in UNUSED if command in SERVING else ():
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def wait_briefly() -> None:
    """Let OpenMP's threads sleep soon when they wait. To be called before torch is imported.

    Threads of GNU OpenMP wait awake for a few ms. Where another program computes, they then hold processors that others
    need: `benchmarks.contexts --beside 1` measures it. A way of waiting that the user set stays.
    """
    if not any(os.environ.get(name) for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def limit_threads() -> None:
    """Let torch compute on no more threads than there are processors: OpenMP does not see a control group's quota.

    With more, threads wait for one that the quota has stopped. A number that the user set in OMP_NUM_THREADS or
    MKL_NUM_THREADS stays.
    """
    import torch

    from moepack.pack.processors import processors

    given = any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if not given and torch.get_num_threads() > processors():
        torch.set_num_threads(processors())


def register_plugin() -> None:
    """Register the plug-in with transformers, so that a bundle loads like any quantised model.

    transformers has an interface to register a config and a quantiser. But its merge of config.json's config and a
    caller's knows only transformers' own classes, and would drop most of the caller's options, with a warning.
    """
    from transformers.integrations.moe import ExpertsInterface
    from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer

    from moepack.runtime.experts.forward import IMPLEMENTATION, experts_forward
    from moepack.runtime.planning.options import METHOD

    from .plugin import MoepackConfig, MoepackQuantizer

    register_quantization_config(METHOD)(MoepackConfig)
    register_quantizer(METHOD)(MoepackQuantizer)
    ExpertsInterface.register(IMPLEMENTATION, experts_forward)
    original = AutoHfQuantizer.merge_quantization_configs

    def merge(own: Any, given: Any) -> Any:
        return given.merged(own) if isinstance(given, MoepackConfig) else original(own, given)

    AutoHfQuantizer.merge_quantization_configs = staticmethod(merge)  # type: ignore[method-assign,assignment]


def extend_from_pretrained() -> None:
    """Let `from_pretrained` take `policy`, `device_memory` and the like, which transformers would hand to the model.

    It also passes on what the plug-in needs and transformers does not tell a quantiser: the model's name, how files are
    fetched, and the experts' implementation. Models are constructed in turns (load_turns.py).
    """
    from transformers import modeling_utils

    from moepack.pack.errors import InputError
    from moepack.runtime.planning.options import DEVICE_MEMORY, MEMORY, SERVED, WORKLOAD

    kind: Any = modeling_utils.PreTrainedModel
    set_dtype = modeling_utils.local_torch_dtype

    @contextmanager
    def local_torch_dtype(*args: Any, **kwargs: Any) -> Iterator[None]:
        with load_turns.constructing(), set_dtype(*args, **kwargs):
            yield

    modeling_utils.local_torch_dtype = local_torch_dtype
    original = kind.from_pretrained.__func__
    keywords = set(SERVED) - set(WORKLOAD)

    @functools.wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        from .plugin import HUB, Asked, MoepackConfig, asked

        given = kwargs.get("quantization_config")
        ours = isinstance(given, MoepackConfig) or kwargs.keys() & keywords
        if ours or (any(map(os.environ.get, (DEVICE_MEMORY, MEMORY))) and kwargs.keys() & set(WORKLOAD)):
            if not isinstance(given, MoepackConfig | None):
                raise InputError(f"policy and device_memory are for bundles, not for a {type(given).__name__}")
            mine = {} if given is None else given.given
            asks = {name: kwargs.pop(name) for name in SERVED if name in kwargs}
            kwargs["quantization_config"] = MoepackConfig(**{**mine, **asks})
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        experts = kwargs.get("experts_implementation") or getattr(kwargs.get("config"), "_experts_implementation", None)
        with ExitStack() as held:
            before = asked.set(Asked(str(name), {name: kwargs[name] for name in HUB if name in kwargs}, experts, held))
            held.callback(asked.reset, before)
            return original(cls, *args, **kwargs)

    kind.from_pretrained = classmethod(from_pretrained)


def count_tokens_of_minimax() -> None:
    """Let MiniMax's cache know its length.

    transformers asks its first layer, which attends linearly and keeps no keys. Behind such a cache a pass names places
    from the text's beginning on, and its mask shows it none of the text before.
    """
    from transformers.models.minimax.modeling_minimax import MiniMaxCache

    kind: Any = MiniMaxCache
    length = kind.get_seq_length
    sizes = kind.get_mask_sizes

    def first_with_keys(cache: Any) -> int:
        return next((i for i, layer in enumerate(cache.layers) if layer.get_seq_length()), 0)

    kind.get_seq_length = lambda cache, layer_idx=0: length(cache, first_with_keys(cache))
    kind.get_mask_sizes = lambda cache, tokens, layer_idx=0: sizes(cache, tokens, first_with_keys(cache))


_AFTER: dict[str, Callable[[], object]] = {  # modules, and the function to call right after each has run
    "torch": limit_threads,
    "transformers.quantizers.auto": lambda: importlib.import_module("moepack.runtime.plugin"),
    "moepack.runtime.plugin": register_plugin,
    "transformers.modeling_utils": extend_from_pretrained,
    "transformers.models.minimax.modeling_minimax": count_tokens_of_minimax,
}


class _Loader(Loader):
    """Runs another loader, then calls a function."""

    def __init__(self, inner: Loader, after: Callable[[], object]) -> None:
        self._inner = inner
        self._after = after

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._inner
        self._after()


class _Finder(MetaPathFinder):
    """An import hook: once a module of `_AFTER` has run, call its function."""

    def __init__(self) -> None:
        self._left = dict(_AFTER)
        self._looking: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._left or name in self._looking:
            return None
        self._looking.add(name)
        try:
            spec = find_spec(name)
        finally:
            self._looking.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, lambda: self.ran(name))
        return spec

    def ran(self, name: str) -> None:
        """Call a module's function of `_AFTER`, once."""
        if (after := self._left.pop(name, None)) is not None:
            after()


def install() -> None:
    """Extend transformers now, or by an import hook when its modules are imported.

    So moepack and transformers may be imported in either order, and `import moepack` does not import transformers.
    """
    if not any(isinstance(f, _Finder) for f in sys.meta_path):
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        for name in _AFTER:
            if sys.modules.get(name) is not None:
                finder.ran(name)
