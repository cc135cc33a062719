"""Upper bounds of the bytes that quantising takes: the tensors in memory at once in each step. Arithmetic on shapes.

The batch size affects a bundle's bytes, so `expert_batch.expert_batches` chooses it, independent of these bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

from moepack.pack.spec import ExpertLayer, Matrix, Version, lossy

from .crossfit import FOLDS, at_once, sample_size
from .expert_batch import PART, Settings
from .gptq import LANES, experts_at_once, working_bytes
from .methods import method_for

OTHERS = 256  # the most tokens of other experts that an expert is measured on
SMALL = 16 << 20  # bytes added, with a 16th of those counted, for small tensors and the allocator's rounding
CODED = 0.75  # upper bound of a lossless extent relative to its BF16 matrix, except for unusual weights
# Bytes a weight of reading and encoding a released matrix, beside 2: of 4096 x 4096 weights all took 5.0 (MXFP4) to 6.7
# (FP8, whose codes are coded again).
RELEASED = 5


def batch_memory(layer: ExpertLayer, settings: Settings, experts: int) -> int:
    """Upper bound of the bytes that quantising a batch of `experts` experts takes on the compute device."""
    return _largest_step(layer, settings, experts) * 17 // 16 + SMALL


def dense_memory(rows: Matrix, versions: Sequence[Version], method: str) -> int:
    """Upper bound of the bytes that quantising rows of a dense matrix takes on the compute device, beside its moments
    and the checkpoint's weights."""
    affine = lossy(versions)
    exact = RELEASED if any(v.released for v in versions) else 2 * CODED * (len(affine) < len(versions))
    packed = int(rows.weights * (_bytes_a_weight(affine) + 2 + exact))
    made = len(affine) * rows.weights
    fitted = any(method_for(method, v).needs_moments for v in affine)
    working = working_bytes(rows.rows, rows.cols, len(affine)) if fitted else _rounding(rows, 1)
    # Two steps. Quantising: GPTQ of many rows took 8 bytes a weight more than `working_bytes`. Measuring one version:
    # its error, the error's product with the moments and with itself, and this product in float64.
    steps = [2 * made + working + 8 * fitted * rows.weights, made + 16 * rows.weights] if affine else []
    return (packed + max((4 * rows.weights + step for step in steps), default=0)) * 17 // 16 + SMALL


def _largest_step(layer: ExpertLayer, settings: Settings, experts: int) -> int:
    first = layer.matrices[0]
    second = layer.matrices[-1]
    versions = settings.versions
    fitted = any(method_for(settings.method, v).needs_moments for v in versions)
    weights = experts * sum(4 * m.weights for m in layer.matrices)
    squares = [4 * m.cols * m.cols for m in (first, second)]
    made = experts * sum(m.weights for m in layer.matrices) * len(versions)
    packed = experts * sum(int(m.weights * (_bytes_a_weight(versions) + 2 * CODED)) for m in layer.matrices)
    # After quantising, an expert is measured: one version's values, their temporaries, and two sets of activations.
    tokens = settings.loss_tokens + OTHERS
    measured = 2 * tokens * (5 * first.cols + 2 * first.rows + 8 * second.cols + 12 * second.rows)
    measured += 4 * sum(m.weights for m in layer.matrices) + 8 * max(m.weights for m in layer.matrices)
    last = weights + made + packed + measured
    if not fitted:
        return max(last, weights + made + max(_rounding(m, experts) for m in layer.matrices))
    moments = FOLDS * (experts * sum(squares) + squares[0] + experts * squares[1])
    part = 4 * PART * (2 * first.cols + first.rows + 3 * second.cols)
    errors = sum(4 * experts * len(versions) * FOLDS * sample_size(m.rows) * m.cols for m in layer.matrices)
    steps = [weights + moments + part, last + errors]
    for m, square, kept in (
        (second, squares[1], moments),
        (first, squares[0], moments - 2 * FOLDS * experts * squares[1]),
    ):
        # Steps: cross-fitting; making the moments of all tokens, with three temporaries; quantising the matrix.
        folds = at_once(m.cols, experts)
        few = sample_size(m.rows)
        together = experts_at_once(few, m.cols, len(versions), folds)
        again = together * working_bytes(few, m.cols, len(versions))
        steps.append(weights + made + errors + kept + _stacked(folds) * square + max(3 * square, again))
        steps.append(weights + made + errors + kept + _stacked(experts) * square + 3 * square)
        left = kept - FOLDS * experts * 2 * square if m is second else 0
        whole = experts_at_once(m.rows, m.cols, len(versions), experts) * working_bytes(m.rows, m.cols, len(versions))
        steps.append(weights + 2 * made + errors + left + experts * square + whole)
    if settings.refine:
        # `refit_down`: of some experts, and of the layer, two sums at each version; the first matrix's values and
        # temporaries of one version's sums; then one version's fit.
        together = min(experts, max(1, LANES // second.rows))
        summed = len(versions) * (2 * (together + 1) * squares[1] + 4 * first.weights) + 4 * squares[1]
        fitting = together * (working_bytes(second.rows, second.cols, 1) + 8 * second.weights + squares[1])
        steps.append(weights + 2 * made + errors + summed + max(part, fitting))
    return max(steps)


def _stacked(matrices: int) -> int:
    """Matrices in memory while `matrices` of them are stacked."""
    return 2 * matrices if matrices > 1 else 1


def _rounding(matrix: Matrix, experts: int) -> int:
    """Bytes of the one temporary that rounding to nearest makes: the matrices' magnitudes."""
    return 4 * experts * matrix.weights


def _bytes_a_weight(versions: Sequence[Version]) -> float:
    return sum((v.bits + v.by_matrix) / 8 + 3 / v.group_size for v in versions)
