"""Loading: fetches under way at a time, their order, their end after an error, and the bytes that are reported."""

import pytest
from support import load_for_logits

from moepack.pack.errors import InputError
from moepack.pack.reader import open_bundle
from moepack.runtime.devices.migration import HostEvent
from moepack.runtime.store.loading import in_order, loading, loading_report


def test_fetches_are_started_ahead_and_yielded_in_order():
    events = [HostEvent() for _ in range(6)]
    started = []

    def start(i):
        started.append(i)
        events[i].end(None)
        return None if i == 1 else events[i]

    seen = []
    for item, event in in_order(range(6), start, 2):
        assert event is (None if item == 1 else events[item])
        seen.append((item, len(started)))
    assert seen == [(0, 3), (1, 4), (2, 5), (3, 6), (4, 6), (5, 6)]


def test_a_caller_that_stops_waits_for_what_it_started():
    """An error ends the load; the fetches behind it are cancelled, and have ended when their memory is given back."""

    class Fetch:
        error = None

        def __init__(self):
            self.calls = []

        def wait(self):
            self.calls.append("wait")

        def cancel(self):
            self.calls.append("cancel")

    fetches = [Fetch() for _ in range(5)]
    with pytest.raises(ZeroDivisionError):
        for item, _ in in_order(range(5), lambda i: fetches[i], 2):
            assert 1 / (1 - item) == 1
    assert [f.calls for f in fetches] == [["wait"], ["wait"], ["cancel", "wait"], ["cancel", "wait"], []]


def test_a_load_reports_every_byte_that_it_reads(bundle):
    """Of a live policy and of a map: dense tensors, then experts; outside a load nothing is reported."""
    opened = open_bundle(bundle)
    dense = sum(entry.size for name, entry in opened.manifest.files.items() if name.endswith(".safetensors"))
    experts = sum(
        opened.layer_file("w4", p).extent_size(e) for p, x in enumerate(opened.layers) for e in range(x.experts)
    )
    for policy, memory in (("static:w4", None), ("static:w4", "1GB"), ("lru:hi=w4,lo=absent", "1GB")):
        seen = []
        report = lambda done, of, seen=seen: seen.append((done, of))  # noqa: E731
        load_for_logits(bundle, policy=policy, device_memory=memory, progress=report).moepack.close()
        assert seen[-1] == (dense + experts, dense + experts) and seen == sorted(seen)
        assert len({of for _, of in seen}) == 2
    with loading_report(None):
        loading().add(1)
    assert len(seen) > 64


def test_files_are_read_past_the_page_cache_in_a_budget_alone(bundle, monkeypatch):
    seen = []
    monkeypatch.setattr("moepack.runtime.attach.BackingStore", lambda bundle, direct: seen.append(direct) or 1 / 0)
    for memory in (None, "1GB"):
        with pytest.raises(InputError, match="division by zero"):
            load_for_logits(bundle, policy="static:w4", device_memory=memory)
    assert seen == [False, True]
