"""`uniform`: one version for all experts, and the next better version for as many experts as a budget still holds."""

from __future__ import annotations

from moepack.pack.errors import InputError

from .contract import Entry
from .maps import uniform_map


def _parse(argument: str) -> None:
    if argument:
        raise InputError("uniform takes nothing after a colon")


ENTRY = Entry(
    "uniform", "uniform", _parse, needs_budget=True, versions=lambda bundle, _, room: uniform_map(bundle, room or 0)
)
