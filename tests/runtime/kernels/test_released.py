"""Released encodings: torch's weights against pack's, bit for bit."""

from __future__ import annotations

import pytest
import torch
from expert_layers import RELEASED, make_layer

from moepack.pack.spec import Matrix, Version
from moepack.runtime.kernels import reference

SHAPES = [(96, 2048), (1, 1), (17, 31), (33, 100), (65, 33), (130, 257)]


@pytest.mark.parametrize("version", RELEASED, ids=lambda v: f"{v.name}-{v.group_size}")
def test_torchs_weights_are_packs(version: Version) -> None:
    for k, (rows, cols) in enumerate(SHAPES):
        m = Matrix("m", rows, cols, bias=bool(k % 2))
        layer = make_layer(m, [version], [0], seed=k)
        sections = reference.sections_of((m,), version)[0]
        want = torch.from_numpy(layer.weights[0]).float()
        for dtype in (torch.float32, torch.bfloat16):
            got = reference.dequantise(layer.extents[0], sections, m, version, dtype)
            assert torch.equal(got, want.to(dtype)), (rows, cols, dtype)
