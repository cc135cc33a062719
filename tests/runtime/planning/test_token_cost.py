"""Bounds on a token: what they leave, kept for the worst token, and what is refused."""

import pytest
import torch
from support import for_logits, load_for_logits

import moepack
from moepack.pack.errors import InputError
from moepack.reports.plan import plan
from moepack.runtime.devices.reading import read_rate
from moepack.runtime.planning.sizes import parse_bound
from moepack.runtime.planning.token_cost import experts_read, within

CPU = torch.device("cpu")


def test_what_bounds_are():
    for text in ("0ms", "0", "-1s", "1.2.3ms", "soon", -0.5, 0.05, 10**400, True):
        with pytest.raises(InputError):
            parse_bound(text)
    assert parse_bound(None) is None
    for text, seconds in (("50ms", 0.05), ("0.2 s", 0.2), ("800us", 8e-4), ("1e-3s", 1e-3)):
        bound = parse_bound(text)
        assert bound is not None and bound.seconds == pytest.approx(seconds)
    bound = parse_bound("2GB")
    assert bound is not None and bound.bytes == 2e9


def test_a_bound_leaves_the_versions_that_keep_it(bundle):
    opened = moepack.open(bundle)
    chosen, outside = 2, 1_000_000
    sizes = {v.name: outside + experts_read(opened, v, chosen) for v in opened.versions}
    assert list(sizes.values()) == sorted(sizes.values(), reverse=True)
    layer = opened.layers[0]
    assert experts_read(opened, opened.versions[0], chosen) >= 2 * chosen * len(opened.layers) * layer.expert_weights
    for name, size in sizes.items():
        left = [n for n, s in sizes.items() if s <= size]
        for bound in (str(size), f"{size / 1e6 + 1e-6:.7f}ms"):
            found = within(opened, parse_bound(bound), outside, chosen, lambda: 1e9)
            assert [v.name for v in found.versions] == left and name == left[0]
    with pytest.raises(InputError, match=f"with every expert at w1 a token reads {sizes['w1']} bytes"):
        within(opened, parse_bound(str(sizes["w1"] - 1)), outside, chosen, lambda: 1e9)


def test_plans_and_loading_keep_it(bundle):
    given = {"device_memory": 1 << 30, "prefill_tokens": 0}
    free = plan(bundle, for_logits(**given))
    assert free.bytes_per_token is not None
    bound = str(free.bytes_per_token - 1)
    planned = plan(bundle, for_logits(**given, max_tpot=bound))
    assert planned.bytes_per_token is not None and planned.bytes_per_token < free.bytes_per_token
    assert planned.expected_relative_loss > free.expected_relative_loss
    with load_for_logits(bundle, max_tpot=bound, prefill_tokens=0).moepack as serving:
        assert "bf16" not in {v for row in serving.versions for v in row}
    with pytest.raises(InputError, match="bf16"):
        load_for_logits(bundle, policy="static:bf16", max_tpot=bound)
    with pytest.raises(InputError, match="leaves no version"):
        moepack.load(bundle, max_tpot="1kB")


def test_a_rate_is_measured_where_the_device_is():
    rate = read_rate(CPU)
    assert rate is not None and 1e8 < rate < 1e13
    assert read_rate(torch.device("cuda", 99)) is None
