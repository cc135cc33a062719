"""The GPU decoder against the reference: on the device where there is one, through Triton's interpreter elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from exponent_inputs import KINDS, draw

from moepack.pack.codec import exponent, exponent_fast
from moepack.pack.codec.exponent import HEADER, TILE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device


def jobs_of(streams: list[tuple[int, np.ndarray]]) -> list:
    from moepack.runtime.kernels.exponent_triton import DecodeJob

    made = []
    for n, coded in streams:
        room = torch.zeros(len(coded) + 8, dtype=torch.uint8, device=DEVICE)
        room[: len(coded)] = torch.from_numpy(coded.copy())
        guarded = torch.full((n + 8,), 7, dtype=torch.int16, device=DEVICE)
        made.append(
            (DecodeJob(room[: len(coded)], coded[:HEADER].copy(), guarded[4 : 4 + n].view(torch.bfloat16)), guarded)
        )
    return made


def test_many_matrices_in_one_launch() -> None:
    """Sizes that divide nothing beside whole tiles, raw tiles beside coded ones, patches, an empty matrix."""
    from moepack.runtime.kernels.exponent_triton import decode

    sizes = [0, 1, 3, 127, 128, 130, TILE - 1, TILE, TILE + 1]
    bits = [draw(KINDS[i % len(KINDS)], n, i) for i, n in enumerate(sizes)]
    bits += [draw(kind, 2001, 9) for kind in KINDS]
    made = jobs_of([(b.size, exponent.encode(b)) for b in bits])
    status = decode([job for job, _ in made])
    assert status.tolist() == [0] * len(bits)
    for b, (job, guarded) in zip(bits, made, strict=True):
        assert np.array_equal(job.out.view(torch.int16).cpu().numpy().view(np.uint16), b)
        assert (guarded[:4] == 7).all() and (guarded[4 + b.size :] == 7).all()


def test_damage_is_reported_and_stays_inside() -> None:
    """Code words that are not the encoder's: the lane lengths no longer fit."""
    from moepack.runtime.kernels.exponent_triton import decode

    coded = exponent_fast.encode(draw("gaussian", TILE, 1)).copy()
    parsed = exponent.parse(coded, TILE)
    first = len(coded) - TILE - 4 * len(parsed.stream) + 4 * 9
    coded[first : first + 400] ^= 0x5A
    (job, guarded) = jobs_of([(TILE, coded)])[0]
    assert decode([job]).tolist() == [1]
    assert (guarded[:4] == 7).all() and (guarded[4 + TILE :] == 7).all()


def test_buffers_that_do_not_fit_are_refused() -> None:
    from moepack.runtime.kernels.exponent_triton import DecodeJob, decode

    coded = exponent_fast.encode(draw("gaussian", 256, 1))
    data = torch.from_numpy(coded.copy())
    for bad in (
        DecodeJob(data, coded[:HEADER], torch.empty(255, dtype=torch.bfloat16)),
        DecodeJob(data[:-4], coded[:HEADER], torch.empty(256, dtype=torch.bfloat16)),
        DecodeJob(data, coded[:HEADER], torch.empty(256, dtype=torch.float16)),
    ):
        with pytest.raises(ValueError, match="coded matrix"):
            decode([bad])
