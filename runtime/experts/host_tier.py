"""The host tier: threads that run a layer's experts in host memory while the device runs its own.

Weights stay in host memory, and activations travel: one round trip a layer (context-aware-cxl-ndp, sections 2.2 and
4.1). A limit on the bytes read a second simulates memory slower than the machine's. forward.py gives the tier work.
"""

from __future__ import annotations

import contextlib
import copy
import queue
import threading
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch import Tensor

from moepack.runtime.kernels.current import current

Work = Callable[..., tuple[Tensor, int]]  # returns a result, and the bytes of weights that were read for it


class CudaLink:
    """Copies activations to the host and back, through pinned buffers that torch keeps until their copies end."""

    def fetch(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to copy tensors to the host, on the compute stream; return a function that waits and returns them."""
        copied = tuple(t.detach().to("cpu", non_blocking=True) for t in tensors)
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(tensors[0].device))

        def arrived() -> tuple[Tensor, ...]:
            event.synchronize()
            return copied

        return arrived

    def send(self, made: Tensor, device: torch.device) -> Tensor:
        """Return a copy of a result on the device, made through pinned memory on the compute stream without waiting."""
        with current(device):  # elsewhere pinning makes a context on another GPU
            pinned = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        return pinned.copy_(made).to(device, non_blocking=True)


class HostCall:
    """A layer's call of the tier: a context whose body runs at the same time as the call.

    Leaving the context waits for the call, even if interrupted: the call reads memory that the pass's step keeps.
    """

    def __init__(self, work: Work, arrive: Callable[[], tuple[Tensor, ...]]) -> None:
        self.out: Tensor | None = None  # the result, after the context
        self.unwanted = False
        self._work: Work | None = work
        self._arrive: Callable[[], tuple[Tensor, ...]] | None = arrive
        enabled = torch.is_autocast_enabled("cpu")  # the tier's thread does not inherit the caller's autocasting
        self._cast = torch.autocast("cpu", dtype=torch.get_autocast_dtype("cpu"), enabled=enabled)
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self, tier: HostTier) -> None:
        """Do the work on the tier's thread, then sleep as long as the tier's rate asks."""
        try:
            if self.unwanted:
                return
            assert self._work is not None and self._arrive is not None
            with torch.inference_mode(), self._cast:
                given = self._arrive()
                began = time.perf_counter()
                self.out, size = self._work(*given)
            until = began + size / tier.rate if tier.rate is not None else 0.0
            while (left := until - time.perf_counter()) > 0 and not (self.unwanted or tier.closed):
                time.sleep(min(left, 0.05))
            with tier.counting:
                tier.bytes += size
                tier.seconds += time.perf_counter() - began
                tier.calls += 1
        except BaseException as error:
            self._error = error
        finally:
            self._work = self._arrive = None  # these functions refer to the model
            self._ended.set()

    def __enter__(self) -> HostCall:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.unwanted = kind is not None
        interrupted: BaseException | None = None
        while not self._ended.is_set():
            try:
                self._ended.wait()
            except BaseException as caught:  # Ctrl-C while waiting: raised once the call has ended
                self.unwanted = True
                interrupted = caught
        failed = self._error
        self._error = None
        if kind is None and (interrupted or failed):
            raise interrupted or failed  # type: ignore[misc]


class HostTier:
    """A thread that runs one layer's call after another, for all passes; the kernels of a call use several threads."""

    def __init__(self, threads: int | None = None, rate: float | None = None, link: CudaLink | None = None) -> None:
        """Start the thread.

        `threads` run the kernels (default: torch's number; torch's products always use that, as their bits may depend
        on it). A call reads at most `rate` bytes of weights a second. `link` leads to a device other than the host.
        """
        self.threads = threads
        self.rate = rate
        self.link = link
        # bytes read, seconds spent and calls made since the start
        self.bytes = 0
        self.seconds = 0.0
        self.calls = 0
        self.closed = self._ended = False  # once closed, calls run on their callers' threads
        self.counting = threading.Lock()
        self._norms: weakref.WeakKeyDictionary[torch.nn.Module, torch.nn.Module] = weakref.WeakKeyDictionary()
        self._jobs: queue.SimpleQueue[HostCall | None] = queue.SimpleQueue()  # a finalizer may put into it anywhere
        self._thread = threading.Thread(target=self._run, name="moepack-host", daemon=True)
        self._thread.start()

    def beside(self, work: Work, arrive: Callable[[], tuple[Tensor, ...]] = tuple) -> HostCall:
        """Begin a call, which runs `work` on the result of `arrive`. Leaving its context raises errors of both."""
        job = HostCall(work, arrive)
        if self.closed:
            job.run(self)
            return job
        self._jobs.put(job)
        if self._ended:  # the thread does not take it any more
            self._drain()
        return job

    def module(self, module: Any) -> Any:
        """Return an experts module for the host: `module`, or a stand-in with a copy of a norm that has weights."""
        if not getattr(module, "has_post_expert_norm", False):
            return module
        if module not in self._norms:
            self._norms[module] = copy.deepcopy(module.post_expert_norm).to("cpu")
        attributes = {name: getattr(module, name, None) for name in ("has_gate", "act_fn", "_apply_gate")}
        return SimpleNamespace(**attributes, has_post_expert_norm=True, post_expert_norm=self._norms[module])

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run(self)
            del job
        self._ended = True
        self._drain()

    def _drain(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (job := self._jobs.get_nowait()) is not None:
                    job.run(self)

    def close(self, wait: bool = True) -> None:
        """End the thread once the calls made so far have run. May be called twice."""
        self.closed = True
        self._jobs.put(None)
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()
