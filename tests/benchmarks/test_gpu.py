"""The GPU halves of benchmarks: through Triton's interpreter, and by compiling for GPUs that need not be there."""

import os
import subprocess
import sys

import pytest
import torch
import torch_products
from support import ROOT

from moepack.pack.spec import Version


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # of a gate whose silu is 0
def test_the_gpu_half_of_the_kernels_benchmark_runs(monkeypatch):
    """Decode and prefill; experts of a run take over four times the L2."""
    from benchmarks.kernels.gpu import measure

    torch_products.install(monkeypatch)
    for version in (Version.of("bf16"), Version.of("w4", 128), Version.of("w1", 64)):
        for tokens in (1, 33):
            row = measure((128, 32, 4, 2), version, tokens, 1, torch.device("cpu"), 20_000)
            assert row["ours us"] > 0 and row["torch BF16 us"] > 0 and row["over floor"] > 0
            assert row["MB"] * 1e6 > 4 * 20_000
    assert row["MB"] * 1e6 == 5 * 4 * 4096  # of w1: five layers of four experts in one page each


COMPILE = """
import sys
from benchmarks import resources
for command in (["benchmarks.resources", "--quick"], ["benchmarks.resources", "--loops"]):
    sys.argv = command
    try:
        resources.main()
    except SystemExit as ended:
        print(command[1], "ended with", ended.code)
"""


def test_compiled_kernels_keep_to_their_limits():
    """The largest of each architecture keep to its stack and shared memory; few tokens' loops on sm_90 take few
    instructions a weight, and no barrier. A process compiles them: in this one Triton interprets."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=480)
    for said in ("sm_80", "sm_120", "--quick ended with False", "w4-128", "--loops ended with False"):
        assert said in run.stdout, (said, run.stdout + run.stderr)
