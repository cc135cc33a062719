"""`prefill` and the host tier on real bundles: bits, budgets, migrations, threads."""

import json
import time

import pytest
import torch
from live_models import ids, least, load, logits, ours, wait_for
from support import load_for_logits

from moepack.pack.errors import InputError

ROOM = 1_500_000


def settle(model):
    """Let what is wanted come about."""
    live = model.moepack.manager

    def done():
        idle = not live.transitions.waiting() and not len(live.residency.flying)
        return idle and not live.statistics._told and not live.statistics._ended and not live.statistics.sequences._over

    wait_for(done)
    time.sleep(0.05)
    wait_for(done)


def on_the_device(bundle, model, folder, **options):
    """The same versions, all of them on the device."""
    file = folder / "map.json"
    rows = [[name.removesuffix("@host") for name in row] for row in model.moepack.versions]
    file.write_text(json.dumps({"versions": rows}))
    return load_for_logits(bundle, policy=f"static:{file}", **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_host_and_device_compute_the_same_bits(bundle, tmp_path, dtype):
    """Whatever is where: the model under `prefill` is the model with those versions on the device."""
    policy = "prefill:bits=2.5"
    model = load(bundle, policy, room=ROOM, dtype=dtype)
    for seed, size in ((0, 1), (1, 40), (2, 200)):
        logits(model, ids(seed, size))
        settle(model)
        here = {name for row in model.moepack.versions for name in row}
        assert "bf16" in here and sum(name.endswith("@host") for name in here) > 1
        plain = on_the_device(bundle, model, tmp_path, dtype=dtype)
        got = logits(model, ids(seed, size))
        assert torch.equal(got, logits(plain, ids(seed, size)))
        settle(model)
    assert model.moepack.counters()["forward_waits"] == 0 and model.moepack.counters()["host_bytes"] > 0


def test_too_little_host_memory_is_refused_with_the_least(bundle):
    budget, before = least(bundle, "prefill") + ROOM, ours()
    with pytest.raises(InputError, match=r"host_memory of 1000 bytes .* w4@host, w3@host, w2@host, w1@host: the least"):
        load(bundle, "prefill", budget, host_memory=1000)
    with pytest.raises(InputError) as refused:
        load(bundle, "prefill", budget, host_memory=0)
    enough = int(str(refused.value).split("do is ")[1].split()[0])
    with pytest.raises(InputError):
        load(bundle, "prefill", budget, host_memory=enough - 1)
    model = load(bundle, "prefill:bits=2.5,k=0", budget, host_memory=enough)
    for seed in range(4):
        logits(model, ids(seed, 50))
        settle(model)
    live = model.moepack.manager
    assert live.host.peak <= enough and live.transitions.failures == 0 and not live.transitions.waiting()
    model.moepack.close()
    assert not ours() - before


def test_options_of_the_host_tier(bundle):
    """The fault: a rate or a number of threads that is read from nowhere, or that means no work at all."""
    budget = least(bundle, "prefill") + 1
    for given, message in (({"host_rate": 0}, "at least 1 byte"), ({"host_threads": 0}, "whole number from 1")):
        with pytest.raises(InputError, match=message):
            load(bundle, "prefill", budget, **given)
    model = load(bundle, "prefill:k=0", budget, host_rate="2MB", host_threads=1)
    tier = model.moepack.manager.tier
    assert (tier.rate, tier.threads) == (2_000_000, 1)
    model.moepack.close()
    with pytest.raises(InputError, match="size 'fast'"):
        load_for_logits(bundle, policy="prefill", device_memory=budget, host_rate="fast")
