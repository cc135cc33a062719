"""The policies by name. The entry of a new policy is added here."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Any

from moepack.pack.errors import InputError

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
        near = difflib.get_close_matches(name, [e.name for e in ENTRIES], n=1)
        guess = f"; did you mean {near[0]}?" if near else ""
        raise InputError(f"policy {text!r} is unknown: there are {usages()}{guess}")
    if entry.needs_budget and in_budget is False:
        raise InputError(f"policy {text}: needs a memory budget: device_memory, or --device-memory")
    try:
        return Policy(entry, argument, entry.parse(argument))
    except InputError as error:
        raise InputError(f"policy {text}: {error}") from None


def usages(in_budget: bool | None = None) -> str:
    """List how --policy is written: for all policies, or for those that need a budget (True) or do not (False)."""
    return ", ".join(e.usage for e in ENTRIES if in_budget is None or e.needs_budget == in_budget)
