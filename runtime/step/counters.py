"""The routing of one step: what reducers add up by layer and expert, on the device.

Nothing waits for the device before the step has ended. The numbers are copied once, behind the step's last kernel, and
read when they have arrived.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from moepack.runtime.policies.reducers import COUNTS, GATES, Floats, Ints, Reducer, RouterOutput

FUSED = (COUNTS, GATES)  # which the launch that routes few tokens on a GPU adds up itself


class Counters:
    """The counters of one step. After `clear`, on the next step's stream, they can serve that step."""

    def __init__(self, experts: Sequence[int], sums: Sequence[Reducer], device: torch.device) -> None:
        """Count choices, and add up `sums`, for each of a layer's `experts` [layers]."""
        self._experts = tuple(experts)
        shape = (len(experts), max(experts, default=0) + 1)
        # [layers, the most experts + 1] on the device; the last column is of indices past the experts
        with torch.inference_mode(False):  # the counters outlive the pass that makes them
            self.counts = torch.zeros(shape, dtype=torch.int64, device=device)
            self.sums = {reducer: torch.zeros(shape, dtype=torch.float64, device=device) for reducer in sums}
        self.only_fused = all(reducer in FUSED for reducer in sums)
        self._on_host = device.type == "cpu"
        self.mask: Tensor | None = None  # int64 [tokens], 0 for padding, which is not counted; `None` without padding
        self.used = False  # whether anything was added
        self.within: list[tuple[slice, Counters]] = []  # ranges of the step's tokens, each with counters of its own
        self.tokens = 0  # the step's tokens, if `within` has ranges
        self._sent: tuple[Tensor, Mapping[Reducer, Tensor]] | None = None
        self._event: torch.cuda.Event | None = None

    @torch.no_grad()
    def add(self, position: int, routing: RouterOutput, fused: bool = False) -> None:
        """Count a layer's routing without waiting for the device.

        With `fused`, skip the counts that a launch has added.
        """
        self.used = True
        index = routing.index
        mask = self._mask(len(index))
        flat = index.reshape(-1).clamp(max=self._experts[position])
        chosen = flat.numpy() if self._on_host else None  # for a token torch's scatter takes four times as long
        if not fused:
            row = self.counts[position]
            if chosen is not None:
                read = chosen if mask is None else chosen[mask.bool().repeat_interleave(index.shape[1]).numpy()]
                row.numpy()[:] += np.bincount(read, minlength=len(row))
            else:
                one = row.new_ones(()) if mask is None else mask.unsqueeze(1)
                row.scatter_add_(0, flat, one.expand_as(index).reshape(-1))
        for reducer, table in self.sums.items():
            if fused and reducer in FUSED:
                continue
            value = None if reducer.value is None else reducer.value(routing)
            if value is None:
                continue
            value = value.detach().double()
            if mask is not None:
                value = value * mask.unsqueeze(1)
            if value.shape != index.shape:
                value = value.expand_as(index)
            value = value.reshape(-1)
            row = table[position]
            if chosen is not None:
                row.numpy()[:] += np.bincount(chosen, weights=value.numpy(), minlength=len(row))
            else:
                row.scatter_add_(0, flat, value)
        if len(index) == self.tokens:
            for part, counters in self.within:
                counters.add(position, routing.part(part))

    def _mask(self, tokens: int) -> Tensor | None:
        return self.mask if self.mask is not None and len(self.mask) == tokens else None

    def fused(self, position: int, tokens: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """A layer's counts, gate sums and the mask of so many tokens, for a launch that adds to them (`FUSED`)."""
        self.used = True
        sums = self.sums.get(GATES)
        return self.counts[position], None if sums is None else sums[position], self._mask(tokens)

    def like(self) -> Counters:
        """Return counters of the same kind, for the kernels of a captured graph."""
        return Counters(self._experts, tuple(self.sums), self.counts.device)

    def _tables(self) -> list[Tensor]:
        return [self.counts, *self.sums.values()]

    def zero(self) -> None:
        """Set the numbers to zero, on the current stream."""
        for table in self._tables():
            table.zero_()

    def copy_to(self, other: Counters) -> None:
        """Copy the numbers to the counters of a step, on its stream."""
        other.used = True
        for mine, theirs in zip(self._tables(), other._tables(), strict=True):
            theirs.copy_(mine)

    def layer(self, position: int) -> tuple[Ints, dict[Reducer, Floats]]:
        """A layer's counts and sums so far, [experts]. Waits for the device."""
        n = self._experts[position]
        counts: Ints = self.counts[position, :n].cpu().numpy().copy()
        return counts, {reducer: _numbers(table[position, :n].cpu()) for reducer, table in self.sums.items()}

    def send(self) -> None:
        """Issue the copy of the ended step's numbers to the host, behind the step's kernels."""
        for _, counters in self.within:
            counters.send()
        if self.counts.device.type != "cuda" or not self.used:
            return
        sums = {reducer: table.to("cpu", non_blocking=True) for reducer, table in self.sums.items()}
        self._sent = self.counts.to("cpu", non_blocking=True), sums
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(self.counts.device))

    def arrived(self) -> bool:
        """Whether the numbers are on the host, so that `take` returns at once."""
        return (self._event is None or self._event.query()) and all(c.arrived() for _, c in self.within)

    def take(self) -> tuple[list[Ints], dict[Reducer, list[Floats]]]:
        """Counts and sums, [experts] for each layer: counts are views, valid until `clear`. Waits for arrival."""
        if self._event is not None:
            self._event.synchronize()
        counts, sums = self._sent or (self.counts, self.sums)
        numbers = [row[:n] for row, n in zip(counts.cpu().numpy(), self._experts, strict=True)]
        return numbers, {
            reducer: [_numbers(row[:n]) for row, n in zip(table.cpu(), self._experts, strict=True)]
            for reducer, table in sums.items()
        }

    def clear(self) -> None:
        """Set everything to zero for another step, on its stream: on another it might come after the step's counts."""
        if self.used:
            self.zero()
        self.mask = self._sent = self._event = None
        self.used = False
        self.within = []
        self.tokens = 0


def _numbers(sums: Tensor) -> Floats:
    """A copy with 0 for what is not finite: one token's NaN would stay in a policy's scores for ever."""
    out: Floats = np.nan_to_num(sums.numpy(), nan=0.0, posinf=0.0, neginf=0.0)
    return out
