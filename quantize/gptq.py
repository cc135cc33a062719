"""Recipe method `gptq`: GPTQ for a batch of experts at several widths at once.

One factor of the second moments serves every width. One loop over the columns serves every row, width and expert of a
batch. The list gives the additions to GPTQ (Frantar et al., 2022, section 3) and the output error at 4 / 3 / 2 / 1 bits
on held-out tokens of trained experts (256 by 256 and 128, groups of 64). For comparison, gptqmodel has 0.00087, 0.00375
and 0.0195, and signs times the mean magnitude have 0.207 at 1 bit.

- Grids that minimise the error the factor predicts (`lanes`), zero points in steps of a 16th (4 bits) to a 64th (2
  bits) of a code, and the loop computing with values as stored: 0.00085, 0.00351, 0.0151, 0.088.
- Columns ordered by falling diagonal within a group (`factor`): 8 % less.
- Two sweeps of coordinate descent over the groups: each group's scale and zero point by least squares, then each
  column's best code, all else fixed: 0.00067, 0.00276, 0.0115, 0.059. A third sweep gains 1 to 3 %.

Tried and left out: quantising again on the fitted grids without descent (gains 1 %, at one bit 5 %), ordering whole
groups (gains nothing), two-bit levels of the form +-a+-b (3 to 8 % worse, and an eighth of a bit more).

Time, one core at 180 GFLOP/s, gate_up of Qwen3-30B-A3B (1,536 by 2,048), three widths: the products need
cols^3 / 3 + widths * rows * cols^2 * (1 + 2 * sweeps) = 100 GFLOP, 0.55 s; measured 1.1 s
(gptqmodel: 10.4 s).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moepack.pack.spec import Version, align

from .factor import Factored, factor
from .grid import Quantised, fix_scale, fix_zero, join
from .lanes import LANE, Lanes, column_sums, search
from .methods import FREE

SWEEPS = 2
_SUB = 16  # columns that pass on their errors one by one; later columns get them by matrix product, 16 at a time
# Bytes of the experts in a batch. On a CPU, small experts gain a third from batches of about eight; those of 2,048
# columns lose a little.
BATCH_BYTES = {"cpu": 1 << 25, "cuda": 1 << 32}
# With few lanes (rows times widths), dispatch dominates a step along the columns. So matrices of few rows are batched
# to LANES lanes, in up to NARROW times the memory. Refits of 16 rows of 1,024 columns take 7 % less than with 512 or
# 2,048 lanes.
LANES = 1024
NARROW = 8


def quantise_widths(
    weight: Tensor, moments: Tensor, versions: Sequence[Version], zeros: str = FREE
) -> dict[Version, Quantised]:
    """Quantise a batch of experts at every width; see `methods.quantise_all`.

    Moments that are zero or not finite count as the identity. Versions of one group size share all the work. The result
    is deterministic. An expert's codes do not depend on its batch, except for weights halfway between two codes; on a
    CPU they do not depend on the other versions.
    """
    experts, own, cols = weight.shape
    made: dict[Version, list[Quantised]] = {v: [] for v in versions}
    for size, scale_bits in sorted({(v.group_size, v.scale_bits) for v in versions}):
        alike = [v for v in versions if (v.group_size, v.scale_bits) == (size, scale_bits)]
        rows = wide_rows(own)
        step = experts_at_once(own, cols, len(alike), experts, weight.device.type)
        for start in range(0, experts, step):
            wide = weight[start : start + step].repeat(1, -(-rows // own), 1)[:, :rows]
            part = _batch(wide, moments[start : start + step], alike, size, zeros)
            for version, q in zip(alike, part, strict=True):
                made[version].append(q.map(lambda tensor: tensor[:, :own]))
    return {v: join(parts) for v, parts in made.items()}


def wide_rows(rows: int) -> int:
    """Round `rows` up to a multiple of LANE, so that a version's codes do not depend on the other versions."""
    return align(rows, LANE)


def experts_at_once(rows: int, cols: int, widths: int, experts: int, device: str = "cpu") -> int:
    """Return how many of `experts` matrices fit in one batch."""
    rows = wide_rows(rows)
    most = BATCH_BYTES.get(device, 1 << 30) / working_bytes(rows, cols, widths)
    return min(experts, max(1, int(most), min(LANES // (rows * widths), int(NARROW * most))))


def working_bytes(rows: int, cols: int, widths: int) -> int:
    """Peak bytes of one expert: four matrices of its moments' size, its weights twice, errors and codes."""
    rows = wide_rows(rows)
    return 4 * 4 * cols * cols + (2 * 4 + widths * (4 + 1)) * rows * cols


def _batch(
    weight: Tensor, moments: Tensor, versions: Sequence[Version], group_size: int, zeros: str
) -> list[Quantised]:
    work = Work(weight, factor(moments, group_size), versions, group_size, zeros)
    work.feed_forward()
    for _ in range(SWEEPS):
        work.sweep()
    return work.result(versions)


class Work:
    """A batch's state: codes uint8, errors float32 [experts, cols, lanes], grids float32 [experts, groups, lanes]."""

    def __init__(
        self, weight: Tensor, factored: Factored, versions: Sequence[Version], group_size: int, zeros: str = FREE
    ) -> None:
        experts, self._rows, cols = weight.shape
        largest = weight.abs().amax((1, 2)).clamp(min=torch.finfo(torch.float32).tiny)
        self._unit = 2.0 ** torch.floor(torch.log2(largest))  # a power of two, so that scaling does not round
        self._factored = factored
        self._widths = len(versions)
        turned = [(w / u)[:, o].T for w, u, o in zip(weight, self._unit, factored.order, strict=True)]
        self.weight = torch.stack(turned).contiguous()
        self._lanes = Lanes.of(versions, self._rows, weight.device, zeros)
        lanes = len(versions) * self._rows
        self.error = weight.new_empty(experts, cols, lanes)  # weight less value
        self.codes = torch.empty(experts, cols, lanes, dtype=torch.uint8, device=weight.device)
        self._blocks = [(a, min(a + group_size, cols)) for a in range(0, cols, group_size)]
        self.scale = weight.new_empty(experts, len(self._blocks), lanes)
        self.zero = weight.new_empty(experts, len(self._blocks), lanes)

    def feed_forward(self) -> None:
        """Run GPTQ's loop: each column compensates the errors of the columns before it, and is rounded."""
        feed = self._factored.feed
        weight = self._factored.weight
        for g, (start, end) in enumerate(self._blocks):
            exact = self.weight[:, start:end].repeat(1, 1, self._widths)
            block = exact.clone()
            if start:
                block.baddbmm_(feed[:, :start, start:end].transpose(1, 2), self.error[:, :start])
            share = weight[:, start:end] / weight[:, start:end].sum(-1, keepdim=True)
            scale, zero = search(block, share, self._lanes)
            self.scale[:, g], self.zero[:, g] = scale, zero
            inverse = 1 / scale
            exact += (zero * scale)[:, None]
            codes = torch.empty_like(block)
            error = self.error[:, start:end]
            for a in range(0, end - start, _SUB):
                b = min(a + _SUB, end - start)
                for k in range(a, b):
                    code = codes[:, k]
                    wrong = error[:, k]
                    torch.addcmul(zero, block[:, k], inverse, out=code)
                    code.round_().clamp_(min=0).clamp_(max=self._lanes.top)
                    torch.addcmul(exact[:, k], code, scale, value=-1, out=wrong)
                    if k + 1 < b:
                        into = feed[:, start + k, start + k + 1 : start + b, None]
                        block[:, k + 1 : b].addcmul_(into, wrong[:, None])
                if b < end - start:
                    into = feed[:, start + a : start + b, start + b : end].transpose(1, 2)
                    block[:, b:].baddbmm_(into, error[:, a:b])
            self.codes[:, start:end] = codes

    def sweep(self) -> None:
        """Visit each group: fit the grid to the codes, then choose each column's codes anew, all else fixed."""
        moments = self._factored.damped
        inverse_diagonal = 1 / moments.diagonal(dim1=-2, dim2=-1)
        for g, (start, end) in enumerate(self._blocks):
            inside = moments[:, start:end, start:end]
            slope = moments[:, start:end] @ self.error  # minus half the derivative of the error by the values
            codes = self.codes[:, start:end].float()
            error = self.error[:, start:end]
            self._regrid(g, codes, slope, error, inside)
            scale = self.scale[:, g]
            inverse = 1 / self.scale[:, g]
            slope *= inverse_diagonal[:, start:end, None]
            inside = inside * inverse_diagonal[:, start:end, None]
            better = torch.empty_like(codes)
            change = torch.empty_like(codes)
            for a in range(0, end - start, _SUB):
                b = min(a + _SUB, end - start)
                for k in range(a, b):
                    code = better[:, k]
                    step = change[:, k]
                    torch.addcmul(codes[:, k], slope[:, k], inverse, out=code)
                    code.round_().clamp_(min=0).clamp_(max=self._lanes.top)
                    torch.sub(codes[:, k], code, out=step).mul_(scale)
                    if k + 1 < b:
                        slope[:, k + 1 : b].addcmul_(inside[:, k + 1 : b, k, None], step[:, None])
                if b < end - start:
                    slope[:, b:].baddbmm_(inside[:, b:, a:b], change[:, a:b])
            error += change
            self.codes[:, start:end] = better

    def _regrid(self, g: int, codes: Tensor, slope: Tensor, error: Tensor, inside: Tensor) -> None:
        """Move a group to the best scale and zero point for its codes, or the best scale, or leave it.

        Updates `slope` and `error`. With e the row's error, H its moments and `slope` = H e, a change v of the
        group's values adds v H v - 2 v slope to e H e, H being `inside`. The values are s c - t, with codes c and a
        shift t = s z. Written xy for x H y, g for `slope` and 1 for a row of ones:

        - Scale and shift free: v = ds c - dt 1 adds ds^2 cc - 2 ds dt c1 + dt^2 11 - 2 (ds gc - dt g1), least where
          ds cc - dt c1 = gc and dt 11 - ds c1 = -g1 (the normal equations). Their solution gives z = t / s.
        - Zero point rounded to its stored form: with d = c - z and the old grid's scale s' and d' = c - z',
          v = s d - s' d' adds s^2 dd - 2 s s' dd' + s'^2 d'd' - 2 (s gd - s' gd'), least where
          s = (gd + s' dd') / dd, which is then rounded as well. The same with z = z' is the best scale alone.
        """
        scale = self.scale[:, g]
        zero = self.zero[:, g]
        ones = inside.sum(-1)[:, None, :]
        total = ones.sum(-1)
        product = inside @ codes
        cc = column_sums(codes * product)
        c1 = (ones @ codes)[:, 0]
        gc = column_sums(codes * slope)
        g1 = column_sums(slope)
        determinant = cc * total - c1 * c1
        free_scale = scale + (gc * total - g1 * c1) / determinant
        free_shift = scale * zero - (cc * g1 - c1 * gc) / determinant
        moved = torch.where(torch.isfinite(free_shift / free_scale), free_shift / free_scale, zero)
        moved = self._lanes.stored_zero(moved)

        def fitted(z: Tensor) -> tuple[Tensor, Tensor]:
            """The best scale for zero point `z`, in stored form, and its change of the error."""
            dd = cc - 2 * z * c1 + z * z * total
            dd_old = cc - (z + zero) * c1 + z * zero * total
            gd = gc - z * g1
            s = self._lanes.stored_scale((gd + scale * dd_old) / dd, scale)
            old_old = cc - 2 * zero * c1 + zero * zero * total
            quadratic = s * s * dd - 2 * s * scale * dd_old + scale * scale * old_old
            return s, quadratic - 2 * (s * gd - scale * (gc - zero * g1))

        s1, gain1 = fitted(zero)
        s2, gain2 = fitted(moved)
        use2 = (gain2 < gain1) & (gain2 < 0)
        use1 = ~use2 & (gain1 < 0)
        new = torch.where(use2, s2, torch.where(use1, s1, scale))
        new_zero = torch.where(use2, moved, zero)
        step = (new - scale)[:, None]
        offset = (new * new_zero - scale * zero)[:, None]
        error -= codes * step - offset
        slope -= product * step - ones.transpose(1, 2) * offset
        self.scale[:, g], self.zero[:, g] = new, new_zero

    def result(self, versions: Sequence[Version]) -> list[Quantised]:
        """The batch at every version, its columns in the matrix's own order."""
        place = self._factored.order.argsort(dim=-1)
        scale = self.scale * self._unit[:, None, None]
        out = []
        for i, version in enumerate(versions):
            lanes = slice(i * self._rows, (i + 1) * self._rows)
            codes = torch.stack([c[p].T for c, p in zip(self.codes[..., lanes], place, strict=True)])
            zero = None if version.zero == "midpoint" else fix_zero(self.zero[..., lanes], version.bits)
            out.append(
                Quantised(
                    codes.contiguous(),
                    fix_scale(scale[..., lanes], version.scale_bits).transpose(1, 2).contiguous(),
                    None if zero is None else zero.transpose(1, 2).contiguous(),
                )
            )
        return out
