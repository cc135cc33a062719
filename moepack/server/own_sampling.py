"""A model's own sampling defaults, which its generation_config.json may name. Imports neither torch nor a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moepack.pack.errors import InputError, printable

from .options import DEFAULTS, Sampling

CHOICES = ("auto", "none")
FIELDS = {  # name in the file -> field of Sampling, the least and the most value
    "temperature": ("temperature", 0, 100),
    "top_p": ("top_p", 0, 1),
    "top_k": ("top_k", -1, 1 << 31),
    "min_p": ("min_p", 0, 1),
    "repetition_penalty": ("repetition", 0.01, 100),
}
Own = Mapping[str, Any]  # field of Sampling -> the model's own value


def check_choice(choice: str) -> None:
    """Raise InputError for an unknown value of --generation-config."""
    if choice not in CHOICES:
        raise InputError(f"--generation-config {choice} is unknown: it is {' or '.join(CHOICES)}")


def own_sampling(generation_config: object) -> Own:
    """Return the values that a model's generation configuration names.

    Raises:
        InputError: for a value that is no number, or out of range.
    """
    found: dict[str, Any] = {}
    for name, (field, least, most) in FIELDS.items():
        value = getattr(generation_config, name, None)
        if value is None:
            continue
        whole = name == "top_k"
        if type(value) not in (int, float) or not least <= value <= most or (whole and value != int(value)):
            kind = "an integer" if whole else "a number"
            shown = printable(repr(value)[:60])
            raise InputError(f"generation_config.json: {name} must be {kind} from {least} to {most}: {shown}")
        found[field] = int(value) if whole else value
    return found


def described(own: Own) -> str:
    """Return the values as the commands show them; "" without any."""
    names = {field: name for name, (field, _, _) in FIELDS.items()}
    values = ", ".join(f"{names[field]} {value:g}" for field, value in own.items())
    return f"sampling by generation_config.json: {values}" if values else ""


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """A command's flags of sampling. None leaves the value to the model, or else to the command."""

    usual: float  # the temperature that neither flag nor model names
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition: float | None = None
    seed: int | None = 0
    generation_config: str = "auto"  # whether the model's own values apply: "auto", or "none"

    def __post_init__(self) -> None:
        """Raise InputError for an unknown choice."""
        check_choice(self.generation_config)

    def own(self, generation_config: object) -> Own:
        """Return the model's own values that apply: those that no flag replaces."""
        if self.generation_config == "none":
            return {}
        return {name: v for name, v in own_sampling(generation_config).items() if getattr(self, name) is None}

    def over(self, own: Own) -> Sampling:
        """Return how tokens are chosen, with the model's `own` values where no flag is given."""
        start = Sampling(temperature=self.usual, seed=self.seed).with_given(**own)
        return start.with_given(**{field: getattr(self, field) for field, _, _ in FIELDS.values()})


def defaults_of(own: Own) -> Sampling:
    """Return a server's defaults: the model's own values over those of the interfaces."""
    return DEFAULTS.with_given(**own)
