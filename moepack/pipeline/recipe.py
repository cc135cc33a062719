"""Recipes: the YAML that says how a bundle is made, validated key by key.

A recipe is a frozen record. Its text travels into the bundle's manifest.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from moepack.families import mtp
from moepack.pack.errors import InputError
from moepack.pack.spec import GROUPS, LOSSLESS, Version, encoding_of, version_names
from moepack.quantize import methods

MOMENTS = ("routed", "gated", "all")

ALLOCATORS = ("greedy", "prefix_split", "uniform")
OLD_ALLOCATORS = {"milp": "greedy"}  # solved the same problem, with gains below what is measurable: read as greedy
WEIGHTS = ("gates", "tokens", "none")


MOST = 8  # times `samples`: where `until` ends if a recipe does not say

# What a recipe makes that names none: experts at 8 bits are seldom worth their bytes beside those at 4.
DEFAULT_VERSIONS = ("bf16", "w4", "w3", "w2", "w1")


@dataclass(frozen=True, slots=True)
class Quantize:
    """How experts are quantised; see `moepack.quantize.expert_batch.Settings`."""

    method: str = methods.DEFAULT
    group_size: int | Mapping[str, int] = 64
    min_tokens: int = 0
    loss_tokens: int = 4096
    moments: str = "routed"


@dataclass(frozen=True, slots=True)
class TextSource:
    """Text to calibrate on: a file or a Hub data set (NAME[:CONFIG[:SPLIT[:COLUMN]]]), and its part beside others'."""

    source: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The text that the model reads."""

    data: tuple[TextSource, ...] = ()
    samples: int = 128  # windows of `length` tokens
    length: int = 2048
    batch_size: int = 8
    seed: int = 0
    dtype: str = "bfloat16"
    until: int = 0  # take more windows until every expert has this many tokens; 0: do not
    most: int = 0  # the most windows that `until` takes


@dataclass(frozen=True, slots=True)
class Allocate:
    """Which version each expert gets in the bundle's own map; see `moepack.pipeline.allocate.allocate`."""

    average_bits: float  # bytes of all extents, with tables and padding, as bits an expert weight
    method: str = "greedy"  # "greedy", "prefix_split" or "uniform"
    weight: str = "gates"  # of the losses, for greedy: "gates", "tokens" or "none" (`allocate.expected_losses`)
    dense: bool = False  # choose dense matrices with the experts, and count their bytes and weights

    def __str__(self) -> str:
        weighted = f", losses weighted by {self.weight}" if self.method == "greedy" else ""
        both = " of experts and dense matrices" if self.dense else ""
        return f"{self.method} at {self.average_bits:g} bits{both}{weighted}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A validated recipe, and the text it came from.

    `mtp` says whether a checkpoint's layers for multi-token prediction are kept beside the model, as they are, or not.
    """

    versions: tuple[str, ...] = DEFAULT_VERSIONS
    quantize: Quantize = field(default_factory=Quantize)
    calibration: Calibration = field(default_factory=Calibration)
    allocation: Allocate | None = None
    dense: tuple[str, ...] = ()
    text: str = ""
    mtp: str = "drop"

    def version_specs(self) -> tuple[Version, ...]:
        """The versions as descriptors, from most to least precise."""
        return self._specs(self.versions)

    def dense_specs(self) -> tuple[Version, ...]:
        """Those of the dense matrices, the lossless one always among them; none where the recipe asks for none."""
        return self._specs((LOSSLESS, *self.dense)) if self.dense else ()

    def _specs(self, names: Sequence[str]) -> tuple[Version, ...]:
        size = self.quantize.group_size
        return tuple(
            Version.of(name, size if isinstance(size, int) else size.get(name, 64))
            for name in version_names()
            if name in names
        )


def shipped() -> list[str]:
    """Names of the recipes that come with moepack."""
    root = resources.files("moepack.recipes")
    return sorted(f.name.removesuffix(".yaml") for f in root.iterdir() if f.name.endswith(".yaml"))


def load_recipe(name: str) -> Recipe:
    """A recipe by its shipped name or its file.

    Raises:
        InputError: naming the file, the key and, for an unknown key, the nearest known one.
    """
    if name in shipped():
        return parse_recipe(resources.files("moepack.recipes").joinpath(f"{name}.yaml").read_text(), name)
    path = Path(name)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        if path.suffix in (".yaml", ".yml") or "/" in name:
            raise InputError(f"{name}: cannot be read: {error}") from None
        raise InputError(f"{name}: {_unknown('recipe', name, shipped())}") from None
    return parse_recipe(text, name)


def parse_recipe(text: str, where: str) -> Recipe:
    """Validate a recipe's text; `where` names it in errors."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    top = _mapping(
        where,
        {} if document is None else document,
        ["versions", "dense", "quantize", "calibration", "allocation", "mtp"],
    )
    versions = tuple(_list(f"{where}: versions", top.get("versions", list(DEFAULT_VERSIONS)), version_names()))
    if not versions or len(set(versions)) != len(versions):
        raise InputError(f"{where}: versions: name each version once, and at least one")
    dense = tuple(_list(f"{where}: dense", top.get("dense", []), version_names()))
    if len(set(dense)) != len(dense):
        raise InputError(f"{where}: dense: name each version once")
    at = f"{where}: quantize"
    q = _mapping(at, top.get("quantize", {}), [f.name for f in fields(Quantize)])
    size = q.get("group_size", 64)
    if isinstance(size, dict):
        size = _mapping(f"{at}.group_size", size, [v for v in version_names() if encoding_of(v).group_sizes])
        for name, value in size.items():
            _choice(f"{at}.group_size.{name}", value, encoding_of(name).group_sizes)
    else:
        possible = [sizes for sizes in (encoding_of(v).group_sizes for v in (*versions, *dense)) if sizes]
        _choice(f"{at}.group_size", size, [g for g in GROUPS if all(g in sizes for sizes in possible)])
    quantize = Quantize(
        _choice(f"{at}.method", q.get("method", methods.DEFAULT), methods.named()),
        size,
        _integer(f"{at}.min_tokens", q.get("min_tokens", 0), 0),
        _integer(f"{at}.loss_tokens", q.get("loss_tokens", 4096), 1),
        _choice(f"{at}.moments", q.get("moments", "routed"), MOMENTS),
    )
    calibration = _calibration(f"{where}: calibration", top.get("calibration", {}))
    allocation = (
        _allocation(f"{where}: allocation", top["allocation"], versions, dense) if "allocation" in top else None
    )
    kept = _choice(f"{where}: mtp", top.get("mtp", "drop"), mtp.CHOICES)
    return Recipe(versions, quantize, calibration, allocation, dense, text, kept)


def with_versions(recipe: Recipe, versions: Sequence[Version], dense: Sequence[Version]) -> Recipe:
    """A recipe that makes these versions of experts and of dense matrices in place of its own; its text is written
    anew, without comments.

    Raises:
        InputError: where both have one of them with other group sizes: a recipe has one for both.
    """
    sizes = {v.name: v.group_size for v in (*dense, *versions) if v.group_size}
    for v in dense:
        if v.group_size and sizes[v.name] != v.group_size:
            raise InputError(
                f"{v.name}: dense matrices would have it in groups of {v.group_size}, experts of {sizes[v.name]}: a "
                "recipe has one group size for both: replace it in both, by --add and --add-dense"
            )
    document = yaml.safe_load(recipe.text) or {}
    document["versions"] = [v.name for v in versions]
    if dense or recipe.dense:
        document["dense"] = [v.name for v in dense]
    alike = len(set(sizes.values())) <= 1
    quantize = dict(document.get("quantize") or {})
    quantize["group_size"] = next(iter(sizes.values()), 64) if alike else sizes
    document["quantize"] = quantize
    return parse_recipe(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "recipe")


def with_text(recipe: Recipe) -> Recipe:
    """A recipe with the text that says it: its own, or where it was made or changed in Python a text written anew.

    Raises:
        InputError: where it says what no text may.
    """
    if parse_recipe(recipe.text, "recipe") == recipe:
        return recipe
    document = asdict(recipe)
    del document["text"]
    if not recipe.calibration.until:
        del document["calibration"]["most"]
    if recipe.allocation is None:
        del document["allocation"]
    elif recipe.allocation.method != "greedy":
        del document["allocation"]["weight"]
    return parse_recipe(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "recipe")


def _calibration(at: str, value: Any) -> Calibration:
    c = _mapping(at, value, [f.name for f in fields(Calibration)])
    samples = _integer(f"{at}.samples", c.get("samples", 128), 1)
    until = _integer(f"{at}.until", c.get("until", 0), 0)
    if "most" in c and not until:
        raise InputError(f"{at}.most: says when `until` ends: give until as well, as until: 256")
    return Calibration(
        _sources(f"{at}.data", c.get("data", [])),
        samples,
        _integer(f"{at}.length", c.get("length", 2048), 2),
        _integer(f"{at}.batch_size", c.get("batch_size", 8), 1),
        _integer(f"{at}.seed", c.get("seed", 0), 0),
        _choice(f"{at}.dtype", c.get("dtype", "bfloat16"), ("bfloat16", "float32")),
        until,
        _integer(f"{at}.most", c.get("most", MOST * samples), samples) if until else 0,
    )


def _sources(at: str, value: Any) -> tuple[TextSource, ...]:
    if not isinstance(value, list):
        raise InputError(f"{at}: must be a list of names, or of mappings as {{source: NAME, weight: 2}}")
    out = []
    for i, item in enumerate(value):
        where, known = f"{at}[{i}]", [f.name for f in fields(TextSource)]
        item = {"source": item} if isinstance(item, str) else _mapping(where, item, known)
        name, weight = item.get("source"), item.get("weight", 1)
        if not isinstance(name, str) or not name:
            raise InputError(f"{where}.source: must name a file or a Hub data set")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 1e-3 <= weight <= 1e3:
            raise InputError(f"{where}.weight: {weight!r} is not a number from 0.001 to 1000")
        out.append(TextSource(name, float(weight)))
    return tuple(out)


def _allocation(at: str, value: Any, versions: Sequence[str], dense: Sequence[str]) -> Allocate:
    a = _mapping(at, value, [f.name for f in fields(Allocate)])
    bits = a.get("average_bits")
    if isinstance(bits, bool) or not isinstance(bits, int | float) or not 1 <= bits <= 20:
        raise InputError(f"{at}.average_bits: {bits!r} is not a number from 1 to 20")
    method = a.get("method", "greedy")
    method = _choice(
        f"{at}.method", OLD_ALLOCATORS.get(method, method) if isinstance(method, str) else method, ALLOCATORS
    )
    if method == "prefix_split" and not {"w4", "w3", "w2", "w1"} <= set(versions):
        raise InputError(f"{at}.method: prefix_split needs the versions w4, w3, w2 and w1")
    if method != "greedy" and "weight" in a:
        raise InputError(f"{at}.weight: {method} reads no weighted loss: leave weight out")
    weight, both = _choice(f"{at}.weight", a.get("weight", "gates"), WEIGHTS), a.get("dense", False)
    if not isinstance(both, bool):
        raise InputError(f"{at}.dense: {both!r} is not true or false")
    if both and (not dense or method != "greedy" or weight != "gates"):
        raise InputError(f"{at}.dense: needs dense: in the recipe, method greedy, and weight gates")
    return Allocate(bits, method, weight, both)


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"unknown {what} {name!r}" + (f": did you mean {near[0]!r}?" if near else f": known are {', '.join(known)}")


def _mapping(where: str, value: Any, known: Sequence[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where}: must be a mapping of keys to values")
    for key in value:
        if key not in known:
            raise InputError(f"{where}: {_unknown('key', str(key), known)}")
    return value


def _list(where: str, value: Any, known: Sequence[str] | None) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{where}: must be a list of names")
    for v in value:
        if known is not None and v not in known:
            raise InputError(f"{where}: {_unknown('version', v, known)}")
    return value


def _choice(where: str, value: Any, known: Sequence[Any]) -> Any:
    if isinstance(value, bool) or value not in known:
        raise InputError(f"{where}: {value!r} is not one of {', '.join(map(str, known))}")
    return value


def _integer(where: str, value: Any, low: int) -> int:
    if type(value) is not int or not low <= value < 1 << 31:
        raise InputError(f"{where}: {value!r} is not an integer of at least {low}")
    return value
