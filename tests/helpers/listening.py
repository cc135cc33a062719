"""A policy that hears everything and wants nothing, and a model that is served by it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from live_models import least, wait_for
from support import load_for_logits

from moepack.pack.spec import Version
from moepack.runtime.policies import contract, registry
from moepack.runtime.policies.reducers import GATES


@dataclass(frozen=True, slots=True)
class Options(contract.LiveOptions):
    """All versions of a bundle."""

    def ladders(self, versions: Sequence[Version]) -> list[contract.Ladder]:
        return contract.device_ladders(versions, "", "", between=True)


class Listener:
    """What the last one made has heard stands in `heard`, intervals apart."""

    needs = contract.Needs(interval=0.02, prompts=True, sums=(GATES,))
    heard: list[contract.Event]

    def __init__(self, setting: contract.Setting, options: Options):
        Listener.heard = self.mine = []

    def decide(self, event: contract.Event) -> contract.Wanted | None:
        if not isinstance(event, contract.Interval):
            self.mine.append(event)
        return None

    def worth(self, key: contract.Key) -> float:
        return 0.0


@contextmanager
def listened_to(bundle: Path) -> Iterator[Any]:
    """A model whose passes the policy is told of."""
    entry = contract.live_entry("listener", Options, Listener)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "ENTRIES", (*registry.ENTRIES, entry))
        budget = least(bundle, "listener") + 1_000_000
        made = load_for_logits(bundle, policy="listener", device_memory=budget, kv_tokens=128)
        with made.moepack:
            yield made


def heard(model, until: Callable[[list[contract.Event]], bool] = lambda events: True) -> list[contract.Event]:
    """Of one sequence or several, once everything has been heard."""
    statistics = model.moepack.manager.statistics
    wait_for(lambda: until(Listener.heard) and not statistics._told and not statistics._ended)
    time.sleep(0.05)
    return list(Listener.heard)
