"""What one decoding step of a model does on a GPU: operations, launches of the experts' products, bytes of matrices.

Needs no GPU and no weights: a model of the whole shape is made of fake tensors, and one token goes through it as the
runtime would send it on a GPU, with every operation counted. Views and allocations are no operations; attention's
product is one. An operation that gives the host a number is a synchronisation.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common import EXAMPLES
from benchmarks.kernels.launches import launched
from benchmarks.limited.shapes import SHAPES
from moepack.pack.spec import ExpertLayer, Matrix, Version
from moepack.runtime.experts import gpu
from moepack.runtime.experts.counters import Counters
from moepack.runtime.experts.forward import IMPLEMENTATION
from moepack.runtime.kernels.forms import make_forms
from moepack.runtime.policies.placements import Where

CONFIGS = {  # of models that figures are published of
    "Qwen3-30B-A3B": lambda: SHAPES["qwen3-moe"].config(),
    "gpt-oss-120b": lambda: _example("gpt-oss-120b"),
    "Qwen3.8-Flash-Next": lambda: _example("qwen3.8-flash-next"),
}
ALLOCATE = ("empty", "new_empty", "empty_like", "empty_strided", "device", "detach", "_local_scalar_dense")
WAITS = ("nonzero", "_local_scalar_dense", "unique_dim", "_unique2")
PRODUCTS = {"mm": 1, "addmm": 2, "bmm": 1}  # which argument holds a matrix of weights


def _example(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((EXAMPLES / "configs" / name / "config.json").read_text())
    return {k: v for k, v in document.get("text_config", document).items() if k != "quantization_config"}


class Operations(TorchDispatchMode):
    """Counts what is dispatched while it is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[str] = Counter()
        self.waits = 0
        self.matrices: list[int] = []  # bytes of each matrix of weights that a token is multiplied by

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note an operation, and do it."""
        name = function.__name__.partition(".")[0]
        if not function.is_view and name not in ALLOCATE:
            self.seen[name] += 1
        self.waits += name in WAITS
        if name in PRODUCTS and (weight := args[PRODUCTS[name]]).numel() > 1 << 16:
            self.matrices.append(weight.numel() * weight.element_size())
        return function(*args, **(kwargs or {}))


@contextmanager
def _attention(of: Operations) -> Iterator[None]:
    """Attention's product as the one launch that it is on a GPU."""

    def product(query: Any, key: Any, value: Any, *more: Any, **named: Any) -> Any:
        of.seen["scaled_dot_product_attention"] += 1
        return query.new_empty(*query.shape[:-1], value.shape[-1])

    with patch.object(torch.nn.functional, "scaled_dot_product_attention", product):
        yield


def _on_fake_gpu(model: Any) -> None:
    """Let the model's tensors be of a GPU that is not there."""
    for module in model.modules():
        for held, wrap in ((module._parameters, True), (module._buffers, False)):
            for name, tensor in held.items():
                if tensor is not None:
                    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")
                    held[name] = torch.nn.Parameter(made, requires_grad=False) if wrap else made


def _experts(config: Any, version: str) -> tuple[ExpertLayer, Version]:
    inner = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
    count = getattr(config, "num_experts", None) or config.num_local_experts
    bias = config.model_type == "gpt_oss"
    matrices = (
        Matrix("gate_up", 2 * inner, config.hidden_size, bias=bias),
        Matrix("down", config.hidden_size, inner, bias=bias),
    )
    return ExpertLayer(0, "experts", count, matrices), Version.of(version, 32 if version == "mxfp4" else 128)


def attach(model: Any, current: Any) -> int:
    """Put one layer's experts behind all of a model's experts modules; return how many there are."""
    found = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    for module in found:
        module._moepack = SimpleNamespace(
            of=current.of,
            current=current,
            model=None,
            steps=None,
            position=0,
            number=0,
            no_gradients="",
            is_closed=False,
        )
    return len(found)


def fake_experts(layer: ExpertLayer, version: Version) -> Any:
    """What the forward reads of a layer whose experts have no bytes, on a GPU that is not there."""
    table = torch.zeros(layer.experts, dtype=torch.int64, device="cuda")
    of: Any = SimpleNamespace(
        layer=layer,
        device_table=lambda: table,
        served=[0],
        forms={version.name: make_forms(layer.matrices, version)},
        device=torch.device("cuda", 0),
        makes_up_for_absent=False,
        tier=None,
        places=frozenset({Where.DEVICE}),
        only=lambda index, here: index,
        backend="triton",
        rotation=None,
        launched=(),
        in_window=False,
        in_place=None,
        staged=None,
    )
    of.of = of
    return of


def counted(name: str) -> dict[str, Any]:
    """The second token of a sequence through a model of CONFIGS, at one version of all experts."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.cache_utils import DynamicCache

    import moepack.runtime.plugin  # noqa: F401  # registers the experts' implementation

    document = CONFIGS[name]()
    with tempfile.TemporaryDirectory() as work:
        (Path(work) / "config.json").write_text(json.dumps(document))
        config = AutoConfig.from_pretrained(work)
    config = config.get_text_config()
    layer, version = _experts(config, "mxfp4" if config.model_type == "gpt_oss" else "w4")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation(IMPLEMENTATION)
    count = Operations()
    of_experts = list[int]()
    inside = gpu.forward

    def forward(call: Any) -> Any:
        before = sum(count.seen.values()) + len(kept)
        out = inside(call)
        of_experts.append(sum(count.seen.values()) + len(kept) - before)
        return out

    with (
        patch.object(gpu, "forward", forward),
        FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()),
        launched() as kept,
        torch.no_grad(),
    ):
        _on_fake_gpu(model)
        layers = attach(model, fake_experts(layer, version))
        cache = DynamicCache(config=config)
        token = torch.zeros(1, 1, dtype=torch.long, device="cuda")
        with count, _attention(count):
            for _ in range(2):
                count.seen.clear()
                count.matrices.clear()
                kept.clear()
                count.waits = 0
                model(token, past_key_values=cache, use_cache=True)
        counting = Operations()
        counters = Counters([layer.experts], True, torch.device("cpu"))
        index = torch.zeros(1, 8, dtype=torch.long)
        counters._on_host = False
        with counting:
            counters.add(0, index, torch.zeros(1, 8))
    return {
        "layers": layers,
        "operations": sum(count.seen.values()) + len(kept),
        "launches of Triton": len(kept),
        "operations of experts, a layer": of_experts[-1],
        "counting, a layer": sum(counting.seen.values()),
        "synchronisations": count.waits,
        "matrices": len(count.matrices),
        "bytes of matrices": sum(count.matrices),
        "hidden": config.hidden_size,
        "inner": layer.matrices[1].cols,
        "experts": layer.experts,
        "top_k": config.num_experts_per_tok,
        "bias": layer.matrices[0].bias,
    }
