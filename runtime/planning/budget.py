"""The budget of device memory: named reservations whose sum never passes it, at any instant. Standard library only.

Counts bytes that others say they take or give back; allocates nothing and knows no device.
"""

from __future__ import annotations

import threading


class BudgetTracker:
    """Admission by bytes (dynaexq, section 3.3). Every method may be called from any thread.

    A reservation is made before the memory it stands for is touched, and released after that memory is given back:
    what is really taken is then never more than what is reserved.

    Attributes:
        budget: bytes of device memory for everything.
    """

    def __init__(self, budget: int, fixed: int = 0) -> None:
        """Reserve `fixed` bytes (M_fixed: what is no expert and does not change) under the name "fixed".

        Raises:
            ValueError: when they pass the budget.
        """
        if budget < 0 or not 0 <= fixed <= budget:
            raise ValueError(f"{fixed} fixed bytes do not fit a budget of {budget}")
        self.budget = budget
        self._lock = threading.Lock()
        self._named = {"fixed": fixed}
        self._reserved = self._peak = fixed
        self._refusals = 0

    def try_reserve(self, name: str, size: int) -> bool:
        """Reserve `size` bytes more under a name, or refuse and change nothing. Never waits.

        Raises:
            ValueError: for a negative size.
        """
        if size < 0:
            raise ValueError(f"{name}: {size} bytes cannot be reserved")
        with self._lock:
            if self._reserved + size > self.budget:
                self._refusals += 1
                return False
            self._reserved += size
            self._peak = max(self._peak, self._reserved)
            self._named[name] = self._named.get(name, 0) + size
            return True

    def release(self, name: str, size: int) -> None:
        """Give back `size` bytes of a name.

        Raises:
            ValueError: when the name does not hold that many.
        """
        with self._lock:
            held = self._named.get(name, 0)
            if not 0 <= size <= held:
                raise ValueError(f"{name}: {size} bytes released, {held} are reserved")
            self._named[name] = held - size
            self._reserved -= size

    def held(self, name: str) -> int:
        """Bytes reserved under a name."""
        with self._lock:
            return self._named.get(name, 0)

    @property
    def reserved(self) -> int:
        """Bytes reserved now."""
        with self._lock:
            return self._reserved

    @property
    def free(self) -> int:
        """Bytes of the budget that are not reserved."""
        return self.budget - self.reserved

    @property
    def peak(self) -> int:
        """The most bytes that were ever reserved at one time."""
        with self._lock:
            return self._peak

    @property
    def refusals(self) -> int:
        """How many reservations were refused."""
        with self._lock:
            return self._refusals

    def named(self) -> dict[str, int]:
        """All reservations by name."""
        with self._lock:
            return dict(self._named)
