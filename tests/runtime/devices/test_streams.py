"""Streams on the host: threads that work side by side, how long one rests for, and the rate that all keep together."""

import threading
import time

import pytest
from support import PATIENCE

from moepack.runtime.devices.migration import HostStream, HostThreads, Migration
from moepack.runtime.store.files import Cancelled


def test_pieces_run_side_by_side_and_may_end_in_another_order():
    ended = []
    threads = HostThreads("test", lambda: None, 3)
    together, gates = threading.Barrier(3), [threading.Event() for _ in range(3)]

    def work(i):
        together.wait(PATIENCE)
        assert gates[i].wait(PATIENCE)
        ended.append(i)

    events = [threads.submit(lambda _, i=i: work(i)) for i in range(3)]
    for i in (2, 0, 1):
        gates[i].set()
        events[i].wait()
    assert ended == [2, 0, 1] and [e.error for e in events] == [None] * 3
    threads.close()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_rest_waits_for_all_that_came_before(count):
    ended = []

    def work(event, i):
        time.sleep(0.003 * (i % 3))
        ended.append(i)

    threads = HostThreads("test", lambda: None, count)
    for round_ in range(5):
        for i in range(7):
            threads.submit(lambda event, i=i: work(event, i))
        resting = [threading.Thread(target=threads.rest) for _ in range(3)]
        for thread in resting:
            thread.start()
        threads.rest()
        assert len(ended) >= 7 * (round_ + 1)
        for thread in resting:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "those who rest do not wait for each other"
    threads.close()
    threads.rest()
    late = threads.submit(lambda event: None)
    late.wait()
    assert isinstance(late.error, Cancelled)


def test_a_stream_rests_until_what_it_issued_has_ended():
    stream, over = HostStream("test", lambda: None, depth=2), threading.Event()
    issued = stream.submit(lambda event: over.is_set)
    threading.Timer(0.05, over.set).start()
    stream.rest()
    assert issued.done() and over.is_set()
    stream.close()


def test_closing_cancels_what_has_not_begun_and_a_failure_ends_its_own_event():
    threads, held, begun = HostThreads("test", lambda: None, 2), threading.Event(), threading.Barrier(3)

    def work(event):
        begun.wait(PATIENCE)
        assert held.wait(PATIENCE)

    events = [threads.submit(work) for _ in range(2)]
    begun.wait(PATIENCE)
    failed, waiting = threads.submit(lambda event: print(1 // 0)), threads.submit(lambda event: None)
    threads.close(wait=False)
    held.set()
    for event in (*events, failed, waiting):
        event.wait()
    assert [e.error for e in events] == [None] * 2
    assert isinstance(failed.error, Cancelled) and isinstance(waiting.error, Cancelled)
    threads = HostThreads("test", lambda: None, 2)
    failed = threads.submit(lambda event: print(1 // 0))
    threads.rest()
    assert isinstance(failed.error, ZeroDivisionError)
    threads.close()


def test_a_copy_that_waits_for_the_rate_goes_on_once_it_is_hurried():
    stream, hurried = HostThreads("test", lambda: None, 1), threading.Event()
    made = Migration(stream)
    made.limit(100, 0, hurried.is_set)
    first, second = (stream.submit(lambda event: made.gate(event, 100_000)(100_000)) for _ in range(2))
    first.wait()
    time.sleep(0.1)
    assert not second.done(), "it waits for 1,000 s"
    hurried.set()
    second.wait()
    assert second.error is None
    made.close()


def test_threads_keep_the_rate_together():
    """Eight copies of 100 kB at 4 MB a second: the last begins after seven, 0.175 s, whoever copies them."""
    stream = HostThreads("test", lambda: None, 4)
    made = Migration(stream)
    made.limit(4e6, 0)
    began = time.monotonic()
    for event in [stream.submit(lambda event: made.gate(event, 100_000)(100_000)) for _ in range(8)]:
        event.wait()
    assert time.monotonic() - began >= 0.17 and made.moved == 800_000
    made.close()
