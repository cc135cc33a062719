"""What paging needs of a kind of device: where pages are, and how their bytes get there. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moepack.runtime.experts.handles import Snapshot

from .address_space import AddressSpace, Page
from .window import Compute, Filled, LayerRun


class PageFiller(Protocol):
    """One device's. What is packed is whatever `over` or `read` made; other code only hands it on."""

    @property
    def space(self) -> AddressSpace:
        """Where pages are."""

    def chosen(self, index: Tensor) -> npt.NDArray[np.int64]:
        """The router's choice on the host. Where it has to come there, whatever this thread issued before has ended."""

    def pages(
        self, paging: Any, run: LayerRun, snapshot: Snapshot, position: int, active: Sequence[int], step: Any
    ) -> Any:
        """One run's `RunPages` (run_pages.py), as the forward pass asks for them."""

    def over(self, position: int, expert: int, extent: Tensor, where: str) -> Any:
        """What decodes an expert's extent to its pages."""

    def read(self, loader: int, position: int, expert: int) -> tuple[Any, int]:
        """The same of what is stored, brought to where it is decoded from, and the bytes that were read. `loader` is
        the calling thread's number; it fills from what it read before it reads again.

        Raises:
            BundleError: where it is damaged.
        """

    def fill(self, loader: int, packed: Any, page: Page) -> Filled | None:
        """Decode a page's bytes to their place: all is there when this returns, or once what is returned has ended.

        Raises:
            BundleError: where it is damaged.
        """

    def issued(self) -> tuple[Compute, ...]:
        """Behind everything that loaders have issued so far."""

    def follow(self) -> None:
        """What this thread issues from now on, its marks too, comes after all that."""

    def rest(self, loader: int) -> None:
        """A loader's thread ends: wait until what it began has."""

    def close(self) -> None:
        """Give everything back. Nothing is read or written any more. May be called twice."""
