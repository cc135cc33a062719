"""The routing of one step: counts and gate sums by layer and expert, added up on the device.

Nothing waits for the device before the step has ended. The numbers are copied once, behind the step's last kernel, and
read when they have arrived.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


class Counters:
    """The counters of one step. After `clear`, on the next step's stream, they can serve that step."""

    def __init__(self, experts: Sequence[int], gates: bool, device: torch.device) -> None:
        self._experts = tuple(experts)
        shape = (len(experts), max(experts, default=0) + 1)
        with torch.inference_mode(False):  # the counters outlive the pass that makes them
            # [layers, the most experts + 1] on the device; the last column counts indices past the experts
            self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
            self.sums = torch.zeros(shape, dtype=torch.float64, device=device) if gates else None  # of gate weights
        self._on_host = device.type == "cpu"
        self.mask: Tensor | None = None  # int64 [tokens], 0 for padding, which is not counted; `None` without padding
        self.used = False  # whether anything was added
        self.within: list[tuple[slice, Counters]] = []  # ranges of the step's tokens, each with counters of its own
        self.tokens = 0  # the step's tokens, if `within` has ranges
        self._sent: tuple[Tensor, Tensor | None] | None = None
        self._event: torch.cuda.Event | None = None

    @torch.no_grad()
    def add(self, position: int, index: Tensor, weights: Tensor) -> None:
        """Count a layer's routing: `index` and `weights` are [tokens, top_k]. Does not wait for the device."""
        self.used = True
        row = self.counts[position]
        none = self._experts[position]
        sums = None if self.sums is None else self.sums[position]
        mask = self.mask if self.mask is not None and len(self.mask) == len(index) else None
        gates = weights.detach().double() if mask is None else weights.detach().double() * mask.unsqueeze(1)
        flat = index.reshape(-1).clamp(max=none)
        if self._on_host:  # for a token torch's scatter takes four times as long
            chosen = flat.numpy()
            read = chosen if mask is None else chosen[mask.bool().repeat_interleave(index.shape[1]).numpy()]
            row.numpy()[:] += np.bincount(read, minlength=len(row))
            if sums is not None:
                sums.numpy()[:] += np.bincount(chosen, weights=gates.numpy().reshape(-1), minlength=len(row))
        else:
            one = row.new_ones(()) if mask is None else mask.unsqueeze(1)
            row.scatter_add_(0, flat, one.expand_as(index).reshape(-1))
            if sums is not None:
                sums.scatter_add_(0, flat, gates.reshape(-1))
        if len(index) == self.tokens:
            for part, counters in self.within:
                counters.add(position, index[part], weights[part])

    def rows(self, position: int, tokens: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A layer's counts, gate sums and the mask of so many tokens, for a kernel that adds to them."""
        self.used = True
        mask = self.mask if self.mask is not None and len(self.mask) == tokens else None
        return self.counts[position], None if self.sums is None else self.sums[position], mask

    def like(self) -> Counters:
        """Return counters of the same kind, for the kernels of a captured graph."""
        return Counters(self._experts, self.sums is not None, self.counts.device)

    def zero(self) -> None:
        """Set the numbers to zero, on the current stream."""
        self.counts.zero_()
        if self.sums is not None:
            self.sums.zero_()

    def copy_to(self, other: Counters) -> None:
        """Copy the numbers to the counters of a step, on its stream."""
        other.used = True
        other.counts.copy_(self.counts)
        if self.sums is not None and other.sums is not None:
            other.sums.copy_(self.sums)

    def layer(self, position: int) -> npt.NDArray[np.int64]:
        """A layer's counts so far, int64 [experts]. Waits for the device."""
        out: npt.NDArray[np.int64] = self.counts[position, : self._experts[position]].cpu().numpy().copy()
        return out

    def gates(self, position: int) -> npt.NDArray[np.float64] | None:
        """A layer's gate sums so far, float64 [experts], or `None` if gates are not counted. Waits for the device."""
        return None if self.sums is None else _numbers(self.sums[position, : self._experts[position]].cpu().numpy())

    def send(self) -> None:
        """Issue the copy of the ended step's numbers to the host, behind the step's kernels."""
        for _, counters in self.within:
            counters.send()
        if self.counts.device.type != "cuda" or not self.used:
            return
        sums = None if self.sums is None else self.sums.to("cpu", non_blocking=True)
        self._sent = self.counts.to("cpu", non_blocking=True), sums
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self.counts.device))

    def arrived(self) -> bool:
        """Whether the numbers are on the host, so that `take` returns at once."""
        return (self._event is None or self._event.query()) and all(c.arrived() for _, c in self.within)

    def take(self) -> tuple[list[npt.NDArray[np.int64]], list[npt.NDArray[np.float64]]]:
        """Counts and gate sums, [experts] for each layer: counts are views, valid until `clear`. Waits for arrival."""
        if self._event is not None:
            self._event.synchronize()
        counts, sums = self._sent or (self.counts, self.sums)
        pairs = () if sums is None else zip(sums.cpu().numpy(), self._experts, strict=True)
        gates = [_numbers(row[:n]) for row, n in pairs]
        return [row[:n] for row, n in zip(counts.cpu().numpy(), self._experts, strict=True)], gates

    def clear(self) -> None:
        """Set everything to zero for another step, on its stream: on another it might come after the step's counts."""
        if self.used:
            self.zero()
        self.mask = self._sent = self._event = None
        self.used = False
        self.within = []
        self.tokens = 0


def _numbers(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """A copy with 0 for what is not finite: one token's NaN would stay in a policy's scores for ever."""
    return np.nan_to_num(sums, nan=0.0, posinf=0.0, neginf=0.0)
