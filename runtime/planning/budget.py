"""The budget of device memory: named reservations whose sum never exceeds the budget. Standard library only.

This module only counts bytes; other code takes memory and gives it back.
"""

from __future__ import annotations

import threading


class BudgetTracker:
    """Named reservations of bytes within a budget (dynaexq, section 3.3). Any thread may call every method.

    Reserve before memory is taken, and release after it is given back: the memory in use then never exceeds the
    reservations.
    """

    def __init__(self, budget: int, fixed: int = 0) -> None:
        """Reserve `fixed` bytes (M_fixed, planning/fixed.py) under the name "fixed".

        Raises:
            ValueError: when the fixed bytes exceed the budget.
        """
        if budget < 0 or not 0 <= fixed <= budget:
            raise ValueError(f"{fixed} fixed bytes do not fit a budget of {budget}")
        self.budget = budget  # bytes of device memory for everything
        self._lock = threading.Lock()
        self._named = {"fixed": fixed}
        self.reserved = self.peak = fixed  # bytes reserved now, and the most at one time

    def try_reserve(self, name: str, size: int) -> bool:
        """Reserve `size` more bytes under a name and return True, or change nothing and return False. Never waits.

        Raises:
            ValueError: for a negative size.
        """
        if size < 0:
            raise ValueError(f"{name}: {size} bytes cannot be reserved")
        with self._lock:
            if self.reserved + size > self.budget:
                return False
            self.reserved += size
            self.peak = max(self.peak, self.reserved)
            self._named[name] = self._named.get(name, 0) + size
            return True

    def release(self, name: str, size: int) -> None:
        """Release `size` bytes of a name. Raises ValueError when fewer are reserved under this name."""
        with self._lock:
            held = self._named.get(name, 0)
            if not 0 <= size <= held:
                raise ValueError(f"{name}: {size} bytes released, {held} are reserved")
            self._named[name] = held - size
            self.reserved -= size

    def held(self, name: str) -> int:
        """Return the bytes reserved under a name."""
        return self._named.get(name, 0)

    @property
    def free(self) -> int:
        """Bytes of the budget that are not reserved."""
        return self.budget - self.reserved

    def named(self) -> dict[str, int]:
        """Return all reservations by name."""
        with self._lock:
            return dict(self._named)
