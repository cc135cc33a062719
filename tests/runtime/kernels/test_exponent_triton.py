"""The GPU decoder against the reference: on the device where there is one, through Triton's interpreter elsewhere."""

import numpy as np
import pytest
import torch
from exponent_inputs import KINDS, draw

from moepack.pack.codec import exponent, exponent_fast
from moepack.pack.codec.exponent import HEADER, LANE_WORDS, TILE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # conftest.py turns the interpreter on without a device


def jobs_of(streams):
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


def test_many_matrices_in_one_launch():
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


def test_damage_is_reported_and_stays_inside():
    """Code words that are not the encoder's: the lane lengths no longer fit."""
    from moepack.runtime.kernels.exponent_triton import decode

    coded = exponent_fast.encode(draw("gaussian", TILE, 1)).copy()
    parsed = exponent.parse(coded, TILE)
    first = len(coded) - TILE - 4 * len(parsed.stream) + 4 * 9
    coded[first : first + 400] ^= 0x5A
    (job, guarded) = jobs_of([(TILE, coded)])[0]
    assert decode([job]).tolist() == [1]
    assert (guarded[:4] == 7).all() and (guarded[4 + TILE :] == 7).all()


def test_buffers_that_do_not_fit_are_refused():
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


class Layer:
    """A layer of coded experts of two matrices, with biases behind them, some in host memory and some not."""

    SIZES = (TILE + 5, 300)
    ROWS = (3, 260)

    def __init__(self, experts, on_host):
        from moepack.runtime.kernels.exponent_triton import CodedLayer, places_of

        self.bits = [[draw(KINDS[(e + m) % 3], n, 7 * e + m) for m, n in enumerate(self.SIZES)] for e in range(experts)]
        self.biases = [[draw("gaussian", r, e) for r in self.ROWS] for e in range(experts)]
        self.extents, fields, tables, sizes = [], [], [], []
        lows, self.places = (0, 2 * (self.SIZES[0] + 3)), (2 * sum(self.SIZES) + 64, 2 * sum(self.SIZES) + 128)
        for e in range(experts):
            parts, at = [], 0
            for m, bits in enumerate(self.bits[e]):
                coded, bias = exponent_fast.encode(bits), self.biases[e][m].view(np.uint8)
                begin = at + -(-len(coded) // 4) * 4
                row, table = places_of(coded[:HEADER].copy(), at, lows[m], (begin, self.places[m], self.ROWS[m]))
                fields.append(row)
                tables.append(table)
                parts += [coded, np.zeros(begin - at - len(coded), np.uint8), bias]
                at = begin + -(-len(bias) // 16) * 16
                parts.append(np.zeros(at - begin - len(bias), np.uint8))
            extent = torch.from_numpy(np.concatenate(parts))
            # a pinned extent is read on a GPU at the host's address
            pinned = torch.cuda.is_available() and e in on_host
            self.extents.append(extent.pin_memory() if pinned else extent.to(DEVICE))
            sizes.append(len(extent) // 4)
        self.lows = lows
        self.of = CodedLayer(
            torch.tensor(fields).view(experts, 2, -1).to(DEVICE),
            torch.from_numpy(np.array(tables)).view(experts, 2, -1).to(DEVICE),
            torch.tensor(sizes).to(DEVICE),
            torch.full((experts, max(sizes) + 4), -1, dtype=torch.int32, device=DEVICE),
            torch.full((experts, 2 * sum(self.SIZES) + 1024), 7, dtype=torch.uint8, device=DEVICE),
            torch.zeros(1, dtype=torch.int32, device=DEVICE),
            (3, max(sizes)),
            True,
        )
        words = [x.data_ptr() + (e in on_host) for e, x in enumerate(self.extents)]
        self.coded = torch.tensor(words).to(DEVICE)

    def decoded(self, expert):
        """Whether an expert's slot has all its numbers; if not, check that nothing was written there."""
        slot = self.of.slots[expert].cpu().numpy()
        if (slot == 7).all():
            return False
        for low, bits in zip((*self.lows, *self.places), (*self.bits[expert], *self.biases[expert]), strict=True):
            assert np.array_equal(slot[low : low + bits.nbytes].view(np.uint16), bits)
            slot[low : low + bits.nbytes] = 7
        assert (slot == 7).all()
        return True


def test_experts_that_slots_name_are_decoded_where_they_belong():
    """From host memory by way of the stage, or from the device; blocks without slots and resident experts are left.

    Then one that is damaged is named, and the others are whole.
    """
    from moepack.runtime.kernels.exponent_triton import decode_chosen

    layer = Layer(5, {1, 3})
    layer.coded[4] = 0
    expert = torch.tensor([1, 0, 1, 2, 4, 0], dtype=torch.int32, device=DEVICE)
    count = torch.tensor([2, 3, 1, 0, 1, 1], dtype=torch.int32, device=DEVICE)
    decode_chosen(layer.of, expert, count, layer.coded)
    assert [layer.decoded(e) for e in range(5)] == [True, True, False, False, False]
    layer.of.slots.fill_(7)
    decode_chosen(layer.of, None, torch.tensor([0, 0, 2, 5, 1], dtype=torch.int32, device=DEVICE), layer.coded)
    assert [layer.decoded(e) for e in range(5)] == [False, False, True, True, False]
    brought = layer.of.stage.cpu() != -1
    assert [bool(row.any()) for row in brought] == [False, True, False, True, False]
    assert not brought[1, int(layer.of.sizes[1]) :].any() and layer.of.status.tolist() == [0]

    first = HEADER + 4 * (2 * 2 + int(layer.of.fields[2, 0, 4])) + 4 * LANE_WORDS
    layer.extents[2][first : first + 400] ^= 0x5A
    layer.of.slots.fill_(7)
    decode_chosen(layer.of, None, torch.tensor([1, 0, 1, 0, 0], dtype=torch.int32, device=DEVICE), layer.coded)
    assert layer.of.status.tolist() == [3] and layer.decoded(0)
