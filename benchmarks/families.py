"""Which Mixture-of-Experts families of transformers moepack builds and serves, and why it refuses the others.

    python -m benchmarks.families [--only NAME ...] [--json FILE]

The list is transformers' own: every model that generates text and whose code has experts. Of each a random model is
made, as small as its configuration allows, with decoder layers of every kind that it has. The model is saved as a
checkpoint, built (rounding to nearest), loaded and held against the plain model: logits of a prompt, of single tokens
after it and of three more, and every parameter outside the experts, towers for images and sound among them. In float32,
in a budget, logits are the same. In BF16, by the model and by the server's engine, their error against float32 is at
most MORE times plain BF16's, where all are given the choices made in float32: of experts, and of an indexer's tokens.
With their own choices, decoder layers in one call have the bits of their parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from benchmarks.common import arguments, finish
from benchmarks.decoding import Reading

if TYPE_CHECKING:
    from torch import Tensor
    from torch._ops import OpOverload
    from transformers import PreTrainedConfig, PreTrainedModel

    from moepack.calibrate.stream import StreamedModel
    from moepack.runtime.served_model import CausalModel

ROOT = Path(__file__).resolve().parent.parent
RECIPE = """
versions: [bf16, w4]
quantize: {method: rtn, group_size: 32, loss_tokens: 32}
calibration: {samples: 2, length: 32, batch_size: 2}
"""
QUICK = ("qwen3_moe", "llama4", "qwen3_vl_moe", "dbrx")
TOKENS = (16, 1, 1, 1, 1, 1, 3)  # of a prompt, and of the passes after it
MORE = 1.2  # the most error in BF16, as a multiple of plain BF16's
MORE_CODED = 3.0  # the same for a cache in 8 bits
CLOSE = 1e-3  # of the logits' norm; weights are the same, sums are in another order
_HAS_EXPERTS = re.compile(r"use_experts_implementation|^class \w*(Experts|MoE|Moe|MOE|SparseMoeBlock)\w*\(", re.M)
_ATTENTION = re.compile(r'"((?:full|\w*sliding|chunked|indexed|linear|window|\w*compressed_sparse)_attention)"')
# Of configurations: `small`, `tower` and `own`, which the file explains.
SIZES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


@dataclasses.dataclass(frozen=True)
class Family:
    """A model of transformers: its `model_type`, and the class that generates text, if there is one."""

    model_type: str
    architecture: str


def walk() -> list[Family]:
    """Every model of transformers whose code has experts."""
    from transformers.models.auto import modeling_auto as models

    makes_text: dict[str, str] = {}
    for table in ("IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "CAUSAL_LM", "SEQ_TO_SEQ_CAUSAL_LM"):  # with its tower first
        for model_type, name in getattr(models, f"MODEL_FOR_{table}_MAPPING_NAMES", {}).items():
            makes_text.setdefault(model_type, name if isinstance(name, str) else name[0])
    found = [Family(*of) for of in makes_text.items() if _HAS_EXPERTS.search(_source(of[0]))]
    return sorted(found, key=lambda f: f.model_type)


def _source(model_type: str) -> str:
    """The code of a model of transformers."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(inspect.getfile(transformers)).parent / "models" / model_type_to_module_name(model_type)
    return "".join(path.read_text() for path in sorted(folder.glob("modeling_*.py")))


def attentions(model_type: str) -> set[str]:
    """The kinds of attention that a model's code names, as `kinds` does."""
    return {found.removesuffix("_attention") for found in _ATTENTION.findall(_source(model_type))}


def small(model_type: str) -> PreTrainedConfig:
    """The configuration of a small model."""
    return _small(_by_name(model_type), SIZES["small"], SIZES["own"].get(model_type, {}))


def _by_name(model_type: str) -> type[PreTrainedConfig] | None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return CONFIG_MAPPING[model_type]  # its `get` knows of none
    except KeyError:
        return None


def _small(kind: Any, values: Mapping[str, object], own: Mapping[str, Any]) -> PreTrainedConfig:
    known = {f.name for f in dataclasses.fields(kind)}
    parts = getattr(kind, "sub_configs_defaults", {})
    given: dict[str, object] = {}
    for name, spec in parts.items():
        part = _by_name(spec.model_type) or spec.config_class
        if dataclasses.is_dataclass(part) and name in known:
            text = name in ("text_config", "thinker_config")
            its = {n: v for n, v in own.items() if n not in (*parts, "")} if text else own.get(name, {})
            made = _small(part, SIZES["small" if text else "tower"], its)
            given[name] = made.to_dict()
    reached = known | set(getattr(kind, "attribute_map", {}))
    given |= {n: v for n, v in values.items() if n in reached and not (parts and n not in _PLAIN)}
    whole: PreTrainedConfig = kind(**{**given, **(own.get("", {}) if parts else own)})
    return whole


_PLAIN = ("pad_token_id", "bos_token_id", "eos_token_id")  # what a configuration of parts has of its own


def save(config: PreTrainedConfig, path: Path, tokenizer: Path) -> Any:
    """A random model of a configuration, saved as a checkpoint that a user would download."""
    import torch

    from moepack.families.model_class import auto_class

    torch.manual_seed(0)
    model = auto_class(config).from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "bias" in name or "experts" in name:
                parameter.normal_(0, 0.1)
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):  # a token's experts, from a table that only a checkpoint has
                buffer.copy_(torch.rand(len(buffer), 8).topk(buffer.shape[1]).indices)
    model.to(torch.bfloat16).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((tokenizer / name).read_bytes())
    return model


def attempt(family: Family, folder: Path) -> dict[str, str]:
    """What comes of a family: "works", "refused" and why, or "no small model" where transformers makes none."""
    from moepack.calibrate.stream import quiet_transformers
    from moepack.families.model_class import auto_class
    from moepack.pack.errors import MoepackError

    row = {"model_type": family.model_type, "class": family.architecture}
    checkpoint = folder / "checkpoint"
    example = ROOT / "examples"
    with warnings.catch_warnings(), quiet_transformers():
        warnings.simplefilter("ignore")
        try:
            config = small(family.model_type)
            config.architectures = [family.architecture]
            try:
                auto_class(config)
            except ValueError as error:
                return row | {"outcome": "refused", "why": _line(error, folder)}
            save(config, checkpoint, example / "mini-qwen3-moe")
        except Exception as error:  # whatever a family's own code raises
            return row | {"outcome": "no small model", "why": _line(error, folder)}
        try:
            return row | {"outcome": "works"} | _served(checkpoint, folder / "bundle", example)
        except MoepackError as error:
            return row | {"outcome": "refused", "why": _line(error, folder)}
        except Exception as error:
            return row | {"outcome": "broken", "why": f"{type(error).__name__}: {_line(error, folder)}"}


def layout(stream: StreamedModel) -> str:
    """How a checkpoint has its experts, from which follow the released formats that are read of such a model."""
    from moepack.calibrate.experts import parameter_names

    index, layer = next(iter(stream.expert_layers.items()))
    module = stream.experts_module(index)
    matrices = [f"{layer.module}.{weight}" for weight, _ in parameter_names(module).values()]
    weights = [key for name in matrices for key in stream.weights_of(name)]
    if stream._expert_parts(index, range(1)) is None:
        return "joined"
    if all(len(stream.checkpoint.shape(key)) == 2 for key in weights):
        return "apart"
    if module.is_transposed:
        return "turned"
    return "stacked" if all(key.endswith(".weight") for key in weights) else "stacked, no `.weight`"


def _line(error: Exception, folder: Path) -> str:
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return text.replace(f"{folder}/checkpoint: ", "").replace(f"{folder}/bundle: ", "")[:200]


def _served(checkpoint: Path, bundle: Path, example: Path) -> dict[str, str]:
    """Build, load and compare; what is noteworthy, how the checkpoint has its experts, and the errors of BF16."""
    import torch

    import moepack
    from moepack.calibrate.checkpoint import open_checkpoint
    from moepack.calibrate.stream import StreamedModel
    from moepack.families.model_class import auto_class
    from moepack.pack.errors import InputError
    from moepack.pipeline.recipe import parse_recipe
    from moepack.runtime.dense.by_row import serve_rows
    from moepack.server.batching.packed_cache import layers_with_states

    moepack.build(checkpoint, bundle, parse_recipe(RECIPE, "walk"), [example / "text" / "calibration.jsonl"])
    stream = StreamedModel(open_checkpoint(checkpoint))
    kind = auto_class(stream.checkpoint.config)

    def transformers_own(dtype: torch.dtype) -> Any:
        model = kind.from_pretrained(checkpoint, dtype=dtype)
        serve_rows(model, layers_with_states(model.config))  # Jamba's later passes do not go on from its state
        return model

    exact = transformers_own(torch.float32)
    if not _calibrates(stream, exact):
        raise AssertionError("calibration does not see the model's own hidden states")
    ids = torch.randint(1, 4000, (1, sum(TOKENS)), generator=torch.Generator().manual_seed(1))
    want = Passes.of(exact, ids)
    why = ""
    asked: dict[str, Any] = {"policy": "static:bf16", "dtype": torch.float32}
    given: dict[str, Any] = {
        "prefill_tokens": TOKENS[0],
        "kv_tokens": len(ids[0]) + 8,
        "batch": 1,
        "all_logits": True,
    }
    try:  # no small model needs more than a GiB
        ours = moepack.load(bundle, device_memory=1 << 30, **given, **asked)
    except InputError as error:
        why = "not in a budget: " + _line(error, bundle.parent).removesuffix(": serve it without a budget")
        ours = moepack.load(bundle, **asked)
    with ours.moepack:
        apart = Passes.of(ours, ids).error(want)
    if not apart <= CLOSE:
        raise AssertionError(f"logits differ by {apart:.2g} of their norm")
    plain = transformers_own(torch.bfloat16)
    ours = moepack.load(bundle, policy="static:bf16", dtype=torch.bfloat16)
    if type(ours).__mro__[1].__name__ != type(plain).__name__:
        raise AssertionError(f"was loaded as {type(ours).__mro__[1].__name__}")
    experts = tuple(f"{layer.module}." for layer in moepack.open(bundle).layers)
    held = dict(ours.named_parameters())
    for name, parameter in plain.named_parameters():
        if not name.startswith(experts) and not torch.equal(held[name], parameter):
            raise AssertionError(f"{name} differs")
    rounding = Passes.of(plain, ids, want.choices).error(want)
    apart = 0.0
    for kv, most in (("16", MORE), ("8", MORE_CODED)):
        if kv != "16":
            try:
                ours = moepack.load(bundle, policy="static:bf16", dtype=torch.bfloat16, kv=kv)
            except InputError:  # no layer has a cache that grows
                continue
        if not torch.equal(_in_one_call(ours, ids), _in_one_call(ours, ids, layers=False)):
            raise AssertionError(f"a cache of {kv} bits: layers in one call have other bits than their parts")
        for way, served in (("", False), (" served", True)):
            differs = Passes.of(ours, ids, want.choices, served).error(want)
            if not differs <= most * rounding:
                how = way if kv == "16" else f"{way} with a cache of {kv} bits"
                raise AssertionError(
                    f"in BF16{how}, logits differ by {differs:.2g} of their norm, plain's by {rounding:.2g}"
                )
            if kv == "16":
                apart = max(apart, differs)
    return {
        "why": why,
        "experts": layout(stream),
        "layers": ", ".join(kinds(plain, experts)),
        "plain": f"{rounding:.4f}",
        "moepack": f"{apart:.4f}",
        "ratio": f"{apart / rounding:.2f}",
    }


def kinds(model: Any, experts: Sequence[str]) -> list[str]:
    """The kinds of decoder layers that a model has, as its configuration says, and where `experts` are."""
    config = model.config.get_text_config(decoder=True)
    names = ("sliding_window", "layer_types", "no_rope_layers", "layers_block_type")
    said = {name: getattr(config, name, None) for name in names}
    numbered = re.compile(r"(.*?\.)(\d+)\.")
    layers = numbered.match(experts[0])
    assert layers is not None
    sparse = {int(found[2]) for name in experts if (found := numbered.match(name))}
    window = "sliding" if said.get("sliding_window") else "full"
    out = []
    for i in range(len(model.get_submodule(layers[1].rstrip(".")))):
        attention = (said.get("layer_types") or {i: window})[i].removesuffix("_attention")
        rotates = "" if (said.get("no_rope_layers") or {i: 1})[i] else " unrotated"
        out.append(f"{attention}{rotates} {'sparse' if i in sparse else 'dense'}")
    return list(dict.fromkeys(out))


class Passes:
    """What a model makes of TOKENS with a cache: logits, and the choices among floats in its passes.

    Where a router's scores are level, rounding decides, in a model and in the one that it is compared with. So choices
    may be given: of experts, of groups of them, and of an indexer's tokens.
    """

    def __init__(self, logits: Tensor, choices: list[Tensor]) -> None:
        self.logits = logits
        self.choices = choices

    @staticmethod
    def of(model: CausalModel, ids: Tensor, given: Sequence[Tensor] | None = None, served: bool = False) -> Passes:
        """Run a model over `ids`, with the choices `given`, in order, in place of its own; `served`: by the engine."""
        import torch

        run = _by_engine(model) if served else Reading(model)
        logits = []
        with _choices(given) as mode, torch.inference_mode():
            for part in ids.split(TOKENS, dim=1):
                logits.append(run(part).float())
        return Passes(torch.cat(logits, dim=1), mode.made)

    def error(self, want: Passes) -> float:
        """The difference of the logits, as a share of the norm of those wanted."""
        return float((self.logits - want.logits).norm() / want.logits.norm())


def _in_one_call(model: CausalModel, ids: Tensor, layers: bool = True) -> Tensor:
    """Logits of a model over `ids` with its own choices, with decoder layers in one call or part by part."""
    from unittest.mock import patch

    import torch

    from moepack.runtime.dense.watched import Watched

    run = Reading(model)
    with contextlib.ExitStack() as stack:
        if not layers:
            stack.enter_context(patch.object(Watched, "unchanged", lambda watched, layer: False))
        stack.enter_context(torch.inference_mode())
        return torch.cat([run(part) for part in ids.split(TOKENS, dim=1)], dim=1)


def _by_engine(model: CausalModel) -> Callable[[Tensor], Tensor]:
    """Passes of the server's engine: packed, or, where the model cannot be packed, of one sequence each."""
    from moepack.server.batching.engine import Engine, StepInput
    from moepack.server.batching.packed_cache import NotPackable

    engine = Engine(model, step_tokens=max(TOKENS))
    first = engine.add(wanted=1)
    with contextlib.suppress(NotPackable):  # from now on it is not
        engine.run([StepInput(first, [1])])
    engine.remove(first)
    slot = engine.add(wanted=sum(TOKENS))

    def run(ids: Tensor) -> Tensor:
        (logits,) = engine.run([StepInput(slot, ids[0].tolist(), wanted=ids.shape[1])])
        assert logits is not None
        return logits[None]

    return run


def _in_transformers() -> bool:
    """Whether the running operation is of a model's code, or of an indexer's that chooses in place of it.

    What else moepack runs in place of a model's code makes no choice of the model's.
    """
    frame = sys._getframe(2)
    while frame.f_back is not None:
        name = str(frame.f_globals.get("__name__"))
        if name == "moepack.runtime.dense.indexer":
            return True
        package = name.partition(".")[0]
        if package in ("transformers", "moepack"):
            return package == "transformers"
        frame = frame.f_back
    return False


def _choices(given: Sequence[Tensor] | None) -> Any:
    """A mode of torch that keeps the indices of what is greatest among floats, or gives those that are `given`."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    axis_at = {aten.topk.default: 2, aten.sort.default: 1}  # among the arguments

    class Choices(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.made: list[Tensor] = []
            self._left = None if given is None else iter(given)

        def __torch_dispatch__(self, function: OpOverload, types: object, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if function not in axis_at or not args[0].is_floating_point() or not _in_transformers():
                return out
            if self._left is None:
                self.made.append(out[1])
                return out
            at = axis_at[function]
            index = next(self._left, None)
            if index is None or index.shape != out[1].shape:
                raise AssertionError("the model chooses among other numbers than in float32")
            axis = args[at] if len(args) > at else (kwargs or {}).get("dim", -1)
            return args[0].gather(axis, index), index

    return Choices()


def _calibrates(stream: StreamedModel, plain: PreTrainedModel) -> bool:
    """Whether what goes through the layers one by one is what goes through the plain model's, for two texts."""
    import torch

    from moepack.calibrate.forward import CalibrationPass

    ids = torch.randint(1, 4000, (2, 24), generator=torch.Generator().manual_seed(2))
    want = []
    walk = CalibrationPass(stream, ids, 1, torch.float32)
    stream.load(None)
    stream.to_compute(None, torch.float32)
    walk.start()
    for i in range(len(stream.layers)):
        stream.load(i)
        stream.to_compute(i, torch.float32)
        walk.run_layer(i)
    last = plain.get_submodule(f"{stream.prefix}.{len(stream.layers) - 1}")
    hook = last.register_forward_hook(lambda module, args, out: want.append(out[0] if isinstance(out, tuple) else out))
    with torch.inference_mode():
        for one in ids.split(1):
            plain(input_ids=one, use_cache=False)
    hook.remove()
    return all(float((a - b).norm()) <= CLOSE * float(b.norm()) for a, b in zip(walk.hidden, want, strict=True))


def all_rows(families: Iterable[Family]) -> Iterator[dict[str, str]]:
    """What comes of each, one after another."""
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            yield attempt(family, Path(folder))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="*", help="of these model types")
    args = parser.parse_args()
    rows = []
    wanted = args.only or (QUICK if args.quick else [f.model_type for f in walk()])
    for row in all_rows(f for f in walk() if f.model_type in wanted):
        print(json.dumps(row), flush=True)
        rows.append(row)
    finish("Families", rows, [], args.json)


if __name__ == "__main__":
    main()
