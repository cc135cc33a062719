"""The simulation of a build on a cluster, against cases worked out by hand."""

from __future__ import annotations

import pytest

from benchmarks.scale.simulation import AHEAD, Cluster, Job, simulate

assert AHEAD == 2  # what the cases count with


def test_calibration_is_the_bound() -> None:
    """Layers come at 10, 20, 30; one core makes a layer's two batches in 8; of the last both cores make one."""
    out = simulate(Job(layers=3, batches=2, calibrate=10, quantise=4), Cluster(nodes=1, cores=2))
    assert (out.calibrated, out.seconds, out.bound) == (30, 34, "calibration")


def test_calibration_waits_for_room() -> None:
    """Two layers are out at 2, with eight batches for one core: the third is begun when the first is done, at 41, and
    there at 42. With the core that calibrated: 41-51, 42-52, 51-61, 52-62, and the third's four until 72 and 82."""
    out = simulate(Job(layers=3, batches=4, calibrate=1, quantise=10), Cluster(nodes=1, cores=2))
    assert (out.calibrated, out.seconds, out.bound) == (42, 82, "cores")


def test_a_second_node() -> None:
    """Three cores begin at 1, a fourth, which calibrated, at 2: of twelve batches four are made by 12, by 22, by 32."""
    out = simulate(Job(layers=2, batches=6, calibrate=1, quantise=10), Cluster(nodes=2, cores=2))
    assert (out.calibrated, out.seconds) == (2, 32)
    assert out.floors["cores"] == pytest.approx((120 + 2) / 4)


def test_tokens_travel_once_a_node_and_layer() -> None:
    """Tokens of 6 bytes at 2 a second are at the second node 3 later; both its cores wait for the one transfer."""
    job = Job(layers=1, batches=4, calibrate=1, quantise=10, tokens=6)
    out = simulate(job, Cluster(nodes=2, cores=2, network=2))
    assert out.seconds == 1 + 3 + 10 and out.floors["network"] == 3


def test_the_network_takes_what_was_sent() -> None:
    """Each of two other nodes fetches the layer; without cores to spare nobody does, however many nodes there are."""
    job = Job(layers=1, batches=6, calibrate=1, quantise=10, tokens=6)
    assert simulate(job, Cluster(nodes=3, cores=2, network=2)).floors["network"] == 6
    assert simulate(job, Cluster(nodes=3, cores=64, network=2)).floors["network"] == 0


def test_the_disk_serves_one_after_another() -> None:
    """Two batches at 1 read 10 bytes each at 10 a second, until 2 and 3; compute until 6 and 7; write 5 bytes each,
    until 6.5 and 7.5; the layer's files take 10 bytes read and 10 written: 2 more."""
    job = Job(layers=1, batches=2, calibrate=1, quantise=4, weights=10, made=5)
    out = simulate(job, Cluster(nodes=1, cores=2, disk=10))
    assert out.seconds == 9.5
    assert out.floors["disk"] == 2 * (10 + 15) / 10


def test_tokens_that_do_not_fit_stop_calibration() -> None:
    """Cores there are enough; but of two layers' tokens there is room for one."""
    job = Job(layers=2, batches=2, calibrate=1, quantise=10, tokens=5)
    free = simulate(job, Cluster(nodes=3, cores=2))
    tight = simulate(job, Cluster(nodes=3, cores=2, store=9))
    assert (free.calibrated, free.seconds) == (2, 12)
    assert (tight.calibrated, tight.seconds) == (12, 22)
