"""A policy that hears everything and wants nothing, and a model that is served by it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from live_models import least, wait_for

import moepack
from moepack.runtime.policies import registry
from moepack.runtime.policies.contract import (
    DeviceOptions,
    Entry,
    Event,
    Interval,
    Key,
    Needs,
    Setting,
    Wanted,
    read_options,
)


class Listener:
    """What the last one made has heard stands in `heard`, intervals apart."""

    needs = Needs(interval=0.02, prompts=True, gates=True)
    heard: list[Event]

    def __init__(self, setting: Setting, options: DeviceOptions) -> None:
        Listener.heard = self.mine = []

    def decide(self, event: Event) -> Wanted | None:
        if not isinstance(event, Interval):
            self.mine.append(event)
        return None

    def worth(self, key: Key) -> float:
        return 0.0


@contextmanager
def listened_to(bundle: Path) -> Iterator[Any]:
    """A model whose passes the policy is told of."""
    entry = Entry("listener", "listener", lambda text: read_options(DeviceOptions, text), True, make=Listener)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "ENTRIES", (*registry.ENTRIES, entry))
        budget = least(bundle, "listener") + 1_000_000
        made = moepack.load(bundle, policy="listener", device_memory=budget, kv_tokens=128)
        try:
            yield made
        finally:
            made.moepack.close()


def heard(model: Any, until: Callable[[list[Event]], bool] = lambda events: True) -> list[Event]:
    """Of one sequence or several, once everything has been heard."""
    statistics = model.moepack.manager.statistics
    wait_for(lambda: until(Listener.heard) and not statistics._told and not statistics._ended)
    time.sleep(0.05)
    return list(Listener.heard)
