"""What paging needs of a kind of device: where pages are, and how their bytes get there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moepack.runtime.experts.handles import Snapshot

from .address_space import CpuAddressSpace, Page
from .window import Compute, Filled, LayerRun

if TYPE_CHECKING:
    from .cuda_space import CudaAddressSpace


class PageFiller(Protocol):
    """Fills pages on one kind of device. Other code hands on what `over` and `read` return.

    As it stands here, all work of a call is done when the call returns.
    """

    space: CpuAddressSpace | CudaAddressSpace

    def chosen(self, index: Tensor) -> npt.NDArray[np.int64]:
        """Return the router's choice on the host; from a device, once all earlier work of this thread has ended."""

    def pages(
        self, paging: Any, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> Any:
        """Return one run's `RunPages` (run_pages.py)."""

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> Any:
        """Return what decodes an expert's extent to its pages."""

    def read(self, loader: int, position: int, expert: int) -> tuple[Any, int]:
        """Read a stored extent; return what decodes it, and its bytes.

        A loader fills pages from what it has read before it reads again.

        Raises:
            BundleError: when the extent is damaged.
        """

    def fill(self, loader: int, packed: Any, page: Page) -> Filled | None:
        """Decode a page's bytes to their place. They are there on return, or once the result has ended.

        Raises:
            BundleError: when they are damaged.
        """

    def issued(self) -> tuple[Compute, ...]:
        """Return events behind everything that loaders have issued."""
        return ()

    def follow(self) -> None:
        """Order what this thread issues from now on behind everything that loaders have issued."""
        return None

    def rest(self, loader: int) -> None:
        """Wait for a loader's work, at the end of its thread."""
        return None

    def close(self) -> None:
        """Free everything, once nothing reads or writes it. May be called twice."""
        return None
