"""The policies by name. The entry of a new policy is added here."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any

from moepack.pack.errors import InputError
from moepack.pack.spec import version_names

from . import hotness, importance, lru, paged, prefill, random_map, static, uniform
from .contract import Entry

ENTRIES: tuple[Entry, ...] = (
    static.ENTRY,
    uniform.ENTRY,
    random_map.ENTRY,
    hotness.ENTRY,
    prefill.ENTRY,
    importance.ENTRY,
    paged.ENTRY,
    lru.ENTRY,
)


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy as a user wrote it: its entry, the text after the colon, and its options."""

    entry: Entry
    argument: str
    options: Any

    def __str__(self) -> str:
        return f"{self.entry.name}:{self.argument}" if self.argument else self.entry.name

    @property
    def is_live(self) -> bool:
        """Whether the policy changes placements while serving."""
        return self.entry.make is not None


def parse_policy(text: str | None, in_budget: bool | None = None) -> Policy:
    """Read NAME or NAME:ARGUMENT. `None` means the most precise version, or in a memory budget `hotness`.

    `in_budget` says whether there is a budget; `None` if this is not known yet.

    Raises:
        InputError: for an unknown policy or option, or a policy that needs a budget.
    """
    name, _, argument = (text or (hotness.ENTRY if in_budget else static.ENTRY).name).partition(":")
    entry = next((e for e in ENTRIES if e.name == name), None)
    if entry is None:
        raise InputError(f"policy {text!r} is unknown: {_meant(str(text))}there are {usages()}")
    if entry.needs_budget and in_budget is False:
        raise InputError(f"policy {text}: needs a memory budget: --device-memory")
    try:
        return Policy(entry, argument, entry.parse(argument))
    except InputError as error:
        raise InputError(f"policy {text}: {error}") from None


def _meant(text: str) -> str:
    """Ask for the policy that a text may mean: a version served alone, or one of which the colon is missing."""
    name, _, rest = re.sub("[:;/ ]", ",", text, count=1).partition(",")
    if not rest and name.lower() in (*version_names(), "allocation"):
        return f"did you mean {static.ENTRY.name}:{name.lower()}? "
    near = difflib.get_close_matches(name.lower(), [e.name for e in ENTRIES], n=1)
    if not near:
        return ""
    return f"did you mean {near[0]}{f':{rest}' if rest else ''}? "


def completions(text: str) -> list[tuple[str, str]]:
    """Return the ways in which a policy's text may go on, each with what it is: a policy, an option or its value."""
    name, colon, argument = text.partition(":")
    if not colon:
        return [(e.name, e.usage) for e in ENTRIES]
    entry = next((e for e in ENTRIES if e.name == name), None)
    if entry is None:
        return []
    before, comma, last = argument.rpartition(",")
    start = f"{name}:{before}{comma}"
    key, equals, _ = last.partition("=")
    if equals:
        words = entry.keys.get(key, ())
        words = words or (tuple(version_names()) if key in ("hi", "lo") else ())
        return [(f"{start}{key}={word}", f"a value of {key}") for word in words]
    if entry is static.ENTRY:
        return [(f"{start}{word}", "a version, or the bundle's map") for word in (*version_names(), "allocation")]
    return [(f"{start}{key}=", "an option") for key in entry.keys if f"{key}=" not in before]


def usages(in_budget: bool | None = None) -> str:
    """List how --policy is written: for all policies, or for those that need a budget (True) or do not (False)."""
    return ", ".join(e.usage for e in ENTRIES if in_budget is None or e.needs_budget == in_budget)
