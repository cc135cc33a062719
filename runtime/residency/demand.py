"""Loading on demand: the forward pass waits until what a policy wants is there. For baselines only.

Called by the one forward pass that runs, between layers: nothing reads the experts that leave.
"""

from __future__ import annotations

from moepack.pack.errors import MoepackError
from moepack.runtime.policies.contract import Key, Wanted

from .entries import Outcome
from .residency import Residency
from .transitions import Transitions


def load_now(residency: Residency, transitions: Transitions, wanted: Wanted) -> int:
    """Make `wanted` so, evictions first, and wait for every copy; returns how many there were.

    A copy that fails leaves its expert at the base version, and is counted and logged once.
    """
    with transitions.held():  # another pass, waiting for room, would note what has arrived before this one does
        for key in residency.above() - wanted.keys():
            residency.switch_now(key, residency.base)
        loads = 0
        for key, version in wanted.items():
            if residency.entries[key].active != version:
                loads += _load(residency, transitions, key, version)
        return loads


def _load(residency: Residency, transitions: Transitions, key: Key, version: int) -> int:
    if not transitions.may_try(key, version):
        return 0
    try:
        if residency.start(key, version) is not Outcome.STARTED:
            return 0
    except (MoepackError, OSError) as error:
        transitions.note_failure(key, version, error)
        return 0
    flying = residency.entries[key].flying
    assert flying is not None
    flying.event.wait()
    for failed, number, reason in residency.poll(lambda key, version: True):
        transitions.note_failure(failed, number, reason)
    if residency.entries[key].ready == version:
        residency.switch_now(key, version)
    return 1
