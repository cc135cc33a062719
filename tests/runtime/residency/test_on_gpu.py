"""Experts on the host, and caches on demand, beside a GPU that is not there: blocks that are pinned, or divided."""

import gc
import logging
import threading

import pytest
import torch
from fake_cuda import FakeCudart
from live_models import close_all, ids, least, load, logits

from moepack.pack.spec import PAGE
from moepack.runtime.devices.cuda_memory import RegisteredMemory
from moepack.runtime.experts import host_tier
from moepack.runtime.planning.budget import BudgetTracker
from moepack.runtime.residency import manager
from moepack.runtime.residency.pools import Pool
from moepack.runtime.store.cudart import Cudart

ALL = {"prefill_tokens": 32}


def test_blocks_on_the_host_are_pinned_while_they_are_taken(caplog):
    """Each once it is filled, for registering would zero it; past what the system pins the rest is ordinary memory."""
    cuda = FakeCudart(fails=lambda name, size, flags: 2 if name == "register" and len(cuda.registered) == 3 else 0)
    memory, refused = [], threading.Event()
    for _ in range(2):
        memory.append(RegisteredMemory(4 * PAGE, Cudart(0, cuda), refused))
    tracker = BudgetTracker(1 << 20)
    pools = [Pool(f"p{i}", PAGE, 4, tracker, m, on_host=True) for i, m in enumerate(memory)]
    with caplog.at_level(logging.INFO, "moepack.runtime"):
        blocks = [pool.allocate() for pool in pools for _ in range(3)]
        assert not cuda.names()
        for block in blocks:
            block.tensor.fill_(3)
            block.filled()
            block.filled()
    assert cuda.seen == [bytes([3]) * PAGE] * 3
    assert [m.pinned for m in memory] == [3 * PAGE, 0] and cuda.names().count("register") == 4 and not cuda.sticky
    assert [r.message for r in caplog.records if "ordinary memory" in r.message] == [caplog.records[0].message]
    for block in blocks:
        block.pool.free(block)
    assert pools[0].trim(2 * PAGE) == 2 * PAGE and memory[0].pinned == PAGE and len(cuda.registered) == 1
    for one in memory:
        one.close()
        one.close()
    assert not cuda.registered and pools[1].trim(PAGE) == PAGE


def test_a_host_tier_beside_a_gpu(small, gpu, monkeypatch):
    """Its blocks are pinned; what it makes are the bits of ordinary memory."""
    monkeypatch.setattr(manager, "CudaLink", lambda: None)
    monkeypatch.setattr(host_tier, "CudaLink", lambda: None)
    policy = "prefill:k=3"
    seen = []
    for refused in (False, True):
        if refused:
            monkeypatch.setattr(gpu.cudart, "fails", lambda name, size, flags: 2 if name == "register" else 0)
        model = load(small, policy, least(small, policy, **ALL) + 60_000, **ALL)
        memory = model.moepack.manager.device._registered
        pinned = sum(m.pinned for m in memory)
        names = [name for row in model.moepack.versions for name in row]
        on_host = sum(name.endswith("@host") for name in names)
        assert on_host and (pinned >= on_host * PAGE) == (not refused)
        assert pinned == model.moepack.manager.host.reserved * (not refused)
        seen.append(logits(model, ids(1, 5)))
        close_all()
        gc.collect()
        assert not gpu.cudart.registered
    assert torch.equal(*seen)


@pytest.mark.parametrize("gpu", [False], ids=["zeros"], indirect=True)
@pytest.mark.parametrize("policy", ["importance:hi=w4,lo=w2", "importance:hi=w4,lo=absent", "lru:hi=w4,lo=absent"])
def test_caches_on_demand_keep_within_their_blocks(small, gpu, policy):
    """At the least budget and above: prompts that need most of a layer, and tokens that need two of it."""
    smallest = least(small, policy, **ALL)
    for more in (0, 9_000) if policy.endswith("w2") else (0,):
        model = load(small, policy, smallest + more, **ALL)
        most = [sum(column) for column in zip(*model.moepack.manager.plan.most, strict=True)]
        assert most[0] >= 8
        for seed, n in enumerate((9, 1, 5)):
            logits(model, ids(seed, n))
            names = [name for row in model.moepack.versions for name in row]
            assert names.count("w4") <= most[0] and names.count("w2") <= (most[1] if len(most) == 3 else 0)
        close_all()
