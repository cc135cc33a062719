"""What tests of dry runs share."""

import pytest


@pytest.fixture(autouse=True)
def without_a_disk(monkeypatch):
    """A disk's rates cost a dry run a second; the command doctor measures them in tests of its own."""
    rates = {"write_bytes_per_second": 1e9, "read_bytes_per_second": 2e9}
    monkeypatch.setattr("moepack.pipeline.dryrun.estimate.disk_rates", lambda folder: rates)
