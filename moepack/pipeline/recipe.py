"""Recipes: YAML that says how to make a bundle, validated key by key. The bundle's manifest keeps the text."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from moepack.families import mtp
from moepack.pack.errors import InputError
from moepack.pack.manifest.strict_json import JsonObject
from moepack.pack.spec import (
    GROUPS,
    KNOWN,
    LOSSLESS,
    SCALE_BITS,
    Version,
    encoding_of,
    lossy,
    version_names,
)
from moepack.quantize import methods

if TYPE_CHECKING:
    import torch

NATIVE = "native"  # in a recipe's versions: the one that keeps the checkpoint's experts as they were released
WEIGHTS = ("gates", "logits")
Rules = Mapping[str, int | Sequence[object]]  # of some keys: an integer's least value, or the possible values

# Without w8: experts at 8 bits are seldom worth their bytes over 4 bits.
DEFAULT_VERSIONS = ("bf16", "w4", "w3", "w2", "w1")


@dataclass(frozen=True, slots=True)
class Quantize:
    """How experts are quantised; see `moepack.quantize.expert_batch.Settings`."""

    method: str = methods.DEFAULT
    group_size: int | Mapping[str, int] = 64
    loss_tokens: int = 4096
    zeros: str = methods.FREE
    refine: bool = False
    scale_bits: int = SCALE_BITS[0]  # of a scale of the experts' versions

    def size(self, version: str) -> int:
        """The group size of a version."""
        sizes = encoding_of(version).group_sizes
        if len(sizes) == 1:
            return sizes[0]
        return self.group_size if isinstance(self.group_size, int) else self.group_size.get(version, 64)


@dataclass(frozen=True, slots=True)
class TextSource:
    """Calibration text: a file or a Hub data set (NAME[:CONFIG[:SPLIT[:COLUMN]]]), and its weight in the mixture."""

    source: str
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """The calibration text: its sources, how many windows are taken, and how they run through the model."""

    data: tuple[TextSource, ...] = ()
    samples: int = 128  # windows of `length` tokens
    length: int = 2048
    batch_size: int = 8
    seed: int = 0
    dtype: str = "bfloat16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of the computation."""
        import torch

        found: torch.dtype = getattr(torch, self.dtype)
        return found


@dataclass(frozen=True, slots=True)
class Allocate:
    """How to choose one version for each expert (an allocation); see `moepack.pipeline.allocate.allocate`."""

    average_bits: float  # the budget: bytes of all extents, with tables and padding, in bits per expert weight
    weight: str = "gates"  # what weights the losses, one of WEIGHTS (`allocate.expected_losses`)
    dense: bool = False  # also choose versions of dense matrices, and count their bytes and weights

    def __str__(self) -> str:
        both = " of experts and dense matrices" if self.dense else ""
        return f"greedy at {self.average_bits:g} bits{both}, losses weighted by {self.weight}"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A validated recipe, and its text."""

    versions: tuple[str, ...] = DEFAULT_VERSIONS
    quantize: Quantize = field(default_factory=Quantize)
    calibration: Calibration = field(default_factory=Calibration)
    allocation: Allocate | None = None
    dense: tuple[str, ...] = ()
    text: str = ""
    mtp: str = "drop"  # "keep": a checkpoint's layers for multi-token prediction stay beside the model, unchanged
    # Whether the checkpoint's own codes, of experts and of dense matrices, have the middle code as zero point
    native_symmetric: bool = False
    native_dense_symmetric: bool = False

    def version_specs(self) -> tuple[Version, ...]:
        """The versions of experts as descriptors, from most to least precise."""
        return self._specs(self.versions, self.version)

    def version(self, name: str, size: int) -> Version:
        """A version of experts as the recipe has it, in groups of this size."""
        return Version.of(name, size, self.quantize.scale_bits, self._symmetric(name, self.native_symmetric))

    def _symmetric(self, name: str, native: bool) -> bool:
        """Whether the codes of a version have the middle code as zero point; `native`, of the checkpoint's own."""
        return native if encoding_of(name).holds else self.quantize.zeros == methods.SYMMETRIC

    def _dense_version(self, name: str, size: int) -> Version:
        return Version.of(name, size, symmetric=self._symmetric(name, self.native_dense_symmetric))

    @property
    def keeps_released(self) -> bool:
        """Whether a version holds the checkpoint's experts or dense matrices as they were released."""
        return any(name == NATIVE or encoding_of(name).released for name in (*self.versions, *self.dense))

    def dense_specs(self) -> tuple[Version, ...]:
        """The versions of dense matrices, including the lossless one; empty if the recipe names no version of them."""
        kept = any(encoding_of(name).released for name in self.dense)
        return self._specs(self.dense if kept or not self.dense else (LOSSLESS, *self.dense), self._dense_version)

    @property
    def fits_dense(self) -> bool:
        """Whether versions of dense matrices take the moments of their inputs, which the released one does not."""
        return any(not v.released for v in self.dense_specs())

    def _specs(self, names: Sequence[str], made: Callable[[str, int], Version]) -> tuple[Version, ...]:
        assert NATIVE not in names, "with_native names the version"
        return tuple(made(name, self.quantize.size(name)) for name in version_names() if name in names)


def shipped() -> list[str]:
    """List the names of the recipes that come with moepack."""
    root = resources.files("moepack.recipes")
    return sorted(f.name.removesuffix(".yaml") for f in root.iterdir() if f.name.endswith(".yaml"))


def load_recipe(name: str | Recipe) -> Recipe:
    """Load a recipe that comes with moepack, by name, or one in a file. A Recipe is returned as it is.

    Raises:
        InputError: for an invalid recipe; names the file, the key and, for an unknown key, the nearest known one.
    """
    if isinstance(name, Recipe):
        return name
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
    """Parse and validate a recipe's text. `where` is its name in errors."""
    try:
        document = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not YAML: {' '.join(str(error).split())}") from None
    known = [f.name for f in fields(Recipe) if f.name != "text"]
    top = _mapping(where, {} if document is None else document, known)
    versions = _names(f"{where}: versions", top.get("versions", list(DEFAULT_VERSIONS)), (NATIVE, *version_names()))
    if not versions:
        raise InputError(f"{where}: versions: name each version once, and at least one")
    dense = _names(f"{where}: dense", top.get("dense", []), version_names())
    if mixed := set(dense) - {*version_names(dense=True)}:
        why = "it gives their down more bits" if encoding_of(min(mixed)).by_matrix else "its codes are a trellis"
        raise InputError(f"{where}: dense: {min(mixed)} is for experts alone: {why}")
    at = f"{where}: quantize"
    rules: Rules = {
        "method": methods.named(),
        "loss_tokens": 1,
        "zeros": methods.ZEROS,
        "scale_bits": SCALE_BITS,
    }
    quantize = Quantize(**_settings(at, top.get("quantize", {}), Quantize, rules))
    if quantize.zeros == methods.SYMMETRIC and quantize.method in methods.ASYMMETRIC:
        raise InputError(f"{at}.zeros: {quantize.method} makes no symmetric codes: gptq and rtn do")
    if not isinstance(quantize.refine, bool):
        raise InputError(f"{at}.refine: {quantize.refine!r} is not true or false")
    if quantize.refine and not methods.get(quantize.method).needs_moments:
        raise InputError(f"{at}.refine: {quantize.method} fits nothing to tokens: gptq and gptqmodel do")
    size = quantize.group_size
    if isinstance(size, dict):
        _mapping(f"{at}.group_size", size, [v for v in version_names() if encoding_of(v).group_sizes])
        for name, value in size.items():
            _choice(f"{at}.group_size.{name}", value, encoding_of(name).group_sizes)
    else:
        made = [encoding_of(v) for v in (*versions, *dense) if v != NATIVE]
        possible = [e.group_sizes for e in made if len(e.group_sizes) > 1 and not e.released]
        _choice(f"{at}.group_size", size, [g for g in GROUPS if all(g in sizes for sizes in possible)])
    calibration = _calibration(f"{where}: calibration", top.get("calibration", {}))
    allocation = _allocation(f"{where}: allocation", top["allocation"], dense) if "allocation" in top else None
    kept = _choice(f"{where}: mtp", top.get("mtp", "drop"), mtp.CHOICES)
    return Recipe(versions, quantize, calibration, allocation, dense, text, kept)


def unused_group_sizes(recipe: Recipe) -> str | None:
    """Say which group sizes in a recipe's text no version of it takes, in one line; None if there are none."""
    how = (yaml.safe_load(recipe.text) or {}).get("quantize") or {}
    given = how.get("group_size")
    lossy_names = [n for n in (*recipe.versions, *recipe.dense) if n != NATIVE and encoding_of(n).group_sizes]
    made = {name: recipe.quantize.size(name) for name in lossy_names}
    sizes = given if isinstance(given, dict) else {}
    left = [f"{name}: {size}" for name, size in sizes.items() if name not in made]
    if isinstance(given, int) and given not in made.values():
        left = [str(given)]
    if not left:
        return None
    return f"quantize.group_size: no version of the recipe takes {', '.join(left)}: leave it out, or add one later"


def with_versions(recipe: Recipe, versions: Sequence[Version], dense: Sequence[Version]) -> Recipe:
    """Replace a recipe's versions of experts and of dense matrices. The new text has no comments.

    Raises:
        InputError: where a version's group size differs between experts and dense matrices: a recipe has one for both.
    """
    sizes = {v.name: v.group_size for v in (*dense, *versions) if v.group_size and not v.released}
    for v in dense:
        if v.name in sizes and sizes[v.name] != v.group_size:
            raise InputError(
                f"{v.name}: dense matrices would have it in groups of {v.group_size}, experts of {sizes[v.name]}: a "
                "recipe has one group size for both: replace it in both, by --add and --add-dense"
            )
    document = yaml.safe_load(recipe.text) or {}
    document["versions"] = [NATIVE if v.released else v.name for v in versions]
    if dense or recipe.dense:
        document["dense"] = [v.name for v in dense if not v.released]
    chosen = {name: size for name, size in sizes.items() if len(encoding_of(name).group_sizes) > 1}
    how = {"group_size": 64, **document.get("quantize", {})}
    if chosen:
        how["group_size"] = next(iter(chosen.values())) if len(set(chosen.values())) == 1 else chosen
    document["quantize"] = how
    made = _written(document)
    native, own = (next((v for v in some if v.released), None) for some in (versions, dense))
    return made if native is None else with_native(made, native, own)


def with_native(recipe: Recipe, native: Version, dense: Version | None = None) -> Recipe:
    """Return a recipe that names these versions in place of "native", of experts and dense matrices. Its text stays.

    Without `dense` the checkpoint encodes no dense matrices, and they are LOSSLESS. A recipe that keeps the experts as
    released keeps the dense matrices so, too.

    Raises:
        InputError: for a released version that is not the checkpoint's, or others that take as many bits or more.
    """
    dense = dense or Version.of(LOSSLESS)
    keeps = NATIVE in recipe.versions or (native.released and native.name in recipe.versions)
    asked = (NATIVE, *recipe.dense) if keeps and dense.released else recipe.dense
    names = _with_own("versions", "experts", recipe.versions, native)
    dense_names = _with_own("dense", "dense matrices", asked, dense)
    if native.name not in names and dense_names == recipe.dense:
        return recipe
    sizes = {e.name: recipe.quantize.size(e.name) for e in lossy(KNOWN)}  # of versions that are added later, too
    sizes |= {v.name: v.group_size for v in (native, dense) if v.group_size and v.name in (*names, *dense_names)}
    how = replace(recipe.quantize, group_size=sizes)
    return replace(
        recipe,
        versions=names,
        dense=dense_names,
        quantize=how,
        native_symmetric=native.zero == "symmetric",
        native_dense_symmetric=dense.zero == "symmetric",
    )


def _with_own(at: str, what: str, names: Sequence[str], own: Version) -> tuple[str, ...]:
    for name in names:
        if name != NATIVE and encoding_of(name).released and name != own.name:
            raise InputError(f"{at}: {name}: the checkpoint's {what} are {own.name}: write {NATIVE} in versions")
    if NATIVE in names or own.name in names:
        check_beside(own, [n for n in names if n not in (NATIVE, own.name)], at)
    return tuple(dict.fromkeys(own.name if name == NATIVE else name for name in names))


def check_beside(own: Version, names: Iterable[str], at: str = "versions") -> None:
    """Raise InputError for a version with as many bits as `own`, the one that holds the checkpoint."""
    for name in names:
        if encoding_of(name).bits >= own.bits:
            raise InputError(f"{at}: {name} saves no bits over the checkpoint's own {own.name}: leave it out")


def with_text(recipe: Recipe) -> Recipe:
    """Return a recipe whose text matches its fields: a new text if it was made or changed in Python.

    Raises:
        InputError: where the recipe is not valid.
    """
    if parse_recipe(recipe.text, "recipe") == recipe:
        return recipe
    document = asdict(recipe)
    del document["text"]
    if recipe.allocation is None:
        del document["allocation"]
    return _written(document)


def _written(document: Mapping[str, object]) -> Recipe:
    return parse_recipe(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), "recipe")


def _calibration(at: str, value: object) -> Calibration:
    rules: Rules = {
        "samples": 1,
        "length": 2,
        "batch_size": 1,
        "seed": 0,
        "dtype": ("bfloat16", "float32"),
    }
    given = _settings(at, value, Calibration, rules)
    return Calibration(**given | {"data": _sources(f"{at}.data", given.get("data", []))})


def _sources(at: str, value: object) -> tuple[TextSource, ...]:
    if not isinstance(value, list):
        raise InputError(f"{at}: must be a list of names, or of mappings as {{source: NAME, weight: 2}}")
    out = []
    for i, item in enumerate(value):
        where = f"{at}[{i}]"
        item = {"source": item} if isinstance(item, str) else _settings(where, item, TextSource, {})
        name = item.get("source")
        if not isinstance(name, str) or not name:
            raise InputError(f"{where}.source: must name a file or a Hub data set")
        out.append(TextSource(name, float(_number(f"{where}.weight", item.get("weight", 1), 1e-3, 1e3))))
    return tuple(out)


def _allocation(at: str, value: object, dense: Sequence[str]) -> Allocate:
    given = _settings(at, value, Allocate, {"weight": WEIGHTS})
    how = Allocate(**given | {"average_bits": _number(f"{at}.average_bits", given.get("average_bits"), 1, 20)})
    if not isinstance(how.dense, bool):
        raise InputError(f"{at}.dense: {how.dense!r} is not true or false")
    if how.dense and not dense:
        raise InputError(f"{at}.dense: needs dense: in the recipe")
    if how.dense and how.weight != "gates":
        raise InputError(f"{at}.dense: needs weight: gates, not {how.weight}")
    return how


def _unknown(what: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    return f"unknown {what} {name!r}" + (f": did you mean {near[0]!r}?" if near else f": known are {', '.join(known)}")


def _mapping(where: str, value: object, known: Sequence[str]) -> JsonObject:
    if not isinstance(value, dict):
        raise InputError(f"{where}: must be a mapping of keys to values")
    for key in value:
        if key not in known:
            raise InputError(f"{where}: {_unknown('key', str(key), known)}")
    return value


def _settings(where: str, value: object, kind: type, rules: Rules) -> JsonObject:
    """Check and return fields of the dataclass `kind`."""
    given = _mapping(where, value, [f.name for f in fields(kind)])
    for key in rules.keys() & given.keys():
        rule = rules[key]
        if isinstance(rule, int):
            _integer(f"{where}.{key}", given[key], rule)
        else:
            _choice(f"{where}.{key}", given[key], rule)
    return given


def _names(where: str, value: object, known: Sequence[str]) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise InputError(f"{where}: must be a list of names")
    for v in value:
        if v not in known:
            raise InputError(f"{where}: {_unknown('version', v, known)}")
    if len(set(value)) != len(value):
        raise InputError(f"{where}: name each version once")
    return tuple(value)


def _choice(where: str, value: object, known: Sequence[object]) -> Any:
    if isinstance(value, bool) or value not in known:
        raise InputError(f"{where}: {value!r} is not one of {', '.join(map(str, known))}")
    return value


def _number(where: str, value: object, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise InputError(f"{where}: {value!r} is not a number from {low:g} to {high:g}")
    return value


def _integer(where: str, value: object, low: int) -> None:
    if type(value) is not int or not low <= value < 1 << 31:
        raise InputError(f"{where}: {value!r} is not an integer of at least {low}")
