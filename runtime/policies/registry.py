"""Policies by name: parsing, the options of those that change versions, and maps that never change.

NAME, or NAME:ARGUMENT. `static` serves a map, `uniform` one that a budget gives, `hotness` and `lru` change versions
while serving (hotness.py). Pure but for reading a map from a file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

from moepack.pack.errors import InputError
from moepack.pack.reader import Bundle

from .hotness import HotnessOptions

Versions = tuple[tuple[str, ...], ...]
NAMES = ("static", "uniform", "hotness", "lru")
RATE = 200e6  # bytes a second: copies then take a few per cent of one core's memory bandwidth
_STANDARD = HotnessOptions()
_WORDS = {
    "share": ("even", "loss"),
    "prior": ("calibration", "none"),
    "score": ("loss", "counts"),
    "keep": ("yes", "no"),
}


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What follows `hotness:` or `lru:`, as key=value with commas between.

    Attributes:
        hi, lo: the two versions that are served; what is not named is chosen for the least loss that the bundle's
            calibration foretells in the budget.
        share: how the budget is shared among layers: "even", or "loss" by the loss tables.
        prior: "calibration": the experts that were busy in calibration are high from the start; "none": none is.
        score: "loss": experts are ranked by traffic times what the loss tables say a token saves; "counts": by traffic.
        keep: "yes": an expert that is promoted keeps its low version; "no": it gives it back.
        reserve: low blocks of each size that are kept for demotions without `keep`, from 1: so many can be under way in
            one forward pass.
        rate: megabytes a second that promotions may copy; 0 for no limit.
        interval, alpha, margin, slack, anchor: as in HotnessOptions.
    """

    hi: str = ""
    lo: str = ""
    share: str = "even"
    prior: str = "calibration"
    score: str = "loss"
    keep: str = "no"
    reserve: int = 6
    rate: float = RATE / 1e6
    interval: float = _STANDARD.interval
    alpha: float = _STANDARD.alpha
    margin: float = _STANDARD.margin
    slack: int = _STANDARD.slack
    anchor: float = _STANDARD.anchor

    def hotness(self) -> HotnessOptions:
        """The policy's own part."""
        return HotnessOptions(self.interval, self.alpha, self.margin, self.slack, self.anchor)


@dataclass(frozen=True, slots=True)
class Policy:
    """A parsed policy: its name and what follows the colon."""

    name: str
    argument: str

    def __str__(self) -> str:
        return f"{self.name}:{self.argument}" if self.argument else self.name

    @property
    def is_live(self) -> bool:
        """Whether it changes versions while serving."""
        return self.name in ("hotness", "lru")

    def live_options(self) -> LiveOptions:
        """The options of a live policy.

        Raises:
            InputError: for one that does not exist, or a value out of range.
        """
        kinds = dict.fromkeys(("rate", "interval", "alpha", "margin", "anchor"), float) | {"slack": int, "reserve": int}
        values: dict[str, object] = {"keep": "yes"} if self.name == "lru" else {}
        for part in filter(None, self.argument.split(",")):
            key, _, value = part.partition("=")
            if key not in {f.name for f in fields(LiveOptions)}:
                known = ", ".join(f.name for f in fields(LiveOptions))
                raise InputError(f"policy {self}: option {key!r} is unknown: there are {known}")
            try:
                values[key] = kinds[key](value) if key in kinds else value
            except ValueError:
                raise InputError(f"policy {self}: {key} is a number, not {value!r}") from None
        options = LiveOptions(**values)  # type: ignore[arg-type]
        for key, words in _WORDS.items():
            if (value := getattr(options, key)) not in words:
                raise InputError(f"policy {self}: {key} is {words[0]} or {words[1]}, not {value!r}")
        try:
            options.hotness()
        except ValueError:
            raise InputError(f"policy {self}: alpha is from 0 to below 1, other numbers are from 0") from None
        if not options.rate >= 0:
            raise InputError(f"policy {self}: rate is from 0")
        if options.reserve < 1:
            raise InputError(f"policy {self}: reserve is from 1: a demotion needs a block")
        if self.name == "lru" and options.keep == "no":
            raise InputError(f"policy {self}: lru keeps low versions: it loads and drops experts inside a forward pass")
        return options


def parse_policy(text: str | None) -> Policy:
    """Read NAME or NAME:ARGUMENT; None means `static`.

    Raises:
        InputError: for a policy that does not exist, or options that do not.
    """
    name, _, argument = (text or "static").partition(":")
    if name not in NAMES:
        raise InputError(
            f"policy {text!r} is unknown: there are static, static:VERSION, static:FILE.json, uniform, hotness and lru"
        )
    policy = Policy(name, argument)
    if policy.is_live:
        policy.live_options()
    elif name == "uniform" and argument:
        raise InputError(f"policy {text!r}: uniform takes nothing after a colon")
    return policy


def static_map(bundle: Bundle, argument: str) -> Versions:
    """The version of every expert, by layer position and expert, under `static:ARGUMENT`.

    Args:
        bundle: for its versions, its layers and its allocation.
        argument: a version's name; a JSON file {"versions": [[name, ...], ...]}; "allocation", the map in the bundle's
            manifest; or nothing: the most precise version that is here.

    Raises:
        InputError: when a version is not in the bundle, or a map does not fit it.
    """
    present = [v.name for v in bundle.versions]
    if argument == "allocation":
        if bundle.manifest.allocation is None:
            raise InputError(f"{bundle.path}: its manifest holds no allocation: name a version or a file")
        return _checked(bundle, bundle.manifest.allocation.versions, f"{bundle.path}: allocation")
    if argument.endswith(".json"):
        try:
            table = json.loads(Path(argument).read_text())["versions"]
            rows = tuple(tuple(str(name) for name in row) for row in table)
        except OSError as error:
            raise InputError(f"{argument}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError):
            raise InputError(f'{argument}: is not {{"versions": [[name, ...], ...]}}, one list a layer') from None
        return _checked(bundle, rows, argument)
    name = argument or present[0]
    if name not in present:
        raise InputError(f"{bundle.path}: has no version {name!r}: here are {', '.join(present)}")
    return tuple((name,) * layer.experts for layer in bundle.layers)


def _checked(bundle: Bundle, table: Versions, where: str) -> Versions:
    present = [v.name for v in bundle.versions]
    if len(table) != len(bundle.layers):
        raise InputError(f"{where}: has {len(table)} layers, the bundle {len(bundle.layers)} with experts")
    for row, layer in zip(table, bundle.layers, strict=True):
        if len(row) != layer.experts:
            raise InputError(f"{where}: layer {layer.index} has {layer.experts} experts, the map {len(row)}")
        for name in row:
            if name not in present:
                raise InputError(f"{where}: layer {layer.index}: no version {name!r}: here are {', '.join(present)}")
    return table
