"""M_fixed: the device memory of a served model outside its experts (dynaexq, section 3.3).

M_fixed has the dense tensors, the requested KV cache, a forward pass's activations and the staging buffer. `load`
reserves these bytes and `moepack plan` predicts them; measure.py measures them. This module imports no torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import asdict, dataclass

from moepack.pack.manifest import DENSE
from moepack.pack.reader import Bundle
from moepack.pack.spec import align

from .options import Workload

# bytes, of torch's allocator (c10/core/AllocatorConfig.h)
ROUNDED = 2 << 20
STAGED = 20 << 20
AHEAD = 4096  # tokens of a cache for which experts should be able to make room


@dataclass(frozen=True, slots=True)
class Fixed:
    """The parts of M_fixed, in bytes."""

    dense: int  # parameters and buffers outside the experts
    kv: int = 0  # the requested KV cache
    activations: int = 0  # the most that a forward pass takes beside weights and cache
    staging: int = 0  # buffers through which lossless extents are decoded, and prompts' pinned experts are read
    window: int = 0  # the slots in which a GPU decodes experts in place while their layer runs
    entries: int = 0  # a GPU's page entries for pinned host memory (`page_entries`)

    @property
    def total(self) -> int:
        """M_fixed, the sum of the parts."""
        return self.dense + self.kv + self.activations + self.staging + self.window + self.entries

    def __str__(self) -> str:
        parts = [f"{n} {size}" for n, size in asdict(self).items() if size or n not in ("window", "entries")]
        return f"{self.total} bytes outside the experts: {', '.join(parts)}"


@dataclass(frozen=True, slots=True)
class KvShape:
    """How the bytes of one sequence's cache grow with its tokens."""

    # For each tensor: bytes without tokens, bytes a token, and the most bytes (a sliding window) or `None`
    parts: tuple[tuple[int, int, int | None], ...] = ()

    def bytes(self, tokens: int, batch: int = 1) -> int:
        """Return the bytes of caches for `batch` sequences, each of `tokens` tokens."""
        if tokens <= 0:
            return 0
        grown = ((constant + slope * tokens, cap) for constant, slope, cap in self.parts)
        return batch * sum(size if cap is None else min(size, cap) for size, cap in grown)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token adds to a short cache."""
        return sum(slope for _, slope, _ in self.parts)

    def tokens(self, size: int, batch: int, most: int) -> int:
        """Return the most tokens a sequence, up to `most`, with which caches of `batch` sequences fit `size` bytes."""
        return bisect.bisect_right(range(1, most + 1), size, key=lambda tokens: self.bytes(tokens, batch))


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes that a forward pass allocates: bilinear in the pass's tokens and the cache's length."""

    # `passes`, `lengths`: the numbers of tokens of two measured passes, and two lengths of the cache after a pass
    passes: tuple[int, int] = (1, 2)
    lengths: tuple[int, int] = (1, 2)
    # Bytes measured for one sequence: the first pass at both lengths, then the second pass at both lengths
    corners: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)

    def bytes(self, tokens: int, length: int, batch: int = 1) -> int:
        """Return the bytes of a pass of `tokens` tokens after which caches have `length` tokens."""
        x = (tokens - self.passes[0]) / max(1, self.passes[1] - self.passes[0])
        y = (length - self.lengths[0]) / max(1, self.lengths[1] - self.lengths[0])
        a, b, c, d = self.corners
        return max(0, int(batch * ((1 - x) * ((1 - y) * a + y * b) + x * ((1 - y) * c + y * d))))


@dataclass(frozen=True, slots=True)
class MeasuredNeeds:
    """The measured memory that a workload needs."""

    workload: Workload
    kv: KvShape  # how a sequence's cache grows
    activations: int  # bytes of the largest requested pass, at the longest requested cache
    passes: Activations  # bytes of other passes
    # The part of `activations` that kernels keep between passes or use to unpack and convert weights; not in `passes`
    kept: int = 0
    embedding: int = 0  # bytes of an input embedding that stays in its file under a memory limit (dense/file_rows.py)
    dense: int = 0  # bytes of the dense tensors as they are served, the embedding included

    @property
    def kv_bytes(self) -> int:
        """Bytes of the requested cache."""
        return self.kv.bytes(self.workload.kv_tokens, self.workload.batch)

    def fixed(self, limited: bool) -> Fixed:
        """Return M_fixed without what policies and GPUs add; `limited`: whether there is a memory limit."""
        return Fixed(self.dense - self.embedding * limited, self.kv_bytes, self.activations)

    @property
    def ahead(self) -> int:
        """Bytes of a cache for which experts should be able to make room (`make_plan`)."""
        return self.kv.bytes(AHEAD) if self.workload.grows else 0

    def beside(self, tokens: int, length: int, batch: int) -> int:
        """Return the bytes that a pass allocates, without weights and caches; at most `activations` in the workload."""
        asked = self.workload
        if not asked.prefill_tokens:
            return 0
        takes = self.kept + self.passes.bytes(tokens, length, batch)
        within = tokens <= asked.prefill_tokens and length <= max(asked.kv_tokens, asked.prefill_tokens)
        return min(takes, self.activations) if within and batch <= asked.batch else takes


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """What a plan takes from a model's configuration and its skeleton."""

    needs: MeasuredNeeds
    looked_up: int  # of the dense tensors, bytes that a token does not read (token_cost.py)
    top_k: int  # experts to which a layer sends a token
    context: int  # the most tokens of a sequence, by the configuration; 0 where it names none


def described(bundle: Bundle) -> tuple[Hashable, ...]:
    """Return all of a bundle, beside its config and versions, on which what is measured of its model depends."""
    tensors = tuple(bundle.manifest.files[name].sha256 for name in _of_dense(bundle))
    return tensors, holds_dense(bundle), tuple(bundle.layers), bundle.manifest.dense


def holds_dense(bundle: Bundle) -> bool:
    """Whether the files of dense tensors are here."""
    return all((bundle.path / name).is_file() for name in _of_dense(bundle))


def _of_dense(bundle: Bundle) -> list[str]:
    """The names of the files of dense tensors, of which there may be several."""
    return [name for name in bundle.manifest.files if name.startswith(DENSE.partition(".")[0])]


def page_entries(size: int) -> int:
    """Return the bytes of a GPU that find `size` bytes of pinned host memory: 8 for each page of 4 KiB, in pages."""
    return align(-(-size // 4096) * 8, 4096)


def rounding(devices: int, live: bool) -> int:
    """Return the most bytes that torch's allocator takes beyond what it is asked for, to hold experts on GPUs.

    From 10 MiB on it rounds up to 2 MiB: the experts' one range a device. For less it takes 20 MiB: the staging buffers
    of policies that change versions (`live`). What is below 1 MiB shares ranges of 2 MiB: handle tables and counters.
    """
    return devices * 2 * ROUNDED + live * STAGED
