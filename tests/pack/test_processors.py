"""How many threads: what the scheduler grants, bounded by the quotas of control groups. Stand-in folders are groups."""

import os
import subprocess
import sys

import pytest
import torch

from moepack.calibrate import identity
from moepack.pack import processors as asked
from moepack.pack.codec import exponent_fast
from moepack.pack.processors import processors, quota
from moepack.reports import doctor
from moepack.runtime import patches
from moepack.runtime.store.read_ahead import readers


def group(root, process, **files):
    """Make a stand-in for /sys/fs/cgroup with these files, `__` for a folder, and one for /proc/self/cgroup."""
    for name, text in files.items():
        *folders, file = name.split("__")
        file = file.replace("cpu_", "cpu.", 1)
        at = root.joinpath("groups", *folders, file)
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(f"{text}\n")
    (root / "self").write_text(process)
    return root / "groups", root / "self"


V1 = "5:memory:/\n4:cpu,cpuacct:/docker/a\n"


@pytest.mark.parametrize(
    ("process", "files", "expected"),
    [
        ("0::/\n", {"cpu_max": "50000 100000"}, 1),
        ("0::/\n", {"cpu_max": "200000 100000"}, 2),
        ("0::/\n", {"cpu_max": "250000 100000"}, 3),
        ("0::/\n", {"cpu_max": "max 100000"}, None),
        ("0::/a/b\n", {"a__b__cpu_max": "max 100000", "a__cpu_max": "300000 100000"}, 3),
        ("0::/a/b\n", {"a__b__cpu_max": "100000 100000", "a__cpu_max": "300000 100000"}, 1),
        ("0::/a/b\n", {"other__cpu_max": "100000 100000"}, None),
        (V1, {"cpu__docker__a__cpu_cfs_quota_us": "400000", "cpu__docker__a__cpu_cfs_period_us": "100000"}, 4),
        (V1, {"cpu__docker__a__cpu_cfs_quota_us": "-1", "cpu__docker__a__cpu_cfs_period_us": "100000"}, None),
        (V1, {"cpu__cpu_cfs_quota_us": "150000", "cpu__cpu_cfs_period_us": "100000"}, 2),  # a container's own is there
        ("0::/\n", {"cpu_max": "a number"}, None),
        ("", {}, None),
    ],
)
def test_a_quota_of_either_version(process, files, expected, tmp_path):
    assert quota(*group(tmp_path, process, **files)) == expected


@pytest.mark.parametrize(("text", "cpus", "expected"), [("50000 100000", 64, 1), ("200000 100000", 64, 2),
                                                        ("max 100000", 3, 3), ("800000 100000", 2, 2)])  # fmt: skip
def test_all_that_start_threads_ask(text, cpus, expected, tmp_path, monkeypatch):
    """Half a core, two of 64 as by `docker run --cpus=2`, three by taskset, and a quota above what the set grants."""
    root, process = group(tmp_path, "0::/\n", cpu_max=text)
    monkeypatch.setattr(asked, "CGROUPS", root)
    monkeypatch.setattr(asked, "PROCESS", process)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cpus)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert processors() == expected
    assert len(exponent_fast._shares(1 << 20, None)) == expected
    assert readers() == min(4, expected) and doctor._cpu()["cores"] == expected
    assert identity.processors is asked.processors
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(8)
        patches.limit_threads()
        assert torch.get_num_threads() == expected
        torch.set_num_threads(8)
        monkeypatch.setenv("OMP_NUM_THREADS", "8")
        patches.limit_threads()
        assert torch.get_num_threads() == 8, "the user's own number"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_threads_wait_briefly(given, spins, monkeypatch):
    """A way of waiting that the user set stays."""
    monkeypatch.setattr("os.environ", given)
    patches.wait_briefly()
    assert given.get("GOMP_SPINCOUNT") == spins


def test_a_command_says_how_threads_wait_before_torch_reads_it():
    code = "import os, sys, moepack.runtime.patches as p; own = p.wait_briefly\n"
    code += "p.wait_briefly = lambda: (own(), print('torch' in sys.modules, os.environ['GOMP_SPINCOUNT']))\n"
    code += "from moepack.cli import main; sys.argv = ['moepack', '--version']; main()"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("False 1000\n")


def test_a_system_without_affinity(monkeypatch):
    monkeypatch.setattr(asked, "quota", lambda *_: None)
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 10)
    assert processors() == 10
